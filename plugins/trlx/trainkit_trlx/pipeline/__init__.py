"""The registry of pipelines, and their base classes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset

from trainkit_trlx.data.method_configs import registering
from trainkit_trlx.overrides import remembered

_DATAPIPELINE: dict[str, Any] = {}


def register_datapipeline(name: Any) -> Any:
    """Register a pipeline under its lower-case class name, or under a given name."""
    return registering(name, _DATAPIPELINE, __name__)


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


@remembered
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


class MiniBatchIterator:
    """Iterates over the batches of a loader, each cut into a list of minibatches.

    Args:
        data_loader: gives batches: dataclasses or mappings of tensors or lists.
        mb_size: rows of a minibatch; the last one may be smaller.
        num_mb: the most minibatches of a batch.
    """

    def __init__(self, data_loader: Any, mb_size: int, num_mb: int) -> None:
        self.data_loader, self.mb_size, self.num_mb = data_loader, mb_size, num_mb
        self._batches = iter(data_loader)

    def __iter__(self) -> MiniBatchIterator:
        """Return the iterator itself."""
        return self

    def __next__(self) -> list[Any]:
        """Return the minibatches of the next batch."""
        batch = next(self._batches)
        columns = vars(batch) if is_dataclass(batch) else dict(batch)
        rows = max(len(column) for column in columns.values())
        starts = range(0, min(rows, self.mb_size * self.num_mb), self.mb_size)
        parts = [{name: c[start : start + self.mb_size] for name, c in columns.items()} for start in starts]
        if not parts:
            raise StopIteration
        if is_dataclass(batch):
            return [type(batch)(**part) for part in parts]  # type: ignore[misc]
        return [type(batch)(part) for part in parts]
