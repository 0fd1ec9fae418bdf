"""Calls of reward and metric functions: their arguments are copied, and their results are checked."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from trainkit.data import Rollouts, Row, finite
from trainkit.data.batches import GIVEN, columns_of
from trainkit.data.formats import plain
from trainkit.errors import RewardError, describe

RewardFn = Callable[..., Any]
"""Returns the scores of samples; see `score`."""
MetricFn = Callable[..., Mapping[str, Any]]
"""Returns numbers about samples by name; see `metrics`."""

CONTRACT = (
    "return one finite number per sample (list, tuple, NumPy array or tensor [B]), or for dense rewards one list, "
    "array or 1-D tensor per sample with at most as many numbers as its response has tokens"
)
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


def score(reward_fn: RewardFn, rollouts: Rollouts, tokenizer: Any) -> Tensor:
    """Call ``reward_fn(samples=, prompts=, outputs=, tokenizer=, **columns)`` and check what it returns.

    Returns:
        Scores [B] in float32, or dense rewards [B, T] at the positions of their response tokens.

    Raises:
        RewardError: the function raised an exception or returned something else; names it and the row.
    """
    return check_scores(call(reward_fn, rollouts, tokenizer=tokenizer), rollouts, name_of(reward_fn))


def check_scores(scores: Any, rollouts: Rollouts, source: str) -> Tensor:
    """Convert ``scores`` of any allowed form to a tensor [B] or [B, T]; ``source`` is named in errors.

    Raises:
        RewardError: the type, count or length is wrong, or a number is not finite.
    """
    _check_list(scores, len(rollouts), source, CONTRACT)
    if len(scores) and all(_is_vector(s) for s in scores):
        return _dense(scores, rollouts, source)
    return torch.tensor([_number(s, source, i) for i, s in enumerate(scores)], dtype=torch.float32)


def check_numbers(values: Any, count: int, source: str, contract: str) -> Tensor:
    """Convert ``values`` of any list-like form to a tensor [B], float32; errors quote ``source`` and ``contract``.

    Raises:
        RewardError: the type or count is wrong, or a value is not a finite number.
    """
    _check_list(values, count, source, contract)
    return torch.tensor([_number(v, source, i, contract) for i, v in enumerate(values)], dtype=torch.float32)


def _check_list(values: Any, count: int, source: str, contract: str) -> None:
    if isinstance(values, str | bytes | Mapping | Set) or not hasattr(values, "__len__"):
        raise RewardError(f"{source} returned {describe(values)}; {contract}")
    if isinstance(values, Tensor | np.ndarray) and values.ndim != 1:
        raise RewardError(
            f"{source} returned a {values.ndim}-D array of shape {tuple(values.shape)}; {contract}. "
            "Padding cannot be told apart from rewards: write .squeeze(1) for [B, 1], a list per sample if dense"
        )
    if len(values) != count:
        raise RewardError(f"{source} returned {len(values)} scores for {count} samples; {contract}")


def _dense(scores: Sequence[Any], rollouts: Rollouts, source: str) -> Tensor:
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
        if len(values) > length:
            raise RewardError(
                f"{source} returned {len(values)} rewards for sample {row}, "
                f"whose response has {length} tokens; {CONTRACT}"
            )
        numbers = torch.tensor([_number(v, source, row) for v in values], dtype=torch.float32)
        dense[row, mask[row].nonzero()[: len(values), 0]] = numbers
    return dense


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
            checked[name] = _number(value, f"{source}[{name!r}]", None, METRIC_CONTRACT)
            continue
        if len(value) != len(rollouts):
            raise RewardError(
                f"{source} returned {len(value)} values of {name!r} for {len(rollouts)} samples; {METRIC_CONTRACT}"
            )
        checked[name] = [_number(v, f"{source}[{name!r}]", i, METRIC_CONTRACT) for i, v in enumerate(value)]
    return checked


RESERVED = ("prompt", "output", "image", "reward", "length", "time", "turns", "failed", "episode")
"""Names that evaluations use in records and metrics themselves."""

Record = dict[str, Any]
"""One response of an evaluation: its prompt, its output, and numbers about it."""


def measure(
    metric_fn: MetricFn | None, rollouts: Scored, known: Mapping[str, Sequence[Any]]
) -> tuple[dict[str, float], list[Record]]:
    """Return ``metric_fn``'s numbers about all responses, and a record of each: ``known`` and its own numbers.

    Raises:
        RewardError: as `metrics`; or ``metric_fn`` returned one of the `RESERVED` names.
    """
    whole: dict[str, float] = {}
    columns: dict[str, Sequence[Any]] = {**known}
    for name, value in (metrics(metric_fn, rollouts) if metric_fn else {}).items():
        if name in RESERVED:
            raise RewardError(f"metric_fn returned {name!r}, a name that evaluations use themselves; choose another")
        if isinstance(value, list):
            columns[name] = value
        else:
            whole[name] = value
    return whole, [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def means(records: Sequence[Record], wholes: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Return means by name: of the records' numbers, and of ``wholes``, (count, numbers) of sets of responses."""
    names = [name for name, value in records[0].items() if isinstance(value, int | float)]
    found = {name: sum(record[name] for record in records) / len(records) for name in names}
    total = sum(count for count, _ in wholes)
    for name in wholes[0][1]:
        found[name] = sum(count * whole[name] for count, whole in wholes) / total
    return found


def call(fn: Callable[..., Any], rollouts: Scored, **extra: Any) -> Any:
    """Return ``fn(**rollouts.given, **extra, **columns)``, called with autocast disabled.

    Raises:
        RewardError: ``fn`` raised an exception, or a column has the name of one of its other arguments.
    """
    columns, given = columns_of(rollouts.rows), rollouts.given
    if taken := [name for name in columns if name in {*GIVEN, *given}]:
        raise RewardError(
            f"{name_of(fn)} gets {', '.join(GIVEN if taken[0] in GIVEN else given)} from trainkit, and the prompts "
            f"have a column {taken[0]!r}; rename the column"
        )
    arguments = {**given, **extra, **{name: [_copied(v) for v in values] for name, values in columns.items()}}
    with explained(fn, rollouts, f" and the keywords {', '.join(arguments)}"), _without_autocast():
        return fn(**arguments)


@contextmanager
def explained(fn: Callable[..., Any], rollouts: Scored, also: str = "") -> Iterator[None]:
    """Raise exceptions of ``fn`` within the context as a `RewardError` that names ``fn``."""
    try:
        yield
    except RewardError:
        raise
    except Exception as error:
        raise RewardError(
            f"{name_of(fn)} raised {type(error).__name__}: {error} (called with {len(rollouts)} samples{also}). "
            "No step was made with its result; fix the function"
        ) from error


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


def _number(value: Any, source: str, row: int | None, contract: str = CONTRACT) -> float:
    at = "" if row is None else f" for sample {row}"
    value = plain(value)
    found = finite(value)
    if found is not None:
        return found
    if isinstance(value, int | float):
        raise RewardError(f"{source} returned {describe(value)}{at}; numbers must be finite in float32. {contract}")
    raise RewardError(f"{source} returned {describe(value)}{at}; {contract}")
