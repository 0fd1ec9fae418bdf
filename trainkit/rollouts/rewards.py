"""Calls of reward and metric functions: arguments are copied, calls limited and repeated, and results are checked."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import numpy as np
import tenacity
import torch
from torch import Tensor

from trainkit.config import RewardFunctionConfig
from trainkit.data import Rollouts, Row, finite
from trainkit.data.batches import GIVEN, columns_of
from trainkit.data.formats import plain
from trainkit.errors import ConfigError, RewardError, describe
from trainkit.rollouts.calls import NAME as WORKER
from trainkit.rollouts.calls import Result, in_worker
from trainkit.seeding import PLACE, remember_generators

log = logging.getLogger(__name__)

T = TypeVar("T")

RewardFn = Callable[..., Any]
"""Returns the scores of samples; see `score`."""
MetricFn = Callable[..., Mapping[str, Any]]
"""Returns numbers about samples by name; see `metrics`."""

CONTRACT = (
    "return one finite number per sample (list, tuple, NumPy array or tensor [B]), or for dense rewards one list, "
    "array or 1-D tensor per sample with at most as many numbers as its response has tokens"
)
UNLIMITED = RewardFunctionConfig(timeout=None)
"""Calls without a time limit and without repetitions."""
FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
"""Seconds before the first repetition of a call, and at most; up to one second of jitter is added to each wait."""
MOST_PROMPTS = 6
"""Prompts that errors name by their numbers."""
MAIN_THREAD = ". It was called in a thread, because reward.timeout is set; if it needs the main thread, set it to null"
METRIC_CONTRACT = "return a dict of name -> number or list of numbers, finite, one per sample"


class Scored(Protocol):
    """The interface of what is scored and measured: responses of text, or the output of another kind of model."""

    @property
    def rows(self) -> list[Row]:
        """The row that each response belongs to."""

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of reward and metric functions besides the columns."""

    def __len__(self) -> int: ...


def score(
    reward_fn: RewardFn,
    rollouts: Rollouts,
    tokenizer: Any,
    config: RewardFunctionConfig = UNLIMITED,
    *,
    step: int | None = None,
    alone: bool = True,
    extras: dict[str, list[Any]] | None = None,
) -> Tensor:
    """Call ``reward_fn(samples=, prompts=, outputs=, tokenizer=, **columns)`` and check what it returns.

    Args:
        reward_fn: the function; a coroutine that it returns is awaited.
        rollouts: what it scores.
        tokenizer: the tokenizer that it gets.
        config: its time limit and repetitions, and whether scores may be infinite or NaN; by default none of them.
        step: the step to name in errors.
        alone: as in `answer`.
        extras: gets what the function returns besides scores, by name, a value for each sample.

    Returns:
        Scores [B] in float32, or dense rewards [B, T] at the positions of their response tokens.

    Raises:
        RewardError: the function raised an exception, took too long or returned something else; names it and the row.
    """
    with at_step(step):
        scores, further = _parted(
            answer(reward_fn, rollouts, config, alone=alone, tokenizer=tokenizer), len(rollouts), name_of(reward_fn)
        )
        (extras if extras is not None else {}).update(further)
        name = name_of(reward_fn)
        return check_scores(scores, rollouts, name, on_nonfinite=config.on_nonfinite, tokenizer=tokenizer)


def _parted(returned: Any, count: int, source: str) -> tuple[Any, dict[str, list[Any]]]:
    """Return the scores among what a reward function returned, and what else it returned, by name."""
    columns = returned
    if isinstance(returned, list | tuple) and returned and all(isinstance(each, Mapping) for each in returned):
        if (other := next((each for each in returned if each.keys() != returned[0].keys()), None)) is not None:
            raise RewardError(
                f"{source} returned a mapping with {', '.join(other)} for one sample and one with "
                f"{', '.join(returned[0])} for another; give the same names for all"
            )
        columns = {name: [each[name] for each in returned] for name in returned[0]}
    if not isinstance(columns, Mapping):
        return returned, {}
    if "score" not in columns:
        raise RewardError(f"{source} returned {describe(returned)} without 'score', the name of the scores; {CONTRACT}")
    further = {name: _listed(values) for name, values in columns.items() if name != "score"}
    for name, values in further.items():
        if not isinstance(name, str) or name in RESERVED:
            raise RewardError(f"{source} returned {name!r}, a name that trainkit uses itself; choose another")
        if not isinstance(values, list) or len(values) != count:
            raise RewardError(
                f"{source} returned {describe(values)} as {name!r}; give a list of {count}, one per sample"
            )
    return columns["score"], further


