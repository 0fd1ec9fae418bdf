"""What the functions of this package know of a trainer, and what a run keeps besides its progress."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainkit.config import TRLConfig
from trainkit.runs.parallel import Parallel
from trainkit.runs.progress import Progress
from trainkit.runs.stopping import Stop

if TYPE_CHECKING:
    from trainkit.runs.lock import RunLock
    from trainkit.runs.saving import Saving


@dataclass
class RunState:
    """What a run keeps in this process besides its progress; checkpoints do not hold it."""

    stop: Stop = field(default_factory=Stop)
    """What the run was asked to end by, or to save."""
    allow_drift: bool = False
    """Resume even if settings that affect training differ from those of the checkpoint."""
    learning: bool = False
    """Whether `learn` makes the steps of the run, rather than a loop of the caller's own."""
    resumed: list[str] = field(default_factory=list)
    """Messages to log about the checkpoint that the run resumes from."""
    recorded_frozen: list[str] | None = None
    """Fingerprints of the frozen models of the run that was resumed; None if none was."""
    recorded_trunk: bool | None = None
    """Whether the run that is being resumed keeps the output of frozen layers; None if none is."""
    saving: Saving | None = None
    """The checkpoint that is being written while the training goes on."""
    lock: RunLock | None = None
    """The lock on the run's directory, in the main process."""
    clock: float = field(default_factory=time.perf_counter)
    """When the seconds of the run were last counted."""


class RunView(Protocol):
    """A trainer, as far as the directory of its run is concerned."""

    config: TRLConfig[Any]
    progress: Progress
    parallel: Parallel
    run_state: RunState
    run_dir: Path | None
    store: Any
    identity: Any
    hooks: Any
    health: Any
    plan: Any
    models: Any
    updater: Any
    collector: Any
    last_step: Any
    recorder: Any
    accelerator: Any
    live_model: Any
    pipeline: Any
    chosen_reference: Any

    @property
    def done(self) -> bool: ...
    @property
    def total_steps(self) -> int: ...
    @property
    def needs_reference(self) -> bool: ...

    def stop(self, reason: str) -> None: ...
    def compared(self, metrics: Mapping[str, float]) -> float | None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
    def write_model(self, building: Path, target: Path) -> None: ...
    def export_fault(self, directory: Path) -> str: ...
    def model_card(self) -> dict[str, str]: ...
