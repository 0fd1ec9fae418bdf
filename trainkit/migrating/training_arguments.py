"""Values of TrainingArguments that trainkit writes differently. Each function returns settings of trainkit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from trainkit.migrating.conversions import Context, RefusedError, Settings

LAUNCH = "start the processes with torchrun or accelerate launch (docs/scale.md)"
SCHEDULES = (
    "constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt", "cosine_with_min_lr",
    "warmup_stable_decay",
)  # fmt: skip
OPTIMIZERS = ("sgd", "adafactor", "adagrad", "rmsprop")
PLAIN = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw")


def given(context: Context, name: str, default: Any = None) -> Any:
    """Return a field of whichever class has it."""
    return next((found for each in context.given if (found := context.get(f"{each}.{name}")) is not None), default)


def rows_of_a_step(value: Any, context: Context) -> Settings:
    """Return the rows of a step over all processes, and those of a pass in one."""
    rows = value * given(context, "gradient_accumulation_steps", 1) * context.processes
    return {"train.batch_size": rows, "train.microbatch_size": value}


def steps(value: Any, _context: Context) -> Settings:
    """Return the number of steps; -1 stands for none."""
    return {"train.total_steps": value} if value > 0 else {}


def epochs(value: Any, context: Context) -> Settings:
    """Return the passes over the data, unless the number of steps is given."""
    if given(context, "max_steps", -1) > 0:
        return {}
    if value != int(value):
        raise RefusedError(f"given {value}; epochs are whole numbers: set train.total_steps")
    return {"train.epochs": int(value)}


def warmup(value: Any, context: Context) -> Settings:
    """Return the steps of the warm-up, of a number of steps or of a share of all of them."""
    if not value:
        return {}
    if value >= 1:
        return {"scheduler.warmup_steps": int(value)}
    total = given(context, "max_steps", -1)
    if total <= 0:
        raise RefusedError(f"given the share {value}; warm-up is given in steps: scheduler.warmup_steps")
    return {"scheduler.warmup_steps": math.ceil(value * total)}


def betas(_value: Any, context: Context) -> Settings:
    """Return both decay rates of Adam."""
    return {"optimizer.kwargs.betas": [given(context, "adam_beta1", 0.9), given(context, "adam_beta2", 0.999)]}


def optimizer(value: Any, _context: Context) -> Settings:
    """Return the name of the optimizer."""
    name = str(getattr(value, "value", value))
    if name not in (*PLAIN, *OPTIMIZERS):
        raise RefusedError(
            f"given {name!r}; write optimizer.name, which has the optimizers of torch, or give trainkit.train one of "
            "another library as an object"
        )
    return {"optimizer.name": name if name in OPTIMIZERS else "adamw"}


def schedule(value: Any, _context: Context) -> Settings:
    """Return the name of the schedule."""
    name = str(getattr(value, "value", value)).removesuffix("_with_warmup")
    if name not in SCHEDULES:
        raise RefusedError(f"given {name!r}; write scheduler.name, which has {', '.join(SCHEDULES)}")
    return {"scheduler.name": name}


def largest_norm(value: Any, _context: Context) -> Settings:
    """Return the norm at which gradients are clipped; 0 turned it off."""
    return {"train.max_grad_norm": value or None}


def bf16(value: Any, _context: Context) -> Settings:
    """Return the precision."""
    return {"train.mixed_precision": "bf16"} if value else {}


def fp16(value: Any, _context: Context) -> Settings:
    """Return the precision."""
    return {"train.mixed_precision": "fp16"} if value else {}


def noise(value: Any, context: Context) -> Settings:
    """Return the noise of NEFTune, which is a setting of SFT."""
    if not value:
        return {}
    if "SFTConfig" not in context.given:
        raise RefusedError("NEFTune is a setting of SFT; remove it")
    return {"method.neftune_alpha": value}


def trackers(value: Any, context: Context) -> Settings:
    """Return the trackers; wandb gets the names of run and project."""
    names = [value] if isinstance(value, str) else list(value or [])
    if "all" in names:
        raise RefusedError("given 'all'; name the trackers: train.trackers: [tensorboard, {name: wandb}]")
    words = {"project": "project", "run_name": "run_name"}
    named = {ours: text for ours, theirs in words.items() if (text := given(context, theirs))}
    made = [{"name": name, **named} if name == "wandb" else name for name in names if name != "none"]
    return {"train.trackers": made}


def evaluations(value: Any, context: Context) -> Settings:
    """Return the steps between evaluations."""
    when = str(getattr(value, "value", value))
    if when == "epoch":
        raise RefusedError("given 'epoch'; write the steps between evaluations: train.eval_interval")
    between = given(context, "eval_steps") or given(context, "logging_steps", 500)
    return {"train.eval_interval": int(between) if when == "steps" else 0}


def checkpoints(value: Any, _context: Context) -> Settings:
    """Return whether checkpoints are written; the steps between them are a field of their own."""
    when = str(getattr(value, "value", value))
    if when == "epoch":
        raise RefusedError("given 'epoch'; write the steps between checkpoints: train.save_interval")
    if when == "best":
        return {"train.save_best": True}
    return {} if when == "steps" else {"train.save_interval": 0}


def resume(value: Any, _context: Context) -> Settings:
    """Return the checkpoint; true stands for the last one."""
    return {"train.resume": "auto" if value is True else value or None}


def published(value: Any, context: Context) -> Settings:
    """Return the repository of the hub."""
    if not value:
        return {}
    if not (name := given(context, "hub_model_id")):
        raise RefusedError("write the repository: train.push_to_hub: owner/name")
    return {"train.push_to_hub": name}


def sharding(stage: Any) -> str:
    """Return the sharding that a stage of DeepSpeed's ZeRO is."""
    return {0: "none", 1: "zero2", 2: "zero2"}.get(int(stage), "zero3")


