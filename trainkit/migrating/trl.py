"""Values of TRL that trainkit writes differently. Each function returns settings of trainkit by their dotted paths."""

from __future__ import annotations

from typing import Any

from trainkit.migrating.conversions import Context, RefusedError, Settings
from trainkit.migrating.training_arguments import deepspeed, fsdp


def implied(_config: Settings, context: Context) -> Settings:
    """Return what TRL does without a field for it."""
    if "PPOConfig" not in context.given:
        return {}
    # its loop has no end, evaluates and saves nothing by itself, and steps with Adam
    loop = {"train.total_steps": None, "train.eval_interval": 0, "train.save_interval": 0, "rollout.max_new_tokens": 1}
    return {"method.name": "ppo", "optimizer.name": "adam", "optimizer.weight_decay": 0.0, **loop}


def tracker(value: Any, context: Context) -> Settings:
    """Return the tracker with its project."""
    if value is None:
        return {"train.trackers": []}
    if value == "tensorboard":
        return {"train.trackers": ["tensorboard"]}
    if value != "wandb":
        raise RefusedError(f"given {value!r}; TRL has wandb and tensorboard, trainkit more: see train.trackers")
    return {"train.trackers": [{"name": "wandb", "project": context.get("PPOConfig.tracker_project_name", "trl")}]}


def accelerator(value: Any, context: Context) -> Settings:
    """Return precision and sharding; trainkit makes the accelerator itself."""
    found: Settings = {}
    for name, given in value.items():
        if name == "mixed_precision":
            found["train.mixed_precision"] = given or "no"
        elif name == "fsdp_plugin":
            found |= fsdp(given is not None, context)
        elif name == "deepspeed_plugin":
            stage = given.get("zero_stage") if isinstance(given, dict) else getattr(given, "zero_stage", None)
            found |= deepspeed({"zero_optimization": {"stage": stage or 2}}, context)
        else:
            raise RefusedError(
                f"given {name}; trainkit makes the accelerator: mixed_precision and fsdp_plugin are taken over, as "
                "train.mixed_precision and train.sharding (docs/scale.md)"
            )
    return found


def target(value: Any, context: Context) -> Settings:
    """Return the target KL, if β is adapted."""
    adapted = context.get("PPOConfig.adap_kl_ctrl", True) and context.get("PPOConfig.init_kl_coef", 0.2)
    return {"method.target": value if adapted else None}  # β of 0 stays 0


def horizon(value: Any, _context: Context) -> Settings:
    """Return the time scale of β in responses."""
    return {} if value is None else {"method.horizon": int(value)}


def largest_kl(value: Any, context: Context) -> Settings:
    """Return the KL at which a collection is left, if that is asked for."""
    return {"method.target_kl": value if context.get("PPOConfig.early_stopping", False) else None}


def rollouts(value: Any, context: Context) -> Settings:
    """Return the rows of a collection over all processes."""
    return {"rollout.num_rollouts": value * context.processes}


def rows_of_a_step(value: Any, context: Context) -> Settings:
    """Return the rows of a step over all processes, and those of a pass in one."""
    rows = value * context.get("PPOConfig.gradient_accumulation_steps", 1)
    return {"train.batch_size": rows * context.processes, "train.microbatch_size": value}
