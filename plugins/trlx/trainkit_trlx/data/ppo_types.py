"""Experience of PPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class PPORLElement:
    """A rollout: ids of prompt [P] and response [R]; log-probabilities, values and rewards of the response [R]."""

    query_tensor: Tensor
    response_tensor: Tensor
    logprobs: Tensor
    values: Tensor
    rewards: Tensor


@dataclass
class PPORLBatch:
    """Rollouts: ids of prompts [B, P] and responses [B, R]; log-probabilities, values and rewards [B, R]."""

    query_tensors: Tensor
    response_tensors: Tensor
    logprobs: Tensor
    values: Tensor
    rewards: Tensor