def _listed(values: Any) -> Any:
    """Return a list of plain values for a list of them or a vector; anything else unchanged."""
    if isinstance(values, Tensor | np.ndarray) and values.ndim == 1:
        return values.tolist()
    return [plain(value) for value in values] if isinstance(values, list | tuple) else values


def numbers_of(values: Sequence[Any]) -> list[float]:
    """Return the finite numbers of a column of numbers; none of one that has anything else besides None."""
    values_given = [value for value in values if value is not None]
    if not all(isinstance(value, int | float) for value in values_given):
        return []
    return [float(value) for value in values_given if math.isfinite(value)]


def check_scores(
    scores: Any, rollouts: Rollouts, source: str, *, on_nonfinite: str = "error", tokenizer: Any = None
) -> Tensor:
    """Convert ``scores`` of any allowed form to a tensor [B] or [B, T]; ``source`` is named in errors.

    With ``on_nonfinite`` as in `reward.on_nonfinite`, infinite scores and NaN are returned if they are dealt with. With
    a ``tokenizer``, rewards of the tokens that the output is encoded as are placed at those that were sampled.

    Raises:
        RewardError: the type, count or length is wrong, or a number is not finite.
    """
    _check_list(scores, len(rollouts), source, CONTRACT)

    def number(value: Any, row: int) -> float:
        return _number(value, source, _which(rollouts, row), on_nonfinite=on_nonfinite)

    if len(scores) and all(_is_vector(s) for s in scores):
        return _dense(scores, rollouts, source, number, tokenizer)
    return torch.tensor([number(s, row) for row, s in enumerate(scores)], dtype=torch.float32)


def check_numbers(values: Any, count: int, source: str, contract: str) -> Tensor:
    """Convert ``values`` of any list-like form to a tensor [B], float32; errors quote ``source`` and ``contract``.

    Raises:
        RewardError: the type or count is wrong, or a value is not a finite number.
    """
    _check_list(values, count, source, contract)
    numbers = [_number(value, source, f"sample {row}", contract) for row, value in enumerate(values)]
    return torch.tensor(numbers, dtype=torch.float32)


def _check_list(values: Any, count: int, source: str, contract: str) -> None:
    _refuse_unreadable(values, source, contract)
    if isinstance(values, str | bytes | Mapping | Set) or not hasattr(values, "__len__"):
        raise RewardError(f"{source} returned {describe(values)}; {contract}")
    if isinstance(values, Tensor | np.ndarray) and values.ndim != 1:
        raise RewardError(
            f"{source} returned a {values.ndim}-D array of shape {tuple(values.shape)}; {contract}. "
            "Padding cannot be told apart from rewards: write .squeeze(1) for [B, 1], a list per sample if dense"
        )
    if len(values) != count:
        raise RewardError(f"{source} returned {len(values)} scores for {count} samples; {contract}")


def _refuse_unreadable(value: Any, source: str, contract: str) -> None:
    """Raise a `RewardError` for a masked array and a tensor without data: they have no numbers, or not all of them."""
    if isinstance(value, np.ma.MaskedArray):
        raise RewardError(
            f"{source} returned {describe(value)}, a masked array, and what is masked has no number; {contract}. "
            "Give a number for every element, for example by .filled(0)"
        )
    if isinstance(value, Tensor) and value.is_meta:
        raise RewardError(
            f"{source} returned {describe(value)}, a tensor on the device 'meta', which has no data; {contract}. "
            "Compute on a real device"
        )


