"""Values of TrainingArguments that trainkit writes differently. Each function returns settings of trainkit."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from trainkit_migrate.conversions import Context, RefusedError, Settings

LAUNCH = "start the processes with torchrun or accelerate launch (docs/distributed.md)"
SCHEDULES = (
    "constant", "linear", "cosine", "cosine_with_restarts", "polynomial", "inverse_sqrt", "cosine_with_min_lr",
    "warmup_stable_decay",
)  # fmt: skip
OPTIMIZERS = ("sgd", "adafactor", "adagrad", "rmsprop")
WITHOUT_DROPOUT = (
    "DPOConfig", "KTOConfig", "ORPOConfig", "CPOConfig", "RewardConfig", "OnlineDPOConfig", "DpoScriptArguments",
)  # fmt: skip
"""Classes whose trainers switch dropout off unless they are told otherwise."""
PLAIN = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw")


def given(context: Context, name: str, default: Any = None) -> Any:
    """Return a field of whichever class has it, or of a file without classes."""
    paths = (name, *(f"{each}.{name}" for each in context.given))
    return next((found for path in paths if (found := context.get(path)) is not None), default)


def _rows_of_a_step(context: Context) -> int:
    per_device = given(context, "per_device_train_batch_size", 8)
    return int(per_device * given(context, "gradient_accumulation_steps", 1)) * context.processes


def _steps_of_an_epoch(context: Context, instead: str) -> int:
    if context.rows is None:
        raise RefusedError(f"the steps of an epoch are not known before the data are read; write {instead}")
    return math.ceil(context.rows / _rows_of_a_step(context))


def _total_steps(context: Context, instead: str) -> int:
    most = int(given(context, "max_steps", -1))
    if most <= 0 and (episodes := given(context, "total_episodes")):
        return steps_of_episodes(episodes, context)
    return most if most > 0 else math.ceil(given(context, "num_train_epochs", 3) * _steps_of_an_epoch(context, instead))


def steps_of_episodes(episodes: int, context: Context) -> int:
    """Return the steps in which so many responses, or prompts with a pair of responses each, are trained on."""
    return math.ceil(episodes / _rows_of_a_step(context)) * passes_of(context)


def passes_of(context: Context) -> int:
    """Return the passes over what is sampled; online DPO makes one."""
    return int(given(context, "num_ppo_epochs", 4)) if {"RLOOConfig", "PPOv2Config"} & context.given.keys() else 1


def _between(when: str, number: Any, context: Context, instead: str) -> int:
    """Return the steps from one evaluation or checkpoint to the next, of which some have a share; 0 for none."""
    if when == "epoch":
        return _steps_of_an_epoch(context, instead)
    if when != "steps":
        return 0
    return int(number) if number >= 1 else math.ceil(number * _total_steps(context, instead))


def _word(value: Any) -> str:
    return str(getattr(value, "value", value))


def rows_of_a_step(value: Any, context: Context) -> Settings:
    """Return the rows of a step over all processes, and those of a pass in one."""
    return {"train.batch_size": _rows_of_a_step(context), "train.microbatch_size": value}


def length(_value: Any, context: Context) -> Settings:
    """Return the steps of the run if they are given, or else the epochs; part of an epoch as steps."""
    epochs = given(context, "num_train_epochs", 3)
    if given(context, "max_steps", -1) > 0 or epochs != int(epochs):
        return {"train.total_steps": _total_steps(context, "max_steps")}
    return {"train.epochs": int(epochs)}


def warmup(value: Any, context: Context) -> Settings:
    """Return the steps of the warm-up, given as steps or as a share of the run; `constant` has none."""
    if not value or _word(given(context, "lr_scheduler_type")) == "constant":
        return {}
    steps = int(value) if value >= 1 else math.ceil(value * _total_steps(context, "warmup_steps, or max_steps"))
    return {"scheduler.warmup_steps": steps}


def adam(_value: Any, context: Context) -> Settings:
    """Return the further arguments of AdamW, which other optimizers do not have."""
    if _word(given(context, "optim", "adamw")) not in PLAIN:
        return {}
    rates = [given(context, "adam_beta1", 0.9), given(context, "adam_beta2", 0.999)]
    return {"optimizer.kwargs": {"betas": rates, "eps": given(context, "adam_epsilon", 1e-8)}}


def decay(value: Any, context: Context) -> Settings:
    """Return the decay of weights; biases and norms have none, as in transformers, unless an adapter is trained."""
    settings: Settings = {"optimizer.weight_decay": value}
    if value and given(context, "deepspeed"):
        context.remarks.append("with DeepSpeed it acts on biases and norms too, which transformers leaves out")
    elif value and not any(given(context, name) for name in ("peft_config", "use_peft", "adapter")):
        settings["optimizer.groups"] = [{"match": r"bias|(?i:norm)|\bln_", "weight_decay": 0.0}]
    return settings


def optimizer(value: Any, context: Context) -> Settings:
    """Return the name of the optimizer."""
    name = _word(value)
    if name == "adafactor":
        context.remarks.append(
            "torch's Adafactor multiplies the rate by the size of the weights, and that of transformers does not: give "
            "as an object Adafactor(parameters, lr=..., scale_parameter=False, relative_step=False) of transformers"
        )
    if name not in (*PLAIN, *OPTIMIZERS):
        raise RefusedError(
            f"given {name!r}; write one of {', '.join((*PLAIN, *OPTIMIZERS))}, or give as an object an optimizer of "
            "another library, such as bitsandbytes"
        )
    return {"optimizer.name": name if name in OPTIMIZERS else "adamw"}


def schedule(value: Any, _context: Context) -> Settings:
    """Return the name of the schedule."""
    name = _word(value).removesuffix("_with_warmup")
    if name not in SCHEDULES:
        raise RefusedError(f"given {name!r}; trainkit knows {', '.join(SCHEDULES)}")
    return {"scheduler.name": name}


def largest_norm(value: Any, _context: Context) -> Settings:
    """Return the norm at which gradients are clipped; 0 turned it off."""
    return {"train.max_grad_norm": value or None}


def checkpointing(_value: Any, context: Context) -> Settings:
    """Return whether activations are computed again in the backward pass; the field has an old and a new name."""
    names = ("activation_checkpointing", "gradient_checkpointing")
    return {"train.gradient_checkpointing": any(given(context, name) for name in names)}


def precision(_value: Any, context: Context) -> Settings:
    """Return the mixed precision."""
    return {"train.mixed_precision": next((name for name in ("bf16", "fp16") if given(context, name)), "no")}


def noise(value: Any, context: Context) -> Settings:
    """Return the noise of NEFTune, which is a setting of SFT."""
    if not value:
        return {}
    if not context.given.keys() & {"SFTConfig", "SFTTrainer", "IterativeSFTTrainer"}:
        raise RefusedError("only SFT adds noise to embeddings; remove it")
    return {"method.neftune_alpha": value}


def trackers(value: Any, context: Context) -> Settings:
    """Return the trackers; wandb gets the name of the run."""
    names = [value] if isinstance(value, str) else list(value or [])
    if "all" in names:
        raise RefusedError("given 'all'; name the trackers, such as ['wandb']: 'all' depends on what is installed")
    run = {"run_name": name} if (name := given(context, "run_name")) else {}
    return {
        "train.trackers": [{"name": "wandb", **run} if name == "wandb" else name for name in names if name != "none"]
    }


def evaluations(value: Any, context: Context) -> Settings:
    """Return the steps between evaluations."""
    if value is None:
        return {}
    number = given(context, "eval_steps") or given(context, "logging_steps", 500)
    return {"train.eval_interval": _between(_word(value), number, context, "eval_strategy: steps, and eval_steps")}


def checkpoints(_value: Any, context: Context) -> Settings:
    """Return the steps between checkpoints, or that the best evaluation alone is kept."""
    when = _word(given(context, "save_strategy", "steps"))
    if when == "best":
        return {"train.save_interval": 0, **best(True, context)}
    number = given(context, "save_steps", 500)
    return {"train.save_interval": _between(when, number, context, "save_strategy: steps, and save_steps")}


def best(value: Any, context: Context) -> Settings:
    """Return which evaluation is the best one, whose model is exported."""
    if not value:
        return {}
    name = str(given(context, "metric_for_best_model", "loss")).removeprefix("eval_")
    if name != "loss":
        context.remarks.append(f"the metric is {name!r} as trainkit logs it, of evaluations: eval/{name}")
    greater = given(context, "greater_is_better", not name.endswith("loss"))
    metric = "eval/loss/total" if name == "loss" else f"eval/{name}"
    return {"train.save_best": {"metric": metric, "mode": "max" if greater else "min"}}


def resume(value: Any, _context: Context) -> Settings:
    """Return the checkpoint; true stands for the last one."""
    return {"train.resume": "auto" if value is True else value or None}


def published(value: Any, context: Context) -> Settings:
    """Return the repository of the hub."""
    if not value:
        return {}
    if not (name := given(context, "hub_model_id")):
        raise RefusedError("give hub_model_id, owner/name")
    return {"train.push_to_hub": name}


def sharding(stage: Any, context: Context) -> str:
    """Return the sharding that a stage of DeepSpeed's ZeRO is; say that stage 1 becomes stage 2."""
    if int(stage) == 1:
        context.remarks.append("stage 1 becomes zero2, which divides gradients as well and computes the same")
    return {0: "none", 1: "zero2", 2: "zero2"}.get(int(stage), "zero3")


