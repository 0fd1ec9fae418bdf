"""What several checks measure by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.data import Batch, Sequences, TokenBatch
from trainkit.metrics import Metrics
from trainkit.plugins import hookimpl
from trainkit.testing.conformance import Bench, require
from trainkit.trainer.base import Verdict

# ---------------------------------------------------------------------------------------------------------- comparing


def weights(trainer: Any) -> dict[str, Tensor]:
    """A copy of the model's state."""
    return {name: tensor.detach().clone() for name, tensor in trainer.unwrapped.state_dict().items()}


def require_same_weights(one: dict[str, Tensor], other: dict[str, Tensor], what: str) -> None:
    """Fail unless two states are bit-equal; ``what`` says of which two."""
    differ = [name for name in one if name not in other or not torch.equal(one[name], other[name])]
    differ += sorted(other.keys() - one.keys())
    require(not differ, f"{what} differ in {', '.join(differ[:3])}{' and more' if len(differ) > 3 else ''}")


def require_close(one: Tensor, other: Tensor, what: str, *, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """Fail unless two tensors agree, NaN with NaN; ``what`` says which two, the message by how much they do not."""
    require(one.shape == other.shape, f"{what} have the shapes {tuple(one.shape)} and {tuple(other.shape)}")
    if not one.is_floating_point():
        require(torch.equal(one, other), f"{what} differ in {int((one != other).sum())} of {one.numel()} places")
        return
    off, largest = (float(x.abs().max()) if x.numel() else 0.0 for x in (one - other, one))
    require(
        torch.allclose(one, other, rtol=rtol, atol=atol, equal_nan=True),
        f"{what} differ by up to {off:.3g}, where {largest:.3g} is the largest",
    )


def require_same_gradient(one: Tensor, other: Tensor, what: str, *, rtol: float = 1e-4) -> None:
    """Fail unless two gradients agree, up to rounding, and are there at all; ``what`` says which two."""
    require(one.isfinite().all() and one.any(), f"of {what} the first is {'zero' if one.isfinite().all() else 'NaN'}")
    require_close(one, other, what, rtol=rtol, atol=1e-5 * float(one.abs().max()))


def require_same_metrics(one: Mapping[str, float], other: Mapping[str, float], what: str) -> None:
    """Fail unless two records of metrics have the same names and values, up to rounding; ``what`` says which two."""
    odd = sorted(one.keys() ^ other.keys())
    require(not odd, f"{what} do not have the same names: {', '.join(odd)}")
    for name, value in one.items():
        pair = torch.tensor([value, other[name]], dtype=torch.float64)
        alike = torch.allclose(pair[:1], pair[1:], rtol=1e-4, atol=1e-5, equal_nan=True)
        require(alike, f"{what} differ: {name} is {value:.6g} and {other[name]:.6g}")


def require_same_experience(one: Batch, other: Batch, what: str) -> None:
    """Fail unless two batches say the same under their masks, up to rounding; ``what`` says which two."""
    require(type(one) is type(other), f"{what} are a {type(one).__name__} and a {type(other).__name__}")
    left, right = under_masks(one).flatten(), under_masks(other).flatten()
    odd = sorted(left.keys() ^ right.keys())
    require(not odd, f"{what} do not have the same fields: {', '.join(odd)}")
    for name, value in left.items():
        require_close(value, right[name], f"{what} ({name})", rtol=1e-4, atol=1e-5)


def require_same_rows(one: Batch, other: Batch, what: str) -> None:
    """Fail unless two batches hold the same rows, up to rounding, in whatever order; ``what`` says which two."""
    require(type(one) is type(other), f"{what} are a {type(one).__name__} and a {type(other).__name__}")
    fields = under_masks(type(one).cat([one, other])).flatten()
    table = torch.cat([column.double().reshape(len(column), -1) for column in fields.values()], dim=1)
    left, right = table[: len(one)].unsqueeze(1), table[len(one) :].unsqueeze(0)
    same = torch.isclose(left, right, rtol=1e-4, atol=1e-5).all(-1)  # [rows of one, rows of the other]
    missing = [int((~same.any(dim)).sum()) for dim in (1, 0)]
    require(
        missing == [0, 0],
        f"{what} do not hold the same rows: {missing[0]} of {len(one)} are not among the others, "
        f"{missing[1]} of {len(other)} not among the first",
    )


def require_same_state(one: Any, other: Any, what: str) -> None:
    """Fail unless two `state_dict`s are equal to the bit; ``what`` says of which two."""
    left, right = dict(_leaves(one)), dict(_leaves(other))
    differ = [key for key in left | right if key not in left or key not in right or not _equal(left[key], right[key])]
    require(not differ, f"{what} differ in {', '.join(differ[:3])}{' and more' if len(differ) > 3 else ''}")


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
    """Metrics as numbers, without what the clock says."""
    return {name: metric.compute() for name, metric in metrics.items() if not name.startswith("time/")}


# ---------------------------------------------------------------------------------------------------------- measuring


def nudged(trainer: Any, size: float = 0.02) -> Any:
    """The trainer with weights a little elsewhere, so that the policy is no longer the one that sampled."""
    draws = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in trainer.unwrapped.parameters():
            if parameter.requires_grad:
                noise = size * torch.randn(parameter.shape, generator=draws)
                parameter += noise.to(parameter.device, parameter.dtype)
    return trainer


def flat_gradient(trainer: Any) -> Tensor:
    """A copy of the gradient as it is; parameters without one count as zero."""
    trained = [p for p in trainer.unwrapped.parameters() if p.requires_grad]
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained]).clone()


