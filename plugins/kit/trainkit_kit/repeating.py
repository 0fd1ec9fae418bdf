"""Whether two trainers of one seed are equal at the start; if not, comparing them shows nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trainkit_kit.subjects import Bench


def difference_at_start(bench: Bench) -> str:
    """Return a sentence that says in what two trainers of one seed differ before the first step; empty: in nothing."""
    one, other = (_collected(bench) for _ in range(2))
    if one is None or other is None:
        return ""
    here, there = (_models(trainer) for trainer in (one, other))
    differ = [name for name, tensor in here.items() if not torch.equal(tensor, there.get(name, tensor.new_empty(0)))]
    if differ:
        return (
            f"the weights of {differ[0]} differ between two trainers of one seed; make models in get_arch, or with "
            "self.frozen, which are seeded"
        )
    here, there = (trainer.store.experience.flatten() for trainer in (one, other))
    differ = [name for name, tensor in here.items() if name not in there or not _same(tensor, there[name])]
    return f"{differ[0]} of the first collection differs between two trainers of one seed" if differ else ""


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.nan_to_num(123.0), other.nan_to_num(123.0))


def _collected(bench: Bench) -> Any:
    """Return a trainer with its first collection; None if that fails, which the check has reported already."""
    try:
        return bench.collected()
    except Exception:
        return None


def _models(trainer: Any) -> dict[str, Tensor]:
    """Return the weights of the policy, and of all models among the trainer's attributes."""
    models: dict[str, nn.Module] = {"the policy": trainer.unwrapped}
    for name, value in vars(trainer).items():
        model = getattr(value, "policy", value)  # of a second model that `frozen` gives
        if isinstance(model, nn.Module):
            models[name] = model
    return {
        f"{owner} ({name})": tensor
        for owner, model in models.items()
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, Tensor)
    }
