"""Configurations and data types."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass
class GeneralElement:
    """An item of a pipeline."""


@dataclass
class RLElement:
    """An item of experience."""

    state: Iterable[str] | None = None
    action: Any = None
    reward: float | None = None


@dataclass
class BatchElement:
    """Padded token ids of a batch."""

    tokens: Any
    masks: Any
