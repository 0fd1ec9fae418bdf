"""Prompts and outputs as tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class PromptElement:
    """A prompt: its text and its token ids [P]."""

    text: str
    tokens: Tensor


@dataclass
class PromptBatch:
    """Prompts: their texts and their token ids [B, P]."""

    text: list[str]
    tokens: Tensor


@dataclass
class AccelerateRLElement:
    """A sample: token ids of prompt and output [T], and its rewards [T]."""

    output_tokens: Tensor
    rewards: Tensor


@dataclass
class AccelerateRLBatchElement:
    """Samples: token ids of prompts and outputs [B, T], and their rewards [B, T]."""

    output_tokens: Tensor
    rewards: Tensor
