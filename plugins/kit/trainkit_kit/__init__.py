"""The conformance kit: checks for the authors of plugins of trainkit.

`check_plugin` runs all checks of a plugin, and `parametrize_checks` makes a pytest case of each. `Bandit` is a task
whose optimal policy is known.
"""

from trainkit_kit.bandit import Bandit
from trainkit_kit.conformance import (
    check_engine,
    check_plugin,
    check_trainer,
    parametrize_checks,
)
from trainkit_kit.failures import CheckError, ConformanceError

__all__ = [
    "Bandit",
    "CheckError",
    "ConformanceError",
    "check_engine",
    "check_plugin",
    "check_trainer",
    "parametrize_checks",
]
