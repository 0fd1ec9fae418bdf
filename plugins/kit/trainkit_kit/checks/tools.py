"""Comparisons and measurements that several checks use."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.data import Batch, Sequences, TokenBatch
from trainkit.errors import NonFiniteError
from trainkit.metrics import Metrics
from trainkit.plugins import hookimpl
from trainkit.testing import nudged as nudged
from trainkit.trainer.base import Verdict
from trainkit_kit.failures import CheckError, require
from trainkit_kit.subjects import Bench

# ---------------------------------------------------------------------------------------------------------- comparing


def weights(trainer: Any) -> dict[str, Tensor]:
    """Return a copy of the model's state on the CPU, so that states of several devices can be compared."""
    trainer.models.build()
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in trainer.unwrapped.state_dict().items()}


def require_same_weights(one: dict[str, Tensor], other: dict[str, Tensor], what: str) -> None:
    """Fail unless two states are bit-equal; ``what`` names the two."""
    differ = [name for name in one if name not in other or not torch.equal(one[name], other[name])]
    differ += sorted(other.keys() - one.keys())
    require(not differ, f"{what} differ in {', '.join(differ[:3])}{' and more' if len(differ) > 3 else ''}")


def require_close(
    one: Tensor, other: Tensor, what: str, *, rtol: float = 1e-4, atol: float = 1e-6, tokens: Tensor | None = None
) -> None:
    """Fail unless two tensors agree, NaN with NaN; ``what`` names the two.

    The message says in which row and at which token they differ; ``tokens`` is the mask by which tokens are counted.
    """
    require(one.shape == other.shape, f"{what} have different shapes, {tuple(one.shape)} and {tuple(other.shape)}")
    if not one.is_floating_point():
        require(torch.equal(one, other), f"{what} differ in {int((one != other).sum())} of {one.numel()} elements")
        return
    if torch.allclose(one, other, rtol=rtol, atol=atol, equal_nan=True):
        return
    off = (one - other).abs().nan_to_num(nan=torch.inf).masked_fill(one.isnan() & other.isnan() | (one == other), 0.0)
    number = int((off > atol + rtol * other.abs().nan_to_num()).sum())
    raise CheckError(
        f"{what} differ by up to {float(off.max()):.3g}{place_of(off, tokens)}, and in {number} of {off.numel()} "
        f"elements; the largest element is {float(one.abs().max()):.3g}"
    )


LONG = 1000
"""Numbers in a vector from which on it is a flat gradient, and has no rows."""


def place_of(off: Tensor, tokens: Tensor | None = None) -> str:
    """Return where a tensor [B], [B, T] or [B, T, *] is largest, in words; empty for a scalar or a flat gradient.

    ``tokens`` [B, T] is true at the tokens that are counted; without it, columns are.
    """
    if not off.dim():
        return ""
    at = [int(index) for index in torch.unravel_index(off.argmax(), off.shape)]
    if len(at) == 1:
        return f" in row {at[0]}" if len(off) < LONG else ""
    if tokens is None or tokens.shape != off.shape[:2] or not tokens[at[0], at[1]]:
        return f" in row {at[0]}, column {at[1]}"
    row = tokens[at[0]]
    return f" in row {at[0]} at response token {int(row[: at[1]].sum())} of {int(row.sum())} (counted from 0)"


def require_same_gradient(
    one: Tensor, other: Tensor, what: str, *, rtol: float = 1e-4, model: nn.Module | None = None
) -> None:
    """Fail unless two gradients agree, up to rounding, and are not zero; ``what`` names the two.

    With a ``model``, the message names the parameters in which they differ most.
    """
    require(
        one.isfinite().all() and one.any(),
        f"of the {what}, the first is {'zero' if one.isfinite().all() else 'not finite'}",
    )
    try:
        require_close(one, other, what, rtol=rtol, atol=1e-5 * float(one.abs().max()))
    except CheckError as error:
        raise CheckError(f"{error}{_in_parameters(one, other, model)}") from None


def _in_parameters(one: Tensor, other: Tensor, model: nn.Module | None) -> str:
    """Return the parameter in which two flat gradients differ most, and in how many they do, in words."""
    if model is None or one.shape != other.shape:
        return ""
    named = [(name, p.numel()) for name, p in model.named_parameters() if p.requires_grad]
    sizes = [size for _, size in named]
    off = [float((a - b).norm()) for a, b in zip(one.split(sizes), other.split(sizes), strict=True)]
    differ = sum(not each <= 1e-6 * max(float(one.norm()), 1e-12) for each in off)
    worst = max(range(len(off)), key=lambda index: off[index] if off[index] == off[index] else torch.inf)
    return f"; they differ in {differ} of {len(named)} parameters, most in {named[worst][0]}"


