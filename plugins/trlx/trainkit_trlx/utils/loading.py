"""Looking up what is registered; importing this module registers the trainers and pipelines of trlX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainkit_trlx.data.method_configs import registered
from trainkit_trlx.models import modeling_ilql, modeling_ppo
from trainkit_trlx.pipeline import _DATAPIPELINE, offline_pipeline
from trainkit_trlx.trainer import (
    _TRAINERS,
    accelerate_ilql_trainer,
    accelerate_ppo_trainer,
    accelerate_rft_trainer,
    accelerate_sft_trainer,
)

REGISTERED = (
    modeling_ilql,
    modeling_ppo,
    offline_pipeline,
    accelerate_ilql_trainer,
    accelerate_ppo_trainer,
    accelerate_rft_trainer,
    accelerate_sft_trainer,
)
"""The modules that register trlX's own."""


def get_trainer(name: str) -> Callable[..., Any]:
    """Return the class of a registered trainer, whatever the case of its name.

    Raises:
        ConfigError: there is none of this name.
    """
    if name.lower().startswith("nemo"):
        raise NotImplementedError(
            f"{name} needs NeMo, which trainkit does not have: take the trainer that begins with Accelerate, and "
            "divide the model with train.sharding of trainkit (docs/distributed.md)"
        )
    found: Callable[..., Any] = registered(name, _TRAINERS, "train.trainer", "trainer")
    return found


def get_pipeline(name: str) -> Callable[..., Any]:
    """Return the class of a registered pipeline, whatever the case of its name.

    Raises:
        ConfigError: there is none of this name.
    """
    found: Callable[..., Any] = registered(name, _DATAPIPELINE, "train.pipeline", "pipeline")
    return found
