"""The memory that a run needs, computed without weights and without data, and the sizes that fit."""

from trainkit_tools.estimates.measuring import Lengths, Need, measure
from trainkit_tools.estimates.shardings import Phase, Plan, choose, plan

__all__ = ["Lengths", "Need", "Phase", "Plan", "choose", "measure", "plan"]
