"""The configuration: a frozen tree of plain data, checked as a whole before anything is loaded.

This room does not import torch. The section ``method`` belongs to the algorithm and is validated by its plugin's own
class.
"""

from __future__ import annotations

from trainkit.config.arguments import BITS, present_arguments, unknown_advice
from trainkit.config.base import EvalMetric, GroupSize, MethodConfig, Plain, PluginConfig, SamplingConfig, Section
from trainkit.config.entries import EngineEntry, HooksEntry, ShardingEntry, TrackerEntry
from trainkit.config.names import dotted, note
from trainkit.config.places import differences
from trainkit.config.sections import (
    DataConfig,
    EnvironmentConfig,
    ModelConfig,
    OptimizerConfig,
    RewardFunctionConfig,
    RolloutConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainConfig,
    one_token,
    sweep,
)
from trainkit.config.sources import absent, read_config
from trainkit.config.tree import TRLConfig, default_config

__all__ = [
    "BITS",
    "DataConfig",
    "EngineEntry",
    "EnvironmentConfig",
    "EvalMetric",
    "GroupSize",
    "HooksEntry",
    "MethodConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Plain",
    "PluginConfig",
    "RewardFunctionConfig",
    "RolloutConfig",
    "SamplingConfig",
    "SchedulerConfig",
    "Section",
    "ShardingEntry",
    "TRLConfig",
    "TokenizerConfig",
    "TrackerEntry",
    "TrainConfig",
    "absent",
    "default_config",
    "differences",
    "dotted",
    "note",
    "one_token",
    "present_arguments",
    "read_config",
    "sweep",
    "unknown_advice",
]
