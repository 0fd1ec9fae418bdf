"""Values of JSON files of DeepSpeed that trainkit writes differently. Each function returns settings of trainkit."""

from __future__ import annotations

from typing import Any

from trainkit_migrate.conversions import Context, RefusedError, Settings


def implied(_config: Settings, _context: Context) -> Settings:
    """Return nothing: a file of DeepSpeed says nothing about the algorithm."""
    return {}


def offload(value: Any, _context: Context) -> Settings:
    """Return nothing, unless something is offloaded."""
    if str(value.get("device", "none")) != "none":
        raise RefusedError("nothing is offloaded; divide the model among more GPUs: train.sharding: fsdp2")
    return {}


def number(value: Any, _context: Context) -> Settings:
    """Return the rows of a step."""
    return {} if value == "auto" else {"train.batch_size": int(value)}


def rows_at_a_time(value: Any, context: Context) -> Settings:
    """Return the rows of a pass, and those of a step if passes are given and the rows are not."""
    if value == "auto":
        return {}
    found: Settings = {"train.microbatch_size": int(value)}
    passes = context.get("gradient_accumulation_steps", 1)
    if passes != "auto" and context.get("train_batch_size", "auto") == "auto":
        found["train.batch_size"] = int(value) * int(passes) * context.processes
    return found


def precision(_value: Any, context: Context) -> Settings:
    """Return the mixed precision, unless both are left to the other configuration."""
    asked = {name: context.get(f"{name}.enabled", False) for name in ("bf16", "fp16")}
    if "auto" in asked.values():
        return {}
    return {"train.mixed_precision": next((name for name, on in asked.items() if on), "no")}


def optimizer(value: Any, _context: Context) -> Settings:
    """Return the optimizer."""
    names = {"adam": "adam", "adamw": "adamw"}
    name, given = str(value.get("type")).lower(), dict(value.get("params") or {})
    if name not in names:
        raise RefusedError(f"given {value.get('type')!r}; write optimizer.name: adamw, or another one of trainkit")
    given = {key: each for key, each in given.items() if each != "auto" and key not in ("torch_adam", "adam_w_mode")}
    own = {f"optimizer.{key}": given.pop(key) for key in ("lr", "weight_decay") if key in given}
    return {"optimizer.name": names[name], **own, **({"optimizer.kwargs": given} if given else {})}


def schedule(value: Any, _context: Context) -> Settings:
    """Return the schedule, which warms up linearly to a constant rate or down to 0 afterwards."""
    names = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
    name, given = str(value.get("type")).lower(), value.get("params") or {}
    if name not in names or given.get("warmup_min_lr", 0) not in (0, "auto"):
        raise RefusedError(f"given {value!r}; write scheduler.name: linear, cosine or constant, and warmup_steps")
    steps = given.get("warmup_num_steps", 1000)
    return {"scheduler.name": names[name], **({} if steps == "auto" else {"scheduler.warmup_steps": int(steps)})}
