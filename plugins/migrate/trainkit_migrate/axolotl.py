"""Values of axolotl that trainkit writes differently. Each function returns settings of trainkit."""

from __future__ import annotations

from typing import Any

from trainkit_migrate.conversions import Context, RefusedError, Settings
from trainkit_migrate.trl1 import filled

RENAMED = {
    "micro_batch_size": "per_device_train_batch_size",
    "num_epochs": "num_train_epochs",
    "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type",
}
"""Fields that transformers has by another name."""
AUTO = "it is taken as bf16; for a GPU without it, write train.mixed_precision: fp16"
RL = {"dpo": "dpo", "ipo": "dpo", "kto": "kto", "orpo": "orpo", "simpo": "cpo", "grpo": "grpo"}


def implied(config: Settings, context: Context) -> Settings:
    """Return the method, and what axolotl does where a field is not given."""
    rows = context.get("gradient_accumulation_steps", 1) * context.processes
    usual: Settings = {"train.seq_length": 512, "scheduler.name": "cosine", "train.keep_checkpoints": 4}
    usual |= {"train.batch_size": rows, "train.microbatch_size": 1, "train.save_interval": 0}
    usual["train.mixed_precision"] = "fp16" if context.get("fp16") else "bf16"
    if context.get("bf16") is None and not context.get("fp16"):
        context.remarks.append(f"bf16 is 'auto' by default: {AUTO}")
    if "total_steps" not in config.get("train", {}):
        usual["train.epochs"] = 1
    if context.get("rl") == "simpo":
        usual["method.cpo_alpha"] = 1.0
    if not any(context.get(name) for name in ("save_steps", "save_strategy", "saves_per_epoch")):
        context.remarks.append(
            "axolotl saves a checkpoint after each epoch; trainkit writes the model at the end, and checkpoints with "
            "train.save_interval"
        )
    return filled(config.get("method", {}).get("name", "sft"), {**usual, **_warmup(context)}, config, context)


def _warmup(context: Context) -> Settings:
    """Return the steps of the warm-up that is not given: 3 % of the run, at most 100, and 2 rather than 1."""
    if context.get("warmup_steps") or context.get("warmup_ratio") or context.get("lr_scheduler_type") == "constant":
        return {}
    if not (steps := context.get("max_steps")):
        context.remarks.append(
            "axolotl warms up over 3 % of the steps, at most 100, which are not known before the data are read; write "
            "scheduler.warmup_steps"
        )
        return {}
    found = min(int(0.03 * steps), 100)
    return {"scheduler.warmup_steps": 2 if found == 1 else found}


def lowest_rate(value: Any, context: Context) -> Settings:
    """Return a cosine schedule that ends at a share of the rate."""
    if value is None:
        return {}
    if context.get("lr_scheduler_type", "cosine") != "cosine":
        raise RefusedError("it is for lr_scheduler: cosine alone; remove it")
    return {"scheduler.name": "cosine_with_min_lr", "scheduler.kwargs": {"min_lr_rate": value}}


def method(value: Any, _context: Context) -> Settings:
    """Return the method."""
    if not value:
        return {}
    if value is True:  # of the field reward_model
        return {"method.name": "reward"}
    if value not in RL:
        raise RefusedError(f"given {value!r}; trainkit has {', '.join(RL)} of these")
    loss = {"ipo": "ipo", "simpo": "simpo"}.get(value)
    return {"method.name": RL[value], **({"method.loss_type": loss} if loss else {})}


def datasets(value: Any, context: Context) -> Settings:
    """Say that data are an option of the command."""
    option = "--samples" if value is context.get("datasets") else "--eval-samples"
    paths = [str(each.get("path")) for each in value]
    more = "; join the datasets to one" if len(paths) > 1 else ""
    context.remarks.append(f"data are an option of the command: {option} {paths[0]}{more} (docs/data.md)")
    others = dict.fromkeys(f"{name}: {given}" for each in value for name, given in each.items() if name != "path")
    if others:
        context.remarks.append(
            f"{', '.join(others)} has no effect: give rows with the columns of docs/data.md: messages, or prompt "
            "and output"
        )
    return {}


def special_tokens(value: Any, _context: Context) -> Settings:
    """Return the special tokens of the tokenizer."""
    return {"tokenizer.kwargs": dict(value)} if value else {}


def prompts(value: Any, _context: Context) -> Settings:
    """Return whether prompts are trained on too; otherwise the columns decide."""
    return {"method.train_on_prompts": True} if value else {}


def adapter(value: Any, context: Context) -> Settings:
    """Return the adapter."""
    if not value:
        return {}
    if value != "lora":
        raise RefusedError(f"given {value!r}; write adapter: lora, without load_in_4bit")
    modules = "all-linear" if context.get("lora_target_linear") else context.get("lora_target_modules")
    found = {"r": context.get("lora_r"), "lora_alpha": context.get("lora_alpha"), "target_modules": modules}
    found |= {"lora_dropout": context.get("lora_dropout"), "modules_to_save": context.get("lora_modules_to_save")}
    further = ("use_dora", "use_rslora", "init_lora_weights", "layers_to_transform", "layers_pattern")
    found |= {name: context.get(f"peft_{name}") for name in further}
    settled = {name: each for name, each in found.items() if each is not None}
    dropout = {"model.disable_dropout": False} if settled.get("lora_dropout") else {}
    return {"model.peft_config": {"peft_type": "LORA", **settled}, **dropout}


def precision(value: Any, context: Context) -> Settings:
    """Return the mixed precision; fp16 counts before bf16 where that is 'auto', as it is by default."""
    brain, half = context.get("bf16", "auto"), context.get("fp16", False)
    if brain == "auto" and half:
        return {"train.mixed_precision": "fp16"}
    if value == "auto":
        context.remarks.append(f"'auto': {AUTO}")
    return {"train.mixed_precision": "bf16" if brain else "fp16" if half else "no"}


def attention(value: Any, _context: Context) -> Settings:
    """Return the implementation of attention."""
    return {"model.kwargs.attn_implementation": "flash_attention_2"} if value else {}


def tracker(value: Any, context: Context) -> Settings:
    """Return the tracker wandb with the names that are given, or TensorBoard."""
    if not value:
        return {}
    if value is True:  # of the field use_tensorboard
        return {"train.trackers": ["tensorboard"]}
    named = {"entity": context.get("wandb_entity"), "run_name": context.get("wandb_name")}
    return {
        "train.trackers": [{"name": "wandb", "project": value, **{key: text for key, text in named.items() if text}}]
    }
