"""The processes of a run: sums and gathers over all of them, and errors and values of one that are those of all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, broadcast_object_list, gather_object
from safetensors import SafetensorError
from torch import Tensor, nn

from trainkit.errors import TrainkitError
from trainkit.runs.stopping import Interrupted, Stop

T = TypeVar("T")


class Parallel:
    """The processes of a run. All of them make the same calls of these methods in the same order.

    Args:
        accelerator: accelerate's, which has started the processes.
        stop: is told that the run makes progress.
        sharding: how the trained model is divided among the processes.
    """

    def __init__(self, accelerator: Accelerator, stop: Stop, sharding: Any = None) -> None:
        self.accelerator, self._stop, self.sharding = accelerator, stop, sharding
        self._thread = threading.local()

    @property
    def world(self) -> int:
        """The number of processes."""
        return int(self.accelerator.num_processes)

    @property
    def rank(self) -> int:
        """The number of this process."""
        return int(self.accelerator.process_index)

    @property
    def is_main(self) -> bool:
        """Whether this is the first process, which logs and writes."""
        return bool(self.accelerator.is_main_process)

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        device: torch.device = self.accelerator.device
        return device

    # ------------------------------------------------------------------------------------------------------ tensors

    def reduce(self, x: Tensor) -> Tensor:
        """Return ``x`` summed over all processes, on the device it came from."""
        if self.world == 1:
            return x
        if self._group is not None:
            return self._each(x).sum(0, dtype=x.dtype)
        total: Tensor = self.accelerator.reduce(x.to(self.device), "sum")
        return total.to(x.device)

    def min(self, x: Tensor) -> Tensor:
        """Return the elementwise minimum of ``x`` over all processes, on the device it came from; NaN if one is NaN."""
        return self._each(x).amin(0) if self.world > 1 else x

    def max(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum of ``x`` over all processes, on the device it came from; NaN if one is NaN."""
        return self._each(x).amax(0) if self.world > 1 else x

    def _each(self, x: Tensor) -> Tensor:
        """Return ``x`` of each process, stacked, on the device it came from. -> [processes, *]."""
        if (group := self._group) is not None:
            parts = [torch.empty_like(x, device="cpu") for _ in range(self.world)]
            torch.distributed.all_gather(parts, x.detach().cpu().contiguous(), group=group)
            return torch.stack(parts).to(x.device)
        every: Tensor = self.accelerator.gather(x.to(self.device).unsqueeze(0))
        return every.to(x.device)

    def make_equal(self, model: nn.Module) -> None:
        """Copy the weights and buffers of the main process's ``model`` to all other processes."""
        if self.world > 1:
            broadcast([tensor.data for tensor in (*model.parameters(), *model.buffers())])

    # ------------------------------------------------------------------------------------------------------ objects

    def gather(self, items: Sequence[T]) -> list[T]:
        """Return the ``items`` of all processes as one list, those of the first process first."""
        mine = list(items)
        if (group := self._group) is not None:
            parts: list[Any] = [None] * self.world
            torch.distributed.all_gather_object(parts, mine, group=group)
            return [item for part in parts for item in part]
        gathered: list[T] = gather_object(mine) if self.world > 1 else mine
        return gathered

    def sync_errors(self, function: Callable[[], T]) -> T:
        """Call ``function`` on every process and return its value; an error on one is raised on all, so none waits.

        If one has failed and another was interrupted, all raise the error: they have to leave in the same way.
        """
        error: BaseException | None = None
        value: Any = None
        try:
            value = function()
        except (OSError, SafetensorError, TrainkitError, Interrupted) as caught:
            error = caught
        if self.world > 1:
            errors = [other for other in self.gather([error]) if other is not None]
            failures = [other for other in errors if not isinstance(other, Interrupted)]
            if error is None or isinstance(error, Interrupted):
                error = next(iter([*failures, *errors]), None)
                if isinstance(error, TrainkitError):
                    error.from_other_rank = True
        if isinstance(error, TrainkitError):
            error.on_all_ranks = True
        if error is not None:
            raise error
        return value  # type: ignore[no-any-return]

    def any_rank(self, here: bool) -> bool:
        """Return whether ``here`` is true on any process; a single one needs no tensor for it."""
        self._stop.progressed()
        return here if self.world == 1 else bool(self.max(torch.tensor(float(here))))

    def on_main(self, function: Callable[[], T]) -> T:
        """Call ``function`` on the main process; return its value, or raise its error, on every process."""
        chosen: list[Any] = [self.sync_errors(lambda: function() if self.is_main else None)]
        if self.world > 1:
            broadcast_object_list(chosen)
        return chosen[0]  # type: ignore[no-any-return]

    # ------------------------------------------------------------------------------------------------------ threads

    @property
    def _group(self) -> Any:
        """The group in which this thread communicates; None: that of all processes."""
        return getattr(self._thread, "group", None)

    @contextmanager
    def within(self, group: Any) -> Iterator[None]:
        """Communicate in ``group`` inside the block and in this thread, beside the thread that trains."""
        self._thread.group = group
        try:
            yield
        finally:
            self._thread.group = None