@torch.no_grad()
def for_loss(trainer: Any, batch: Batch) -> Any:
    """A batch of the store as `loss` gets it where a step is one micro-batch: prepared, on the trainer's device."""
    return trainer.prepare_step(batch).to(trainer.accelerator.device)


def measured(trainer: Any, batch: Batch) -> tuple[Tensor, dict[str, float]]:
    """The gradient of the loss's mean over a whole batch, flat, and the metrics with the loss among them."""
    trainer.optimizer.zero_grad()
    loss, found = trainer.measure(for_loss(trainer, batch))
    loss.backward()
    flat = flat_gradient(trainer)
    trainer.optimizer.zero_grad()
    return flat, floats(found)


def gradient(trainer: Any, batch: Batch) -> Tensor:
    """The gradient of the loss's mean over a whole batch, flat; parameters it does not reach count as zero."""
    return measured(trainer, batch)[0]


def stepped(trainer: Any, batch: Batch) -> tuple[Tensor, Metrics]:
    """The gradient that the loop steps by on ``batch``, flat, and the step's metrics; `judge` is not asked."""
    trainer.judge = lambda _: Verdict.STEP
    seen: list[Tensor] = []
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)  # accelerate's wrapper is no torch optimizer
    hook = optimizer.register_step_pre_hook(lambda *_: seen.append(flat_gradient(trainer)))
    found: Metrics = trainer.update(batch)
    hook.remove()
    require(len(seen) == 1, f"update() made {len(seen)} optimizer steps on a batch")
    return seen[0], found


