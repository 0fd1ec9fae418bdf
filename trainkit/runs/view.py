"""What this package knows of a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainkit.config import TRLConfig
from trainkit.runs.parallel import Parallel
from trainkit.runs.progress import Progress

if TYPE_CHECKING:
    from trainkit.runs.run import Run


class RunView(Protocol):
    """A trainer, as far as the directory of its run is concerned."""

    config: TRLConfig[Any]
    progress: Progress
    parallel: Parallel
    run: Run
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
