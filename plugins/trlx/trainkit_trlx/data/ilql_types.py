"""Experience of ILQL."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

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


class ILQLBatch(ILQLElement):
    """Samples, padded: token ids [B, T], rewards and actions [B, A], states and dones [B, A + 1]."""


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


class ILQLSeq2SeqBatch(ILQLSeq2SeqElement):
    """Samples, padded: token ids [B, T], rewards and actions [B, A], states and dones [B, A + 1]."""


def flatten_dataclass(cls: type[Any]) -> Callable[[Any], list[Any]]:
    """Return a function that gives the values of the fields of a dataclass, in their order."""
    names = [about.name for about in fields(cls)]
    return lambda given: [getattr(given, name) for name in names]


def unflatten_dataclass(cls: type[Any]) -> Callable[[Iterable[Any]], Any]:
    """Return a function that makes a dataclass of the values of its fields, in their order."""
    return lambda values: cls(*values)
