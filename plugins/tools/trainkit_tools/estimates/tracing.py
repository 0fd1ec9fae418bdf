"""Models and passes without data: tensors have shapes, types and storages, whose bytes are counted."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainkit.models.unloaded import without_weights

EQUAL = (Tensor.__bool__, torch.equal, torch.allclose)
"""Questions about the values of tensors, which are answered by True: masks have no padding, and a part of a model that
is compared with the whole gives the same."""


class Counter(TorchDispatchMode):
    """Counts the bytes of the storages that are made inside the block: those that exist now, and the most at a time."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the operator, and count what it returns."""
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return found

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size

    def most(self, run: Callable[[], Any]) -> int:
        """Return how many bytes more than now exist at a time while ``run`` runs."""
        before = self.peak = self.live
        run()
        return self.peak - before


class Shapes(FakeTensorMode):
    """Makes tensors without data; a copy of a tensor has the same mode."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Shapes:
        return self


class Values(TorchFunctionMode):
    """Answers what depends on the values of tensors, which have none.

    Args:
        chosen: how many elements of each row a mask [B, T] selects.
    """

    def __init__(self, chosen: int) -> None:
        super().__init__()
        self.chosen = chosen

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function, or answer instead."""
        kwargs = kwargs or {}
        if func in EQUAL:
            return True
        if func is Tensor.item or func is Tensor.__float__:
            return 1.0
        if func is Tensor.__getitem__ and isinstance(args[1], Tensor) and args[1].dtype == torch.bool:
            return self._selected(args[0], args[1])
        return func(*args, **kwargs)

    def _selected(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return as many elements [N, *] of ``x`` [B, T, *] as the mask selects, by an index, as masks do."""
        count = mask.size(0) * (self.chosen if mask.dim() > 1 else 1)
        index = torch.zeros(count, dtype=torch.long, device=x.device)
        return x.flatten(0, mask.dim() - 1)[index]


@contextmanager
def without_data(chosen: int, shapes: Shapes, counter: Counter) -> Iterator[None]:
    """Make and run models without data inside the block.

    Args:
        chosen: how many elements of each row a mask [B, T] selects.
        shapes: makes the tensors; the same for all blocks in which they are used.
        counter: counts their bytes.
    """
    to = nn.Module.to
    # torch cannot replace parameters without data
    nn.Module.to = lambda self, *_, **__: self  # type: ignore[method-assign]
    try:
        with without_weights(), warnings.catch_warnings(), shapes, counter, Values(chosen):
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")  # by copies
            yield
    finally:
        nn.Module.to = to  # type: ignore[method-assign]


def held(tensors: Iterable[Tensor], but: Mapping[int, int] = MappingProxyType({})) -> dict[int, int]:
    """Return the bytes of the storages of tensors by their identity, without those in ``but``."""
    found = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
    return {key: size for key, size in found.items() if key not in but}


def tensors_of(model: nn.Module) -> Iterator[Tensor]:
    """Return the parameters and buffers of a model."""
    yield from model.parameters()
    yield from model.buffers()