def deepspeed(value: Any, context: Context) -> Settings:
    """Return the sharding that a configuration of DeepSpeed asks for."""
    if not value:
        return {}
    if not isinstance(value, dict):
        raise RefusedError(
            f"given {value!r}, which trainkit migrate translates by itself; write train.sharding: zero2 or zero3, by "
            f"the stage in it, and {LAUNCH}"
        )
    zero = value.get("zero_optimization", {})
    if any(str(zero.get(name, {}).get("device", "none")) != "none" for name in ("offload_optimizer", "offload_param")):
        raise RefusedError("nothing is offloaded to the CPU; divide the model among more GPUs: train.sharding: fsdp2")
    context.remarks.append(f"of it, only the stage is taken over, as train.sharding; {LAUNCH}")
    return {"train.sharding": sharding(zero.get("stage", 0), context)}


def fsdp(value: Any, context: Context) -> Settings:
    """Return the sharding that options of FSDP ask for."""
    words = value.split() if isinstance(value, str) else [str(each) for each in value] if _many(value) else []
    if "offload" in words:
        raise RefusedError("nothing is offloaded to the CPU; divide the model among more GPUs: train.sharding: fsdp2")
    if not words and value is not True:
        return {}
    context.remarks.append(f"it is train.sharding: fsdp2, which wraps the blocks of the model by itself; {LAUNCH}")
    return {"train.sharding": "fsdp2"}


def fsdp_settings(value: Any, _context: Context) -> Settings:
    """Return nothing: what transformers fills in has no effect, and other settings are refused."""
    if not value:
        return {}
    if not isinstance(value, dict):
        raise RefusedError(f"given {value!r}, which trainkit does not read; write train.sharding: fsdp2 ({LAUNCH})")
    usual = {"reshard_after_forward": True}
    if odd := [name for name, each in value.items() if each not in (None, False, 0, "", [], usual.get(name))]:
        raise RefusedError(
            f"given {', '.join(odd)}; train.sharding: fsdp2 wraps the blocks of the model and has no settings; "
            f"remove it, and {LAUNCH}"
        )
    return {}


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
    if given(context, "disable_dropout", not context.given.keys().isdisjoint(WITHOUT_DROPOUT)):
        settled.pop("lora_dropout")  # it switches off that of the adapter, too
        return {"model.peft_config": {"peft_type": "LORA", **settled}}
    dropout = {"model.disable_dropout": False} if settled.get("lora_dropout") else {}
    return {"model.peft_config": {"peft_type": "LORA", **settled}, **dropout}