def deepspeed(value: Any, context: Context) -> Settings:
    """Return the sharding that a configuration of DeepSpeed asks for."""
    if not isinstance(value, dict):
        raise RefusedError(
            f"given {value!r}, which trainkit does not read; write train.sharding: zero2 or zero3, by the stage in it, "
            f"and {LAUNCH}"
        )
    zero = value.get("zero_optimization", {})
    if any(str(zero.get(name, {}).get("device", "none")) != "none" for name in ("offload_optimizer", "offload_param")):
        raise RefusedError("nothing is offloaded to the CPU; divide the model among more GPUs: train.sharding: fsdp2")
    context.remarks.append(f"of it, only the stage is taken over, as train.sharding; {LAUNCH}")
    return {"train.sharding": sharding(zero.get("stage", 0))}


def fsdp(value: Any, context: Context) -> Settings:
    """Return the sharding that options of FSDP ask for."""
    words = value.split() if isinstance(value, str) else [str(each) for each in value] if _many(value) else []
    if "offload" in words:
        raise RefusedError("nothing is offloaded to the CPU; divide the model among more GPUs: train.sharding: fsdp2")
    if not words and value is not True:
        return {}
    context.remarks.append(f"it is train.sharding: fsdp2, which wraps the blocks of the model by itself; {LAUNCH}")
    return {"train.sharding": "fsdp2"}


def _many(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, dict)


def dataset(value: Any, context: Context) -> Settings:
    """Say that data are an option of the command."""
    context.remarks.append(f"data are an option of the command: --samples {value}, or --prompts {value}")
    return {}


def remote_code(value: Any, context: Context) -> Settings:
    """Say that trust is an option of the command."""
    if value:
        context.remarks.append("it is an option of the command: --trust-remote-code")
    return {}


def adapter(value: Any, context: Context) -> Settings:
    """Return the adapter, of the fields that begin with ``lora_``."""
    if not value:
        return {}
    names = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "task_type": "lora_task_type"}
    names |= {"target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}
    usual = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
    found = {ours: given(context, theirs, usual.get(ours)) for ours, theirs in names.items()}
    settled = {name: each for name, each in found.items() if each is not None}
    return {"model.peft_config": {"peft_type": "LORA", **settled}}