def require_same_learning(trainer: Any, one: Batch, other: Batch, what: str, *, rtol: float = 1e-4) -> None:
    """Fail unless a trainer has the same gradient and metrics on two batches; ``what`` names the two.

    The message says from which row and token something else is learnt.
    """
    (clean, found), (changed, seen) = measured(trainer, one), measured(trainer, other)
    try:
        require_same_gradient(clean, changed, f"gradients {what}", rtol=rtol, model=trainer.unwrapped)
    except CheckError as error:
        raise CheckError(f"{error}{_in_rows(trainer, one, other)}") from None
    require_same_metrics(found, seen, f"metrics of a batch {what}")


def _in_rows(trainer: Any, one: Batch, other: Batch) -> str:
    """Return the row and the token whose credit differs most between two batches, in words."""
    try:
        return most_changed(*(credits_of(trainer, batch) for batch in (one, other)))
    except Exception:  # the garbage of a probe, or a model without log-probabilities: the gradients are told already
        return ""


def most_changed(before: dict[Ids, Tensor], after: dict[Ids, Tensor]) -> str:
    """Return the row and the token whose credit differs most, in words; empty if none does."""
    worst, told = 0.0, ""
    for index, (ids, credit) in enumerate(before.items()):
        if ids not in after or after[ids].shape != credit.shape or not credit.numel():
            continue
        off = (credit - after[ids]).abs().nan_to_num(nan=torch.inf)
        if float(off.max()) > worst:
            worst, at = float(off.max()), int(off.argmax())
            told = (
                f"; what is learnt from response token {at} of {len(credit)} of row {index}, whose ids are {ids[0]} → "
                f"{ids[1]}, is {float(credit[at]):.4g} and {float(after[ids][at]):.4g}"
            )
    return told


def require_same_metrics(one: Mapping[str, float], other: Mapping[str, float], what: str) -> None:
    """Fail unless two sets of metrics have the same names and values, up to rounding; ``what`` names the two."""
    odd = sorted(one.keys() ^ other.keys())
    require(not odd, f"{what} do not have the same names: {', '.join(odd)}")
    for name, value in one.items():
        pair = torch.tensor([value, other[name]], dtype=torch.float64)
        alike = torch.allclose(pair[:1], pair[1:], rtol=1e-4, atol=1e-5, equal_nan=True)
        require(alike, f"{what} differ: {name} is {value:.6g} and {other[name]:.6g}")


def require_same_experience(one: Batch, other: Batch, what: str) -> None:
    """Fail unless two batches are equal where their masks are true, up to rounding; ``what`` names the two."""
    require(type(one) is type(other), f"{what} are a {type(one).__name__} and a {type(other).__name__}")
    clear = under_masks(one)
    left, right = clear.flatten(), under_masks(other).flatten()
    tokens = clear.sequences.response_mask if isinstance(one, TokenBatch) else None
    odd = sorted(left.keys() ^ right.keys())
    require(not odd, f"{what} do not have the same fields: {', '.join(odd)}")
    for name, value in left.items():
        require_close(value, right[name], f"{what} ({name})", rtol=1e-4, atol=1e-5, tokens=tokens)


def require_same_rows(one: Batch, other: Batch, what: str) -> None:
    """Fail unless two batches hold the same rows equally often, up to rounding, in any order; ``what`` names the two.

    Rows that weigh nothing are ignored.
    """
    require(type(one) is type(other), f"{what} are a {type(one).__name__} and a {type(other).__name__}")
    one, other = weighted(one), weighted(other)
    fields = under_masks(type(one).cat([one, other])).flatten()
    table = torch.cat([column.double().reshape(len(column), -1) for column in fields.values()], dim=1)
    same = torch.isclose(table.unsqueeze(1), table.unsqueeze(0), rtol=1e-4, atol=1e-5).all(-1)  # [rows, rows]
    differ = same[:, : len(one)].sum(1) != same[:, len(one) :].sum(1)
    wrong = [int(part.sum()) for part in (differ[: len(one)], differ[len(one) :])]
    require(
        wrong == [0, 0],
        f"{what} do not hold the same rows: {wrong[0]} of {len(one)} are not among the others, or not as often, "
        f"{wrong[1]} of {len(other)} not among the first, or not as often",
    )


def weighted(batch: Batch) -> Batch:
    """Return the rows that count in the loss: those that only fill a batch up weigh nothing."""
    rows = torch.arange(len(batch))
    return batch.select(rows[[bool(batch.select(row.unsqueeze(0)).weight > 0) for row in rows]])