def unequal(batch: Batch) -> list[Tensor]:
    """The rows of two parts of a batch: three eighths of them, the shorter ones, and the others."""
    order = batch.lengths.argsort(stable=True).cpu()
    return list(order.tensor_split([max(3 * len(batch) // 8, 1)]))


def collected_from(bench: Bench, change: Callable[[Any], Any], **changes: Any) -> Any:
    """A tiny trainer whose `prepare_experience` was given ``change`` of what `make_experience` had made."""
    trainer = bench.trainer(**changes)
    honest = trainer.prepare_experience
    trainer.prepare_experience = lambda experience: honest(change(experience))
    trainer.collect()
    return trainer


# ----------------------------------------------------------------------------------------------- what stands in batches


def aligned(batch: Any, change: Callable[[Tensor, Sequences], Tensor]) -> Any:
    """The batch with ``change(tensor, its sequences)`` for every tensor [B, T, *] in it that speaks about tokens."""
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
    """All sequences that a batch holds, itself among them."""
    if isinstance(batch, Sequences):
        return [batch]
    return [found for part in batch.parts().values() if isinstance(part, Batch) for found in sequences_in(part)]


def _like(mask: Tensor, x: Tensor) -> Tensor:
    return mask.reshape(*mask.shape, *[1] * (x.dim() - 2)).expand_as(x)


def _is_field(x: Tensor, sequences: Sequences) -> bool:
    return any(x is part for part in sequences.parts().values())


def with_garbage(batch: Any, seed: int = 0) -> Any:
    """The batch with random ids where its attention mask says that nothing is there, NaN off its response mask."""
    draws = torch.Generator().manual_seed(seed)

    def spoil(x: Tensor, sequences: Sequences) -> Tensor:
        if x.dtype == torch.bool or (_is_field(x, sequences) and x is not sequences.input_ids):
            return x
        if x.is_floating_point():
            return x.masked_fill(~_like(sequences.response_mask, x), torch.nan)
        junk = torch.randint(0, 8, x.shape, generator=draws).to(x.device, x.dtype)
        return torch.where(_like(sequences.attention_mask, x), x, junk)

    return aligned(batch, spoil)


def under_masks(batch: Any) -> Any:
    """The batch with 0 wherever its masks say that nothing is there, and no more columns than it needs."""

    def clear(x: Tensor, sequences: Sequences) -> Tensor:
        own = x.is_floating_point() and not _is_field(x, sequences)
        mask = sequences.response_mask if own else sequences.attention_mask | sequences.response_mask
        return x.masked_fill(~_like(mask, x), 0)

    return aligned(batch.trim(), clear)


def widened(batch: Batch, columns: int) -> Any:
    """The batch with more columns of padding on the right."""
    return aligned(batch, lambda x, _: F.pad(x, (0, 0) * (x.dim() - 2) + (0, columns)))


def left_padded(batch: Any) -> Any:
    """The batch with every row at the right end of its columns."""
    return _rolled(batch, lambda mask: (mask * _columns(mask) + mask).amax(1, keepdim=True))


def right_padded(batch: Any) -> Any:
    """The batch with every row at the left end of its columns, and no more of them than it needs."""
    return _rolled(batch, lambda mask: mask.int().argmax(1, keepdim=True)).trim()


def _columns(mask: Tensor) -> Tensor:
    return torch.arange(mask.size(1), device=mask.device)


def _rolled(batch: Any, by: Callable[[Tensor], Tensor]) -> Any:
    """The batch with every row turned to the left by ``by(where something stands [B, T])`` columns [B, 1]."""

    def roll(x: Tensor, sequences: Sequences) -> Tensor:
        mask = sequences.attention_mask | sequences.response_mask
        places = (_columns(mask) + by(mask)) % mask.size(1)  # [B, T] where what stands in each column then stood before
        return x.gather(1, _like(places, x))

    return aligned(batch, roll)


# ------------------------------------------------------------------------------------------- what the policy is asked

Ids = tuple[tuple[int, ...], tuple[int, ...]]
"""Prompt and response of a row."""


@dataclass(frozen=True)
class Reading:
    """What a loss has asked the policy, and how it depends on the answers."""

    sequences: Sequences
    slopes: Tensor | None
    """The loss's derivative by the log-probability of each token [B, T]; None where none was asked for."""

    def rows(self) -> list[tuple[Ids, Tensor]]:
        """Each row's ids, and its credit: how much the loss wants each of its response tokens to be likelier."""
        mask = self.sequences.response_mask
        slopes = torch.zeros(mask.shape, device=mask.device) if self.slopes is None else self.slopes
        return [(ids, -own[keep]) for ids, own, keep in zip(ids_of(self.sequences), slopes, mask, strict=True)]


def ids_of(sequences: Sequences) -> list[Ids]:
    """Prompt and response ids of each row."""
    pairs = zip(sequences.queries, sequences.responses, strict=True)
    return [(tuple(query.tolist()), tuple(response.tolist())) for query, response in pairs]


def readings(trainer: Any, batch: Batch) -> list[Reading]:
    """What the loss on a whole batch asks of the policy."""
    asked: list[tuple[Sequences, Tensor | None]] = []

    def note(_: Any, positional: tuple[Any, ...], named: dict[str, Any], outputs: Any) -> None:
        logprobs = getattr(outputs, "logprobs", None)
        if logprobs is not None and logprobs.requires_grad:
            logprobs.retain_grad()
        asked.append((positional[0] if positional else named["sequences"], logprobs))

    prepared = for_loss(trainer, batch)
    handle = trainer.policy.register_forward_hook(note, with_kwargs=True)
    try:
        loss, _ = trainer.loss(prepared)
    finally:
        handle.remove()
    require(asked, "the loss does not ask trainer.policy")
    loss.backward()
    trainer.optimizer.zero_grad()
    return [Reading(sequences, None if told is None else told.grad) for sequences, told in asked]


def credits_of(trainer: Any, batch: Batch) -> dict[Ids, Tensor]:
    """The credit of the response tokens of every row that the loss reads."""
    found: dict[Ids, Tensor] = {}
    for reading in readings(trainer, batch):
        for ids, credit in reading.rows():
            found[ids] = found.get(ids, 0) + credit
    return found


# ------------------------------------------------------------------------------------------------- runs and their parts


class Logged:
    """Keeps the metrics that are logged, by step."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}

    @hookimpl
    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Keep them."""
        self.steps.setdefault(step, {}).update(metrics)


def rewarding(values: Iterable[Any]) -> Callable[..., list[Any]]:
    """A reward function that gives these to the responses in their order, and begins again when they are used up."""
    left = cycle(values)

    def reward(prompts: list[Any], **_: Any) -> list[Any]:
        return [next(left) for _ in prompts]

    return reward


@torch.no_grad()
def push_away(model: torch.nn.Module, by: float) -> None:
    """Add noise of this standard deviation to all parameters that are trained."""
    draws = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=draws)
            parameter.add_(by * noise.to(parameter.device, parameter.dtype))
