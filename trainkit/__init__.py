"""trainkit: RLHF algorithms as plugins. The public names, each imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainkit.plugins.lazy import lazy_names
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
    from trainkit.trainer.sharding import FSDP2, Sharding

__all__ = [
    "FSDP2",
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
_MODULES = ("functional", "metrics", "models", "testing")
_find, _ = lazy_names(__name__, __all__, "config", "plugins", "api", "data", "trainer", "trainer.sharding")


def __getattr__(name: str) -> Any:
    return import_module(f"trainkit.{name}") if name in _MODULES else _find(name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
