"""The settings of ILQL, and masks of its sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from trainkit_trlx.data.method_configs import MethodConfig, register_method

if TYPE_CHECKING:
    from torch import Tensor


def topk_mask(xs: Tensor, k: int) -> Tensor:
    """Return ``xs`` with -inf in place of all but the k largest of the last dimension; ties are kept. [*, V]."""
    if k <= 0 or k > xs.shape[-1]:
        return xs
    least = torch.topk(xs, k, dim=-1).values[..., -1:]
    return torch.where(xs < least, torch.full_like(xs, -torch.inf), xs)


@dataclass
@register_method
class ILQLConfig(MethodConfig):
    """Settings of ILQL."""

    tau: float
    gamma: float
    cql_scale: float
    awac_scale: float
    alpha: float
    beta: float
    steps_for_target_q_sync: int
    two_qs: bool
    gen_kwargs: dict[str, Any]
