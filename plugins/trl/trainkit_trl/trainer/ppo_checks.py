"""Checks of what `PPOTrainer.step` is given, with the words of TRL where it has some."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from torch import Tensor


def check_lists(given: dict[str, Any], size: int | None) -> None:
    """Raise a ValueError unless all are lists of ``size`` tensors; None: of any size."""
    for name, values in given.items():
        if not isinstance(values, list):
            raise ValueError(f"{name} must be a list of tensors - got {type(values)}")
        for each in values:
            if not isinstance(each, Tensor):
                raise ValueError(f"Elements in {name} must be tensors - got {type(each)}")
        if size is not None and len(values) != size:
            raise ValueError(
                f"Batch size ({size}) does not match number of examples - but got {len(values)} for: {name}; "
                "give one for each row, or change batch_size of PPOConfig"
            )


def check_ids(name: str, rows: list[Tensor]) -> None:
    """Raise a ValueError unless all are token ids [T], at least one."""
    for index, ids in enumerate(rows):
        if ids.dim() != 1 or not len(ids) or ids.dtype.is_floating_point:
            raise ValueError(
                f"{name}[{index}] must be token ids [T], at least one - got {ids.dtype} of the shape "
                f"{tuple(ids.shape)}; give a 1-dimensional tensor of integers, such as ids.squeeze()"
            )


def check_scores(scores: Sequence[Any]) -> None:
    """Raise a ValueError unless all are single, finite numbers, or tensors of one."""
    for index, score in enumerate(scores):
        if isinstance(score, Tensor) and (score.dim() > 1 or score.numel() != 1):
            raise ValueError(f"Scores must be 0- or 1-dimensional with one element - got {tuple(score.shape)}")
        if not isinstance(score, Tensor | Real):
            raise ValueError(f"scores[{index}] must be a number or a tensor of one - got {type(score)}")
        if not math.isfinite(float(score)):
            raise ValueError(f"scores[{index}] is {float(score)}; scores must be finite numbers, correct the reward")


def check_masks(masks: list[Tensor], responses: list[Tensor]) -> None:
    """Raise a ValueError unless there is a number for each token of the responses."""
    for index, (mask, response) in enumerate(zip(masks, responses, strict=True)):
        if mask.shape != response.shape:
            raise ValueError(
                f"response_masks[{index}] has the shape {tuple(mask.shape)}, and its response "
                f"{tuple(response.shape)}; give 1 or 0 for each token"
            )
