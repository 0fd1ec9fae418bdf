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
RL = {"dpo": "dpo", "ipo": "dpo", "kto": "kto", "orpo": "orpo", "simpo": "cpo", "grpo": "grpo"}


def implied(config: Settings, context: Context) -> Settings:
    """Return the method, and what axolotl does where a field is not given: it saves and evaluates after each epoch."""
    rows = context.get("gradient_accumulation_steps", 1) * context.processes
    usual: Settings = {"train.seq_length": 512, "scheduler.name": "cosine", "train.save_interval": 0}
    usual |= {"train.batch_size": rows, "train.microbatch_size": 1}
    if "total_steps" not in config.get("train", {}):
        usual["train.epochs"] = 1
    return filled(config.get("method", {}).get("name", "sft"), usual, config, context)


def method(value: Any, _context: Context) -> Settings:
    """Return the method."""
    if not value:
        return {}
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
    settled = {name: each for name, each in found.items() if each is not None}
    dropout = {"model.disable_dropout": False} if settled.get("lora_dropout") else {}
    return {"model.peft_config": {"peft_type": "LORA", **settled}, **dropout}


def precision(value: Any, context: Context) -> Settings:
    """Return the mixed precision."""
    if value == "auto":
        context.remarks.append("'auto' is bf16; for a GPU without it, write train.mixed_precision: fp16")
    on = {name: context.get(name, False) for name in ("bf16", "fp16")}
    return {"train.mixed_precision": next((name for name, given in on.items() if given), "no")}


def attention(value: Any, _context: Context) -> Settings:
    """Return the implementation of attention."""
    return {"model.kwargs.attn_implementation": "flash_attention_2"} if value else {}


def tracker(value: Any, context: Context) -> Settings:
    """Return the tracker wandb with the names that are given."""
    if not value:
        return {}
    named = {"entity": context.get("wandb_entity"), "run_name": context.get("wandb_name")}
    return {
        "train.trackers": [{"name": "wandb", "project": value, **{key: text for key, text in named.items() if text}}]
    }
