"""Values of ddpo-pytorch that trainkit writes differently; most of them are those of TRL's DDPO."""

from __future__ import annotations

from typing import Any

from trainkit_migrate.conversions import Context, Settings, missing
from trainkit_migrate.images import checkpoints, images_at_a_time, length, rows_of_a_step

PROMPTS = ("imagenet_all", "imagenet_animals", "imagenet_dogs", "nouns_activities", "counting", "from_file")
"""Functions of prompts that `trainkit_ddpo.prompts` has."""
SCORERS = ("aesthetic_score", "llava_strict_satisfaction", "llava_bertscore")
"""Functions of `trainkit_ddpo.rewards` that make a reward function of a model."""
LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "init_lora_weights": "gaussian"}


def implied(config: Settings, context: Context) -> Settings:
    """Return what ddpo-pytorch does where a field is not given."""
    usual: Settings = {
        **images_at_a_time(1, context),
        **rows_of_a_step(1, context),
        **length(100, context),
        **checkpoints(20, context),
        "train.seed": 42,
        "train.eval_interval": 0,
        "train.keep_checkpoints": 5,
        "train.mixed_precision": "fp16",
        "train.trackers": [{"name": "wandb", "project": "ddpo-pytorch"}],
        "optimizer.name": "adamw",
        "optimizer.lr": 3e-4,
        "model.model_path": "runwayml/stable-diffusion-v1-5",
        "model.peft_config": LORA,
    }
    if "per_prompt_stat_tracking" in context.given and not context.given["per_prompt_stat_tracking"]:
        usual["method.buffer_size"] = 0
    return {"method.name": "ddpo", **missing(usual, config)}


def adapter(value: Any, _context: Context) -> Settings:
    """Return the adapter, LoRA with r = 4, or none."""
    return {"model.peft_config": LORA if value else None}


def prompts(value: Any, context: Context) -> Settings:
    """Say that prompts are an option of the command."""
    name = "from_file" if value == "simple_animals" else value
    has = f"; trainkit_ddpo.prompts.{name} returns them as a list" if name in PROMPTS else ""
    context.remarks.append(f"write what {value!r} draws from to a file, and give the option --prompts FILE{has}")
    return {}


def reward(value: Any, context: Context) -> Settings:
    """Say that the reward function is an option of the command."""
    if value in ("jpeg_compressibility", "jpeg_incompressibility"):
        context.remarks.append(f"give {value!r} by the option --reward-fn trainkit_ddpo.rewards:{value}")
        return {}
    made = f"; trainkit_ddpo.rewards.{value} makes it of your model" if value in SCORERS else ""
    context.remarks.append(
        f"give {value!r} by the option --reward-fn FILE.py:NAME; it is called with images [B, C, H, W] from 0 to 1 and "
        f"prompts, and returns a number per image (plugins/ddpo/README.md){made}"
    )
    return {}