def _dense(
    scores: Sequence[Any], rollouts: Rollouts, source: str, number: Callable[[Any, int], float], tokenizer: Any
) -> Tensor:
    """Place per-token scores at the first response tokens of each row. -> [B, T]."""
    mask = rollouts.sequences.response_mask.cpu()
    lengths = mask.sum(1).tolist()
    if all(len(s) == 1 for s in scores) and any(n > 1 for n in lengths):
        raise RewardError(
            f"{source} returned lists of one number each, which could mean a score per sample or a reward for the "
            f"first token; {CONTRACT}"
        )
    dense = torch.zeros(mask.shape, dtype=torch.float32)
    for row, (values, length) in enumerate(zip(scores, lengths, strict=True)):
        _refuse_unreadable(values, source, CONTRACT)
        numbers = [number(value, row) for value in values]
        if tokenizer is not None and len(numbers) != length:
            ids = rollouts.responses[row].tolist()
            if (moved := moved_to_sampled(numbers, ids, rollouts.outputs[row], tokenizer)) is not None:
                _say_moved(source)
                numbers = moved
        if len(numbers) > length:
            raise RewardError(
                f"{source} returned {len(numbers)} rewards for {_which(rollouts, row)}, "
                f"whose response has {length} tokens; {CONTRACT}"
            )
        dense[row, mask[row].nonzero()[: len(numbers), 0]] = torch.tensor(numbers, dtype=torch.float32)
    return dense


def moved_to_sampled(rewards: list[float], sampled: list[int], text: str, tokenizer: Any) -> list[float] | None:
    """Return rewards of the tokens that a text is encoded as, as rewards of the tokens that were sampled.

    A reward goes to the sampled token with the last character of its own token, so their sum does not change.

    Args:
        rewards: a reward for each token of the text, special tokens and a final EOS included or not.
        sampled: the ids whose text it is.
        text: the text.
        tokenizer: encodes and decodes.

    Returns:
        A reward for each id; None if the text is encoded as another number of tokens, or as the ids themselves.
    """
    forms = ({"text": text}, {"text": text + (tokenizer.eos_token or "")}, {"text": text, "add_special_tokens": False})
    encoded = ([*tokenizer(**form)["input_ids"]] for form in forms)
    ids = next((each for each in encoded if len(each) == len(rewards)), None)
    if not sampled or ids is None or ids == sampled[: len(ids)]:
        return None
    ends, moved = _ends(sampled, tokenizer), [0.0] * len(sampled)
    for reward, end in zip(rewards, _ends(ids, tokenizer), strict=True):
        moved[min(bisect_left(ends, end), len(sampled) - 1)] += reward
    return moved


def _ends(ids: list[int], tokenizer: Any) -> list[int]:
    """Return the number of characters up to the end of each token."""
    counts = (
        len(tokenizer.decode(ids[: at + 1], skip_special_tokens=True, clean_up_tokenization_spaces=False))
        for at in range(len(ids))
    )
    return [*accumulate(counts, max)]


@functools.cache
def _say_moved(source: str) -> None:
    log.warning(
        "%s returns rewards for the tokens that an output is encoded as, and other tokens were sampled; each goes to "
        "the sampled token with the last character of its own",
        source,
    )


def metrics(metric_fn: MetricFn, rollouts: Scored) -> dict[str, float | list[float]]:
    """Call ``metric_fn(samples=, prompts=, outputs=, **columns)`` and check its numbers.

    Returns:
        By name, one number for all samples, or a list with one per sample.

    Raises:
        RewardError: the function raised an exception or did not return a mapping of numbers; names the function.
    """
    source = name_of(metric_fn)
    result = call(metric_fn, rollouts)
    if not isinstance(result, Mapping):
        raise RewardError(f"{source} returned {describe(result)}; {METRIC_CONTRACT}")
    checked: dict[str, float | list[float]] = {}
    for name, value in result.items():
        if not _is_vector(value):
            checked[name] = _number(value, f"{source}[{name!r}]", "", METRIC_CONTRACT)
            continue
        if len(value) != len(rollouts):
            raise RewardError(
                f"{source} returned {len(value)} values of {name!r} for {len(rollouts)} samples; {METRIC_CONTRACT}"
            )
        checked[name] = [_number(v, f"{source}[{name!r}]", f"sample {i}", METRIC_CONTRACT) for i, v in enumerate(value)]
    return checked


