"""The registry of pipelines, and their base classes."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from torch.utils.data import DataLoader, Dataset

_DATAPIPELINE: dict[str, Any] = {}


def register_datapipeline(name: Any) -> Any:
    """Register a pipeline under its lower-case class name, or under a given name."""

    def register(cls: Any, key: str) -> Any:
        _DATAPIPELINE[key.lower()] = cls
        setattr(sys.modules[__name__], key.lower(), cls)
        return cls

    return (lambda cls: register(cls, name)) if isinstance(name, str) else register(name, name.__name__)


@register_datapipeline
class BasePipeline(Dataset[Any]):
    """Base class of pipelines of prompts."""

    def __init__(self, path: str = "dataset") -> None:
        super().__init__()
        self.path = path

    @abstractmethod
    def __getitem__(self, index: int) -> Any:
        """Return an item."""

    @abstractmethod
    def __len__(self) -> int:
        """Return how many items there are."""

    @abstractmethod
    def create_loader(
        self, batch_size: int, shuffle: bool, prep_fn: Callable[..., Any] | None = None, num_workers: int = 0
    ) -> DataLoader[Any]:
        """Return a loader of batches."""


class BaseRolloutStore(Dataset[Any]):
    """Base class of stores of experience.

    Args:
        capacity: the most items that are kept, the newest ones; -1: all.
    """

    def __init__(self, capacity: int = -1) -> None:
        super().__init__()
        self.history: list[Any] = []
        self.capacity = capacity

    def push(self, exps: Iterable[Any]) -> None:
        """Add items."""
        self.history += exps
        if self.capacity >= 0:
            del self.history[: max(len(self.history) - self.capacity, 0)]

    def __getitem__(self, index: int) -> Any:
        """Return an item."""
        return self.history[index]

    def __len__(self) -> int:
        """Return how many items there are."""
        return len(self.history)

    @abstractmethod
    def create_loader(
        self, batch_size: int, shuffle: bool, prep_fn: Callable[..., Any] | None = None, num_workers: int = 0
    ) -> DataLoader[Any]:
        """Return a loader of batches."""
