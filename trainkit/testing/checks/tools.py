"""What several checks measure by."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from trainkit.data import Batch, Sequences, TokenBatch
from trainkit.testing.conformance import require


def weights(trainer: Any) -> dict[str, Tensor]:
    """A copy of the model's state."""
    return {name: tensor.detach().clone() for name, tensor in trainer.unwrapped.state_dict().items()}


def require_same_weights(one: dict[str, Tensor], other: dict[str, Tensor], what: str) -> None:
    """Fail unless two states are bit-equal; ``what`` says of which two."""
    differ = [name for name in one if name not in other or not torch.equal(one[name], other[name])]
    differ += sorted(other.keys() - one.keys())
    require(not differ, f"{what} differ in {', '.join(differ[:3])}{' and more' if len(differ) > 3 else ''}")


def require_close(one: Tensor, other: Tensor, what: str, *, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """Fail unless two tensors agree; ``what`` says which two, the message by how much they do not."""
    require(one.shape == other.shape, f"{what} have the shapes {tuple(one.shape)} and {tuple(other.shape)}")
    off, largest = (float(x.abs().max()) if x.numel() else 0.0 for x in (one - other, one))
    require(
        torch.allclose(one, other, rtol=rtol, atol=atol),
        f"{what} differ by up to {off:.3g}, where {largest:.3g} is the largest",
    )


def gradient(trainer: Any, batch: Batch) -> Tensor:
    """The gradient of the loss's mean over a whole batch, flat; parameters it does not reach count as zero."""
    trainer.optimizer.zero_grad()
    with torch.no_grad():
        prepared = trainer.prepare_step(batch)
    loss, _ = trainer.loss(prepared)
    loss.backward()
    trained = [p for p in trainer.unwrapped.parameters() if p.requires_grad]
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained])
    trainer.optimizer.zero_grad()
    return flat.clone()


def with_garbage(batch: Any, seed: int = 0) -> Any:
    """The batch with random ids and NaN wherever its masks say that nothing is there."""
    parts: dict[str, Any] = {}
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Sequences):
            parts[field.name] = _with_other_ids(value, seed)
        elif isinstance(batch, TokenBatch) and isinstance(value, Tensor) and value.dim() == 2:
            off = batch.sequences.response_mask.logical_not()
            parts[field.name] = value.masked_fill(off, torch.nan) if value.is_floating_point() else value
        else:
            parts[field.name] = value
    return _with_other_ids(batch, seed) if isinstance(batch, Sequences) else replace(batch, **parts)


def _with_other_ids(sequences: Any, seed: int) -> Any:
    junk = torch.randint(0, 8, sequences.input_ids.shape, generator=torch.Generator().manual_seed(seed))
    junk = junk.to(sequences.input_ids.device)
    return replace(sequences, input_ids=torch.where(sequences.attention_mask, sequences.input_ids, junk))


def widened(batch: Batch, columns: int) -> Any:
    """The batch with more columns of padding on the right."""
    return batch.map(lambda x: torch.nn.functional.pad(x, (0, columns)) if x.dim() == 2 else x)
