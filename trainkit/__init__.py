"""trainkit: RLHF algorithms as plugins. The public names, each imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainkit.version import __version__ as __version__

if TYPE_CHECKING:
    from trainkit import functional, metrics, models, testing
    from trainkit.api import train
    from trainkit.config import (
        EngineEntry,
        EvalMetric,
        GroupSize,
        MethodConfig,
        PluginConfig,
        RewardFunctionConfig,
        SamplingConfig,
        ShardingEntry,
        TRLConfig,
        default_config,
    )
    from trainkit.data.batches import Batch, Preferences, Rollouts, Row, Sequences, TokenBatch
    from trainkit.plugins.hookspecs import hookimpl
    from trainkit.plugins.registry import (
        available_trainers,
        get_trainer,
        register_engine,
        register_hooks,
        register_sharding,
        register_tracker,
        register_trainer,
    )
    from trainkit.trainer.accelerate import AccelerateRLTrainer
    from trainkit.trainer.base import BaseRLTrainer, Verdict
    from trainkit.trainer.collect import Collector
    from trainkit.trainer.loop import AcceleratedLoop
    from trainkit.trainer.sharding import Sharding

_HOMES = {
    "AccelerateRLTrainer": "trainkit.trainer.accelerate",
    "AcceleratedLoop": "trainkit.trainer.loop",
    "BaseRLTrainer": "trainkit.trainer.base",
    "Batch": "trainkit.data.batches",
    "Collector": "trainkit.trainer.collect",
    "EngineEntry": "trainkit.config.entries",
    "EvalMetric": "trainkit.config.base",
    "GroupSize": "trainkit.config.base",
    "MethodConfig": "trainkit.config",
    "PluginConfig": "trainkit.config",
    "Preferences": "trainkit.data.batches",
    "RewardFunctionConfig": "trainkit.config",
    "Rollouts": "trainkit.data.batches",
    "Row": "trainkit.data.batches",
    "SamplingConfig": "trainkit.config",
    "Sequences": "trainkit.data.batches",
    "Sharding": "trainkit.trainer.sharding",
    "ShardingEntry": "trainkit.config.entries",
    "TRLConfig": "trainkit.config",
    "TokenBatch": "trainkit.data.batches",
    "Verdict": "trainkit.trainer.base",
    "available_trainers": "trainkit.plugins.registry",
    "default_config": "trainkit.config",
    "get_trainer": "trainkit.plugins.registry",
    "hookimpl": "trainkit.plugins.hookspecs",
    "register_engine": "trainkit.plugins.registry",
    "register_hooks": "trainkit.plugins.registry",
    "register_sharding": "trainkit.plugins.registry",
    "register_tracker": "trainkit.plugins.registry",
    "register_trainer": "trainkit.plugins.registry",
    "train": "trainkit.api",
}
_MODULES = ("functional", "metrics", "models", "testing")

__all__ = [
    "AccelerateRLTrainer",
    "AcceleratedLoop",
    "BaseRLTrainer",
    "Batch",
    "Collector",
    "EngineEntry",
    "EvalMetric",
    "GroupSize",
    "MethodConfig",
    "PluginConfig",
    "Preferences",
    "RewardFunctionConfig",
    "Rollouts",
    "Row",
    "SamplingConfig",
    "Sequences",
    "Sharding",
    "ShardingEntry",
    "TRLConfig",
    "TokenBatch",
    "Verdict",
    "available_trainers",
    "default_config",
    "functional",
    "get_trainer",
    "hookimpl",
    "metrics",
    "models",
    "register_engine",
    "register_hooks",
    "register_sharding",
    "register_tracker",
    "register_trainer",
    "testing",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _MODULES:
        return import_module(f"trainkit.{name}")
    raise AttributeError(f"module 'trainkit' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
