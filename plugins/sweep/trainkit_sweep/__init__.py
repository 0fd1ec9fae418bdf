"""Sweeps: Optuna searches settings, and a trial is a run, or several with different seeds, in their own processes.

What the package exports is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.plugins import lazy_names

if TYPE_CHECKING:
    from trainkit_sweep.running import run_sweep
    from trainkit_sweep.settings import SweepConfig
    from trainkit_sweep.sources import Sweep, read_sweep

__all__ = ["Sweep", "SweepConfig", "read_sweep", "run_sweep"]
__getattr__, __dir__ = lazy_names(__name__, __all__, "settings", "sources", "running")
