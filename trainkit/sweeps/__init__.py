"""Sweeps: Optuna searches settings, and each trial is a run, or several with different seeds, in processes of their own.

What the package exports is imported when it is first used; Optuna is an extra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.plugins import lazy_names

if TYPE_CHECKING:
    from trainkit.sweeps.results import best_config, write_report
    from trainkit.sweeps.running import run_sweep
    from trainkit.sweeps.settings import SweepConfig
    from trainkit.sweeps.sources import Sweep, read_sweep

__all__ = ["Sweep", "SweepConfig", "best_config", "read_sweep", "run_sweep", "write_report"]
__getattr__, __dir__ = lazy_names(__name__, __all__, "settings", "sources", "running", "results")