RESERVED = (
    *("prompt", "output", "image", "reward", "length", "time", "turns", "failed", "episode"),
    *("columns", "advantage", "step", "kind", "setting"),
)
"""Names that evaluations, and the lines of samples, use in records and metrics themselves."""

FURTHER = "reward_fn/"
"""What the names of metrics begin with that are means of what a reward function returns besides scores."""

Record = dict[str, Any]
"""One response of an evaluation: its prompt, its output, and numbers about it."""


def measure(
    metric_fn: MetricFn | None, rollouts: Scored, known: Mapping[str, Sequence[Any]]
) -> tuple[dict[str, float], list[Record]]:
    """Return ``metric_fn``'s numbers about all responses, and a record of each: ``known`` and its own numbers.

    Raises:
        RewardError: as `metrics`; or ``metric_fn`` returned one of the `RESERVED` names. ``"reward"`` is the reward of
            responses that have no other.
    """
    whole: dict[str, float] = {}
    columns: dict[str, Sequence[Any]] = {**known}
    for name, value in (metrics(metric_fn, rollouts) if metric_fn else {}).items():
        if name in known or (name in RESERVED and name != "reward"):
            raise RewardError(f"metric_fn returned {name!r}, a name that evaluations use themselves; choose another")
        if isinstance(value, list):
            columns[name] = value
        else:
            whole[name] = value
    return whole, [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def means(records: Sequence[Record], wholes: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Return means by name: of the records' numbers, and of ``wholes``, (count, numbers) of sets of responses.

    What is None, or not finite, counts in no mean.
    """
    names = dict.fromkeys(name for record in records for name in record)
    numbers = {name: numbers_of([record.get(name) for record in records]) for name in names}
    by_name = {name: sum(values) / len(values) for name, values in numbers.items() if values}
    total = sum(count for count, _ in wholes)
    for name in wholes[0][1]:
        by_name[name] = sum(count * whole[name] for count, whole in wholes) / total
    return by_name


def call(fn: Callable[..., Any], rollouts: Scored, **extra: Any) -> Any:
    """Return ``fn(**rollouts.given, **extra, **columns)``, called with autocast disabled.

    Raises:
        RewardError: ``fn`` raised an exception, or a column has the name of one of its other arguments.
    """
    columns, texts = columns_of(rollouts.rows), rollouts.given
    if taken := [name for name in columns if name in {*GIVEN, *texts}]:
        raise RewardError(
            f"{name_of(fn)} gets {', '.join(GIVEN if taken[0] in GIVEN else texts)} from trainkit, and the prompts "
            f"have a column {taken[0]!r}; rename the column"
        )
    arguments = {**texts, **extra, **{name: [_copied(v) for v in values] for name, values in columns.items()}}
    arguments_said = f" and the keywords {', '.join(arguments)}"
    with _default_dtype_kept(fn), explained(fn, rollouts, arguments_said), _without_autocast():
        return fn(**arguments)


def check_keywords(fn: Callable[..., Any], what: str, keywords: Iterable[str], columns: Iterable[str]) -> None:
    """Raise a `ConfigError` if a function does not take a keyword that it will be called with.

    Args:
        fn: the function; one whose signature is not known, such as one written in C, is not checked.
        what: what it is, in the message: a reward function or a metric function.
        keywords: what trainkit calls it with.
        columns: the columns of the prompts, which it gets, too.
    """
    try:
        parameters = inspect.signature(fn, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return
    named = {each.name for each in parameters if each.kind is not inspect.Parameter.POSITIONAL_ONLY}
    if unknown := [name for name in (*keywords, *columns) if name not in named]:
        accepted = [each.name for each in parameters if each.name in named]
        raise ConfigError(
            f"the {what} {name_of(fn)} does not take {', '.join(unknown)}, and is called with the keywords "
            f"{', '.join((*keywords, *columns))}; write def {getattr(fn, '__name__', 'score')}"
            f"({', '.join([*accepted, '**kwargs'])})"
        )


def answer(fn: RewardFn, rollouts: Scored, config: RewardFunctionConfig, *, alone: bool = True, **extra: Any) -> Any:
    """Return what `call` returns, or the result of a coroutine, within the time limit and with repetitions.

    Each call gets new copies of the arguments, and the global generators as they were at the first call.

    Args:
        fn: the function.
        rollouts: what it is called for.
        config: its time limit, and after which exceptions it is called again.
        alone: whether no other thread trains, so that the global generators of torch can be set back.
        **extra: as in `call`.

    Raises:
        RewardError: as `call`; or the call took longer than ``config.timeout``, or the last repetition failed, too.
    """
    return repeated(lambda: _one_answer(fn, rollouts, config.timeout, extra), name_of(fn), config, alone=alone)


def _one_answer(fn: RewardFn, rollouts: Scored, timeout: float | None, extra: dict[str, Any]) -> Any:
    def make() -> Any:
        return call(fn, rollouts, **extra)

    if timeout is None:
        value = make()
        if not inspect.isawaitable(value):
            return value
        make = partial(_itself, value)
    with _default_dtype_kept(fn), explained(fn, rollouts):
        return settled(in_worker(make, timeout), fn, rollouts, timeout)


def _itself(value: Any) -> Any:
    return value


def settled(result: Result, fn: RewardFn, rollouts: Scored, timeout: float | None) -> Any:
    """Return the value of a call of ``fn``; raise its error, or a `RewardError` if it was given up."""
    if result.given_up:
        raise RewardError(
            f"{name_of(fn)} took longer than reward.timeout, {timeout:g} s ({_called_with(rollouts)}); it is not "
            "waited for, and not called again. Raise reward.timeout (null: no limit), or give what the function waits "
            "for a shorter limit of its own, whose exception reward.retry_on can name"
        )
    if result.error is not None:
        raise result.error
    return result.value


def repeated(attempt: Callable[[], T], source: str, config: RewardFunctionConfig, *, alone: bool = True) -> T:
    """Return ``attempt()``; repeat it after errors whose cause `reward.retry_on` names; arguments as in `answer`."""
    if not config.retries:
        return attempt()
    restore = remember_generators(of_torch=alone)

    def once_more() -> T:
        restore()  # also what the waiting has drawn
        return attempt()

    def tell(state: tenacity.RetryCallState) -> None:
        assert state.outcome is not None
        assert state.next_action is not None
        cause = getattr(state.outcome.exception(), "__cause__", None)
        log.warning(
            "%s raised %s: %s; it is called again in %.1f s (%d of %d, reward.retries)",
            source,
            type(cause).__name__,
            cause,
            state.next_action.sleep,
            state.attempt_number,
            config.retries,
        )

    retrying = tenacity.Retrying(
        stop=tenacity.stop_after_attempt(config.retries + 1),
        wait=tenacity.wait_exponential_jitter(initial=FIRST_WAIT, max=LONGEST_WAIT),
        retry=tenacity.retry_if_exception(lambda error: is_named(error.__cause__, config.retry_on)),
        before_sleep=tell,
        reraise=True,
    )
    return retrying(once_more)


def is_named(error: BaseException | None, names: Sequence[str]) -> bool:
    """Return whether the class of an exception, or one of its bases, has one of the names, with or without module."""
    of_error = {
        name
        for kind in type(error).__mro__
        for name in (kind.__name__, kind.__qualname__, f"{kind.__module__}.{kind.__qualname__}")
    }
    return error is not None and not of_error.isdisjoint(names)


@contextmanager
def at_step(step: int | None) -> Iterator[None]:
    """Name the step in a `RewardError` that is raised within the context; None: no step is known."""
    try:
        yield
    except RewardError as error:
        if step is None:
            raise
        raise RewardError(f"after step {step}: {error}") from error.__cause__


@contextmanager
def explained(fn: Callable[..., Any], rollouts: Scored, also: str = "") -> Iterator[None]:
    """Raise exceptions of ``fn`` within the context as a `RewardError` that names ``fn``."""
    try:
        yield
    except RewardError:
        raise
    except Exception as error:
        bound = threading.current_thread().name == WORKER and "thread" in str(error)
        raise RewardError(
            f"{name_of(fn)} raised {type(error).__name__}: {error} ({_called_with(rollouts)}{also}). "
            f"No step was made with its result; fix the function{MAIN_THREAD if bound else ''}"
        ) from error


def _called_with(rollouts: Scored) -> str:
    """Return how many samples a function was called with, and to which prompts of the dataset, as far as known."""
    places = [row[PLACE].row for row in rollouts.rows if PLACE in row]
    numbers = list(dict.fromkeys(str(row) for row in places if row is not None))
    shown = ", ".join([*numbers[:MOST_PROMPTS], *["…"] * (len(numbers) > MOST_PROMPTS)])
    prompts = f" of the prompt{'s' if len(numbers) > 1 else ''} {shown}" if numbers else ""
    return f"called with {len(rollouts)} samples{prompts}"


def _which(rollouts: Scored, row: int) -> str:
    """Return which sample ``row`` is, for error messages: its number, and that of its prompt in the dataset."""
    place = rollouts.rows[row].get(PLACE)
    return f"sample {row}" if place is None or place.row is None else f"sample {row} (of prompt {place.row})"


@contextmanager
def _default_dtype_kept(fn: Callable[..., Any]) -> Iterator[None]:
    """Raise a `RewardError` if torch's default dtype, which holds for the whole process, is changed in the context."""
    before = torch.get_default_dtype()
    try:
        yield
    finally:
        now = torch.get_default_dtype()
        torch.set_default_dtype(before)
    if now != before:
        raise RewardError(
            f"{name_of(fn)} has set torch's default dtype from {before} to {now}, also for the model that is trained; "
            "give the dtype where a tensor is made, or set the default back before the function returns"
        )


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Disable autocast within the context, so that a function computes the same in threads and at evaluations."""
    accelerator = torch.accelerator.current_accelerator()
    kinds = {"cpu", "cpu" if accelerator is None else accelerator.type}
    with ExitStack() as stack:
        for kind in kinds:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def _copied(value: Any) -> Any:
    """Copy a value, so that the function cannot change the dataset; return it unchanged if it cannot be copied."""
    try:
        return copy.deepcopy(value)
    except Exception:
        return value


def name_of(fn: Callable[..., Any]) -> str:
    """Return a function's name and module, for error messages."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return f"{getattr(fn, '__qualname__', type(fn).__qualname__)} ({getattr(fn, '__module__', '?')})"


def _is_vector(value: Any) -> bool:
    return isinstance(value, list | tuple) or (isinstance(value, Tensor | np.ndarray) and value.ndim == 1)


def _number(value: Any, source: str, which: str, contract: str = CONTRACT, *, on_nonfinite: str = "error") -> float:
    """Return a number that a function returned; ``which`` is the sample that it belongs to, or empty."""
    at = f" for {which}" if which else ""
    _refuse_unreadable(value, source, contract)
    value = plain(value)
    number = finite(value)
    if number is not None:
        return number
    if isinstance(value, int | float):
        if on_nonfinite == "drop_row" or (on_nonfinite == "clip" and value == value):
            return math.nan if value != value else math.inf if value > 0 else -math.inf
        raise RewardError(f"{source} returned {describe(value)}{at}; numbers must be finite in float32. {contract}")
    raise RewardError(f"{source} returned {describe(value)}{at}; {contract}")