def require_same_state(one: Any, other: Any, what: str) -> None:
    """Fail unless two `state_dict`s are bit-equal; ``what`` names the two."""
    left, right = dict(_leaves(one)), dict(_leaves(other))
    differ = [key for key in left | right if key not in left or key not in right or not _equal(left[key], right[key])]
    require(not differ, f"{what} differ in {', '.join(differ[:3])}{' and more' if len(differ) > 3 else ''}")


def require_close_state(one: Any, other: Any, what: str) -> None:
    """Fail unless two `state_dict`s have the same keys, and numbers that are equal up to rounding."""
    left, right = dict(_leaves(one)), dict(_leaves(other))
    require(left.keys() == right.keys(), f"{what} differ in {', '.join(sorted(left.keys() ^ right.keys())[:3])}")
    for key, value in left.items():
        if isinstance(value, int | float | Tensor):
            here, there = (torch.as_tensor(each, dtype=torch.float64) for each in (value, right[key]))
            alike = here.shape == there.shape and torch.allclose(here, there, rtol=1e-3, atol=1e-5, equal_nan=True)
            require(alike, f"{what} differ in {key}: {value!r:.100} and {right[key]!r:.100}")


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping | list | tuple) and value:
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _leaves(item, f"{path}.{key}".lstrip("."))
    else:
        yield path, value


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def floats(metrics: Metrics) -> dict[str, float]:
    """Return metrics as numbers, without times."""
    return {name: metric.compute() for name, metric in metrics.items() if not name.startswith("time/")}


# ---------------------------------------------------------------------------------------------------------- measuring


def flat_gradient(model: nn.Module) -> Tensor:
    """Return a flat copy of the gradient; parameters without one count as zero."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained]).clone()


@torch.no_grad()
def for_loss(trainer: Any, batch: Batch) -> Any:
    """Return a batch of the store as `loss` gets it, if a step is one micro-batch: prepared, on the device."""
    with as_it_was(trainer):
        return trainer.prepare_step(batch).to(trainer.accelerator.device)


@contextmanager
def as_it_was(trainer: Any) -> Iterator[None]:
    """Restore the algorithm's state after the context: a measurement is no step, and the next one begins as it did."""
    state = copy.deepcopy(trainer.state_dict())
    try:
        yield
    finally:
        trainer.load_state_dict(state)


def require_finite(loss: Tensor) -> None:
    """Raise a `NonFiniteError` unless a loss is finite; the check then says for which probe it is not."""
    if not loss.isfinite().all():
        raise NonFiniteError(f"the loss is {float(loss.detach().sum())}")


