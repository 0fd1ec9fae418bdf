"""Values of DDPO that TRL and ddpo-pytorch have in common and trainkit writes differently.

The fields of ddpo-pytorch are in sections; those of TRL are in `DDPOConfig`, with the section in front of the name.
Each function returns settings of trainkit.
"""

from __future__ import annotations

import math
from pathlib import PurePath
from typing import Any

from trainkit_migrate.conversions import Context, RefusedError, Settings


def field(context: Context, section: str, name: str, default: Any) -> Any:
    """Return a field of a section, ``sample``, ``train`` or ``per_prompt_stat_tracking``."""
    found = context.get(f"DDPOConfig.{section}_{name}")
    return context.get(f"{section}.{name}", default) if found is None else found


def outer(context: Context, name: str) -> Any:
    """Return a field that is in no section; empty if it is not given."""
    return context.get(f"DDPOConfig.{name}") or context.get(name, "")


def images_of_a_step(context: Context) -> int:
    """Return the images of a step over all processes."""
    images = field(context, "train", "batch_size", 1) * field(context, "train", "gradient_accumulation_steps", 1)
    return int(images * context.processes)


def images_of_a_collection(context: Context) -> int:
    """Return the images of a collection over all processes."""
    images = field(context, "sample", "batch_size", 1) * field(context, "sample", "num_batches_per_epoch", 2)
    return int(images * context.processes)


def steps_of_an_epoch(context: Context) -> int:
    """Return the optimizer steps that are made with a collection."""
    passes = field(context, "train", "num_inner_epochs", 1)
    return int(passes * math.ceil(images_of_a_collection(context) / images_of_a_step(context)))


def images_at_a_time(value: Any, context: Context) -> Settings:
    """Return the images that a process samples at a time, and those of a collection over all processes."""
    return {"rollout.batch_size": value, "rollout.num_rollouts": images_of_a_collection(context)}


def rows_of_a_step(value: Any, context: Context) -> Settings:
    """Return the rows of a step over all processes, one for each denoising step of an image, and those of a pass."""
    steps = field(context, "sample", "num_steps", 50) * field(context, "train", "timestep_fraction", 1.0)
    return {"train.batch_size": images_of_a_step(context) * max(int(steps), 1), "train.microbatch_size": value}


def length(value: Any, context: Context) -> Settings:
    """Return the steps of so many collections with their inner epochs."""
    return {"train.total_steps": value * steps_of_an_epoch(context)}


def checkpoints(value: Any, context: Context) -> Settings:
    """Return the steps between checkpoints, given as epochs."""
    return {"train.save_interval": value * steps_of_an_epoch(context)}


def betas(value: Any, context: Context) -> Settings:
    """Return the further arguments of AdamW."""
    beta2, eps = field(context, "train", "adam_beta2", 0.999), field(context, "train", "adam_epsilon", 1e-8)
    return {"optimizer.kwargs": {"betas": [value, beta2], "eps": eps}}


def guidance(value: Any, context: Context) -> Settings:
    """Return the scale of guidance, which is off at 1 and below."""
    if value < 1:
        context.remarks.append("guidance is off in sampling and training, as at 1.0")
    return {"method.guidance_scale": max(float(value), 1.0)}


def guided(value: Any, context: Context) -> Settings:
    """Return nothing: guidance in training is that of sampling, so it can only be off in both."""
    if not value and field(context, "sample", "guidance_scale", 5.0) > 1:
        raise RefusedError(
            "guidance is the same in training and sampling, or the ratio of their probabilities would not be 1 at "
            "first; set the guidance scale of sampling to 1.0 to turn it off in both"
        )
    return {}


def statistics(value: Any, context: Context) -> Settings:
    """Return how many rewards are kept per prompt, and how many are needed; 0 without statistics per prompt."""
    tracked = {"buffer_size": value, "min_count": field(context, "per_prompt_stat_tracking", "min_count", 16)}
    if context.get("DDPOConfig.per_prompt_stat_tracking", True):
        return {f"method.{name}": each for name, each in tracked.items()}
    return {"method.buffer_size": 0}


def tf32(value: Any, context: Context) -> Settings:
    """Return nothing: the adapter sets it on a GPU; elsewhere write ``torch.set_float32_matmul_precision("high")``."""
    if value and "DDPOConfig" not in context.given:
        context.remarks.append("write torch.set_float32_matmul_precision('high') in the script")
    return {}


def resumed(value: Any, _context: Context) -> Settings:
    """Return the checkpoint of trainkit to resume from, or the newest one of a run's directory."""
    if not value:
        return {}
    path = PurePath(value)
    if path.name.startswith("checkpoint_"):
        raise RefusedError(
            f"given {value!r}; checkpoints of accelerate are not read. Load the model that was saved, or give the "
            "directory of a run of trainkit"
        )
    if path.name.startswith("step_"):
        return {"train.resume": str(path)}
    return {"train.resume": "auto", "train.run_dir": str(path.parent if path.name == "checkpoints" else path)}


def directory(value: Any, context: Context) -> Settings:
    """Return the directory of the run, that of the project or the run's name in ``logdir``, unless a run is resumed."""
    before = PurePath(outer(context, "resume_from"))
    if before.name and not before.name.startswith(("step_", "checkpoint_")):
        return {}
    project = context.get("DDPOConfig.project_kwargs", {}).get("project_dir")
    name = outer(context, "run_name") or outer(context, "exp_name") or "ddpo"
    return {"train.run_dir": str(project or PurePath(value) / name)}
