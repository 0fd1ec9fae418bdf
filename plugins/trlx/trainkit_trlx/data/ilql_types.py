"""Experience of ILQL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class ILQLElement:
    """A sample: token ids, and the positions of its states and actions, with rewards of the actions."""

    input_ids: Tensor
    attention_mask: Tensor
    rewards: Tensor
    states_ixs: Tensor
    actions_ixs: Tensor
    dones: Tensor


@dataclass
class ILQLBatch:
    """Samples, padded: token ids [B, T], rewards and actions [B, A], states and dones [B, A + 1]."""

    input_ids: Tensor
    attention_mask: Tensor
    rewards: Tensor
    states_ixs: Tensor
    actions_ixs: Tensor
    dones: Tensor


@dataclass
class ILQLSeq2SeqElement:
    """A sample: token ids, and the positions of its states and actions, with rewards of the actions."""

    input_ids: Tensor
    attention_mask: Tensor
    decoder_input_ids: Tensor
    rewards: Tensor
    states_ixs: Tensor
    actions_ixs: Tensor
    dones: Tensor


@dataclass
class ILQLSeq2SeqBatch:
    """Samples, padded: token ids [B, T], rewards and actions [B, A], states and dones [B, A + 1]."""

    input_ids: Tensor
    attention_mask: Tensor
    decoder_input_ids: Tensor
    rewards: Tensor
    states_ixs: Tensor
    actions_ixs: Tensor
    dones: Tensor