def measured(trainer: Any, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """Return the flat gradient of the loss's mean over a whole batch, and the metrics, with the loss among them."""
    trainer.optimizer.zero_grad()
    prepared = for_loss(trainer, batch)
    with as_it_was(trainer):
        loss, found = trainer.updater.measure(prepared)
    loss.backward()
    flat = flat_gradient(trainer.unwrapped)
    trainer.optimizer.zero_grad()
    return flat, floats(found)


def gradient(trainer: Any, batch: Batch) -> Tensor:
    """Return the flat gradient of the loss's mean over a whole batch; zero for parameters it does not reach."""
    return measured(trainer, batch)[0]


def stepped(trainer: Any, batch: Batch) -> tuple[Tensor, Metrics]:
    """Make a step on ``batch``; return its flat gradient and its metrics. `judge` is not called."""
    trainer.judge = lambda _: Verdict.STEP
    seen: list[Tensor] = []
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate's wrapper is no torch optimizer
    hook = optimizer.register_step_pre_hook(lambda *_: seen.append(flat_gradient(trainer.unwrapped)))
    found: Metrics = trainer.update(batch)
    hook.remove()
    require(len(seen) == 1, f"update() made {len(seen)} optimizer steps on a batch")
    return seen[0], found


def unequal(batch: Batch) -> list[Tensor]:
    """Return the row indices of two parts of a batch: the shortest three eighths, and the others."""
    order = batch.lengths.argsort(stable=True).cpu()
    return list(order.tensor_split([max(3 * len(batch) // 8, 1)]))


def apart(trainer: Any) -> Any:
    """Move the policy of a trainer that has not collected away from its reference, and return the trainer.

    Divergences from the reference are 0 before, and so is what is wrong about them.
    """
    trainer.models.build()  # the reference is made with it
    return nudged(trainer, 0.1)


def collected_from(bench: Bench, change: Callable[[Any], Any] = lambda experience: experience) -> Any:
    """Return a tiny trainer, `apart` from its reference, that applied ``change`` before `prepare_experience`."""
    trainer = apart(bench.trainer())
    honest = trainer.prepare_experience
    trainer.prepare_experience = lambda experience: honest(change(experience))
    trainer.collect()
    return trainer


# --------------------------------------------------------------------------------------------- changing batches


def aligned(batch: Any, change: Callable[[Tensor, Sequences], Tensor]) -> Any:
    """Return the batch with ``change(tensor, its sequences)`` applied to every tensor [B, T, *] about tokens."""
    if isinstance(batch, Sequences):
        return batch.map(lambda x: change(x, batch))
    own = batch.sequences if isinstance(batch, TokenBatch) else None
    parts: dict[str, Any] = {}
    for name, value in batch.parts().items():
        if isinstance(value, Batch):
            parts[name] = aligned(value, change)
        else:
            parts[name] = value if own is None or value.dim() < 2 else change(value, own)
    return type(batch)(**parts)


def sequences_in(batch: Batch) -> list[Sequences]:
    """Return all sequences in a batch, the batch itself included."""
    if isinstance(batch, Sequences):
        return [batch]
    return [found for part in batch.parts().values() if isinstance(part, Batch) for found in sequences_in(part)]


def _like(mask: Tensor, x: Tensor) -> Tensor:
    return mask.reshape(*mask.shape, *[1] * (x.dim() - 2)).expand_as(x)


def _is_field(x: Tensor, sequences: Sequences) -> bool:
    return any(x is part for part in sequences.parts().values())


def with_garbage(batch: Any, seed: int = 0) -> Any:
    """Return the batch with random ids where its attention mask is false, and NaN where its response mask is."""
    draws = torch.Generator().manual_seed(seed)

    def spoil(x: Tensor, sequences: Sequences) -> Tensor:
        if x.dtype == torch.bool or (_is_field(x, sequences) and x is not sequences.input_ids):
            return x
        if x.is_floating_point():
            return x.masked_fill(~_like(sequences.response_mask, x), torch.nan)
        junk = torch.randint(0, 8, x.shape, generator=draws).to(x.device, x.dtype)
        return torch.where(_like(sequences.attention_mask, x), x, junk)

    return aligned(batch, spoil)


def only_part(clean: Any, changed: Any, name: str, prefix: str = "") -> Any:
    """Return the batch ``clean`` with one tensor of ``changed``, given by its dotted name."""
    parts = changed.parts()
    return type(clean)(
        **{
            key: only_part(value, parts[key], name, f"{prefix}{key}.")
            if isinstance(value, Batch)
            else parts[key]
            if f"{prefix}{key}" == name
            else value
            for key, value in clean.parts().items()
        }
    )


def under_masks(batch: Any) -> Any:
    """Return the batch with 0 where its masks are false, and no more columns than it needs."""

    def clear(x: Tensor, sequences: Sequences) -> Tensor:
        own = x.is_floating_point() and not _is_field(x, sequences)
        mask = sequences.response_mask if own else sequences.attention_mask | sequences.response_mask
        return x.masked_fill(~_like(mask, x), 0)

    return aligned(batch.trim(), clear)


def widened(batch: Batch, columns: int) -> Any:
    """Return the batch with more columns of padding on the right."""
    return aligned(batch, lambda x, _: F.pad(x, (0, 0) * (x.dim() - 2) + (0, columns)))


def left_padded(batch: Any) -> Any:
    """Return the batch with every row at the right end of its columns."""
    return _rolled(batch, lambda mask: (mask * _columns(mask) + mask).amax(1, keepdim=True))


def right_padded(batch: Any) -> Any:
    """Return the batch with every row at the left end of its columns, and no more columns than it needs."""
    return _rolled(batch, lambda mask: mask.int().argmax(1, keepdim=True)).trim()


def _columns(mask: Tensor) -> Tensor:
    return torch.arange(mask.size(1), device=mask.device)


def _rolled(batch: Any, by: Callable[[Tensor], Tensor]) -> Any:
    """Return the batch with every row rolled to the left by ``by(mask of real tokens [B, T])`` columns [B, 1]."""

    def roll(x: Tensor, sequences: Sequences) -> Tensor:
        mask = sequences.attention_mask | sequences.response_mask
        places = (_columns(mask) + by(mask)) % mask.size(1)  # [B, T]: the column that each column is taken from
        return x.gather(1, _like(places, x))

    return aligned(batch, roll)


# ----------------------------------------------------------------------------------------- how a loss uses the policy

Ids = tuple[tuple[int, ...], tuple[int, ...]]
"""Prompt and response of a row."""


@dataclass(frozen=True)
class Reading:
    """One call of the policy by a loss, and how the loss depends on its outputs."""

    sequences: Sequences
    slopes: Tensor | None
    """The loss's derivative by the log-probability of each token [B, T], or by the score of each text [B]; None if it
    uses neither."""

    def rows(self) -> list[tuple[Ids, Tensor]]:
        """Return each row's ids and credit: how much the loss increases the log-probability of each response token."""
        mask = self.sequences.response_mask
        read = self.slopes is not None and self.slopes.dim() == 2
        slopes = self.slopes if read else torch.zeros(mask.shape, device=mask.device)
        assert slopes is not None, "it is read"
        return [(ids, -own[keep]) for ids, own, keep in zip(ids_of(self.sequences), slopes, mask, strict=True)]

    def pulls(self) -> list[tuple[Ids, float]]:
        """Return each row's ids, and how much the loss increases its log-probability or its score."""
        if self.slopes is None or self.slopes.dim() == 2:
            return [(ids, float(credit.sum())) for ids, credit in self.rows()]
        return list(zip(ids_of(self.sequences), (-self.slopes).tolist(), strict=True))


def ids_of(sequences: Sequences) -> list[Ids]:
    """Return the prompt and response ids of each row."""
    pairs = zip(sequences.queries, sequences.responses, strict=True)
    return [(tuple(query.tolist()), tuple(response.tolist())) for query, response in pairs]


def readings(trainer: Any, batch: Batch) -> list[Reading]:
    """Return the calls of the policy by the loss on a whole batch."""
    asked: list[tuple[Sequences, Tensor | None]] = []

    def note(_: Any, positional: tuple[Any, ...], named: dict[str, Any], outputs: Any) -> None:
        logprobs = outputs if isinstance(outputs, Tensor) else getattr(outputs, "logprobs", None)
        if logprobs is not None and logprobs.requires_grad:
            logprobs.retain_grad()
        asked.append((positional[0] if positional else named["sequences"], logprobs))

    prepared = for_loss(trainer, batch)
    handle = trainer.policy.register_forward_hook(note, with_kwargs=True)
    try:
        with as_it_was(trainer):
            loss, _ = trainer.loss(prepared)
    finally:
        handle.remove()
    require(asked, "the loss does not call trainer.policy")
    require_finite(loss)
    loss.backward()
    trainer.optimizer.zero_grad()
    return [Reading(sequences, None if told is None else told.grad) for sequences, told in asked]


def credits_of(trainer: Any, batch: Batch) -> dict[Ids, Tensor]:
    """Return the credit of the response tokens of every row that the loss reads."""
    return summed(pair for reading in readings(trainer, batch) for pair in reading.rows())


def summed(pairs: Iterable[tuple[Ids, Any]]) -> dict[Ids, Any]:
    """Return the sum for each row: a loss may read a row more than once."""
    found: dict[Ids, Any] = {}
    for ids, number in pairs:
        found[ids] = found.get(ids, 0) + number
    return found


# ---------------------------------------------------------------------------------------------------- parts of runs

RUN: dict[str, Any] = {"train__eval_interval": 3, "train__save_interval": 3, "optimizer__kwargs": {"eps": 1e-4}}
"""The run that two processes and one make. Adam divides a gradient by its size: with its usual ``eps`` of 1e-8, weights
that cannot change the loss, such as the biases of attention's keys, would move by the rounding of their gradient, 0."""


class Logged:
    """An observer that keeps the logged metrics by step."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}

    @hookimpl
    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Keep the metrics."""
        self.steps.setdefault(step, {}).update(metrics)


def hashed(prompt: str, output: Any) -> int:
    """Return a number below 2³² that follows from a prompt and a response, text or an image."""
    content = output.encode() if isinstance(output, str) else output.cpu().numpy().tobytes()
    return crc32(prompt.encode() + b"|" + content)


def rewarding(values: Sequence[Any]) -> Callable[..., list[Any]]:
    """Return a reward function that gives each response one of ``values``, by its text, not by the order of calls."""

    def reward(prompts: list[str], outputs: Any = None, images: Any = None, **_: Any) -> list[Any]:
        responses = images if outputs is None else outputs
        return [values[hashed(*each) % len(values)] for each in zip(prompts, responses, strict=True)]

    return reward


@torch.no_grad()
def push_away(model: torch.nn.Module, by: float) -> None:
    """Add noise of the standard deviation ``by`` to all trained parameters."""
    draws = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=draws)
            parameter.add_(by * noise.to(parameter.device, parameter.dtype))
