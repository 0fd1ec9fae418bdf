"""What all processes of a run do together: an error or a value of one is that of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate.utils import broadcast_object_list
from safetensors import SafetensorError

from trainkit.errors import TrainkitError
from trainkit.runs.stopping import Interrupted

if TYPE_CHECKING:
    from trainkit.trainer.setup import PreparedTrainer

    Trainer = PreparedTrainer[Any]

T = TypeVar("T")


def everywhere(trainer: Trainer, function: Callable[[], T]) -> T:
    """Call ``function`` on every process and return its value. An error on one is raised on all, so that none waits.

    If one has failed and another was interrupted, all raise the error: they have to leave in the same way.
    """
    error: BaseException | None = None
    value: Any = None
    try:
        value = function()
    except (OSError, SafetensorError, TrainkitError, Interrupted) as caught:
        error = caught
    if trainer.accelerator.num_processes > 1:
        found = [other for other in trainer.gather([error]) if other is not None]
        failures = [other for other in found if not isinstance(other, Interrupted)]
        if error is None or isinstance(error, Interrupted):
            error = next(iter([*failures, *found]), None)
            if isinstance(error, TrainkitError):
                error.elsewhere = True
    if isinstance(error, TrainkitError):
        error.everywhere = True
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


def anywhere(trainer: Trainer, here: bool) -> bool:
    """Return whether ``here`` is true on any process. All processes call it; a single one needs no tensor for it."""
    trainer._stop.progressed()
    return here if trainer.accelerator.num_processes == 1 else bool(trainer.max(torch.tensor(float(here))))


def on_main(trainer: Trainer, function: Callable[[], T]) -> T:
    """Call ``function`` on the main process; return its value, or raise its error, on every process."""
    chosen: list[Any] = [everywhere(trainer, lambda: function() if trainer.accelerator.is_main_process else None)]
    if trainer.accelerator.num_processes > 1:
        broadcast_object_list(chosen)
    return chosen[0]  # type: ignore[no-any-return]
