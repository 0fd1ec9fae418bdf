"""Values of JSON files of DeepSpeed that trainkit writes differently. Each function returns settings of trainkit."""

from __future__ import annotations

from typing import Any

from trainkit_migrate.conversions import Context, RefusedError, Settings


def implied(_config: Settings, context: Context) -> Settings:
    """Return that gradients are not clipped, unless that is given; a file says nothing about the algorithm."""
    if "gradient_clipping" in context.given:
        return {}
    context.remarks.append("gradients are not clipped; versions of DeepSpeed of 2026 clip them at 1.0 by default")
    return {"train.max_grad_norm": None}


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
    """Return the optimizer; Adam of DeepSpeed is AdamW, unless ``adam_w_mode`` is turned off."""
    names = {"adam": "adamw", "adamw": "adamw"}
    name, given = str(value.get("type")).lower(), dict(value.get("params") or {})
    if given.get("adam_w_mode") is False:
        names["adam"] = "adam"
    if name not in names:
        raise RefusedError(f"given {value.get('type')!r}; write optimizer.name: adamw, or another one of trainkit")
    given = {key: each for key, each in given.items() if each != "auto" and key not in ("torch_adam", "adam_w_mode")}
    own = {f"optimizer.{key}": given.pop(key) for key in ("lr", "weight_decay") if key in given}
    return {"optimizer.name": names[name], **own, **({"optimizer.kwargs": given} if given else {})}


def schedule(value: Any, context: Context) -> Settings:
    """Return the schedule, which after a warm-up is constant, or falls; its highest rate counts before ``lr``."""
    names = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine_with_min_lr"}
    name, given = str(value.get("type")).lower(), value.get("params") or {}
    lowest = [given.get(each, 0) for each in ("warmup_min_lr", "warmup_min_ratio")]
    if name not in names or any(each not in (0, "auto") for each in lowest):
        raise RefusedError(f"given {value!r}; write scheduler.name: linear, cosine or constant, and warmup_steps")
    found: Settings = {"scheduler.name": names[name]}
    if name == "warmupcosinelr":
        found["scheduler.kwargs"] = {"min_lr_rate": given.get("cos_min_ratio", 1e-4)}
    elif (highest := given.get("warmup_max_lr", None if name == "warmuplr" else 1e-3)) not in (None, "auto"):
        found["optimizer.lr"] = highest
    further = {"scheduler.warmup_steps": given.get("warmup_num_steps", 1000)}
    further["train.total_steps"] = given.get("total_num_steps", "auto")
    if given.get("warmup_type", "log") == "log":
        context.remarks.append("the rate rises linearly, in DeepSpeed logarithmically unless warmup_type is linear")
    return found | {path: int(steps) for path, steps in further.items() if steps != "auto"}
