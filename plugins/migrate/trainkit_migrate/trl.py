"""Values of TRL that trainkit writes differently. Each function returns settings of trainkit by their dotted paths."""

from __future__ import annotations

from typing import Any

from trainkit_migrate.conversions import Context, RefusedError, Settings
from trainkit_migrate.training_arguments import deepspeed, fsdp
from trainkit_migrate.training_arguments import given as of_any_class

METHODS = {
    "SFTTrainer": "sft",
    "DPOTrainer": "dpo",
    "ORPOTrainer": "orpo",
    "CPOTrainer": "cpo",
    "KTOTrainer": "kto",
    "RewardTrainer": "reward",
    "IterativeSFTTrainer": "sft",
}
"""The methods of the trainers that learn from samples."""
WITHOUT_DROPOUT = ("DPOTrainer", "ORPOTrainer", "CPOTrainer", "KTOTrainer")
"""The trainers that switch dropout off; all but KTO's have a setting for it."""


def implied(_config: Settings, context: Context) -> Settings:
    """Return what TRL does without a field for it."""
    for trainer, method in METHODS.items():
        if trainer in context.given:
            dropout = {} if trainer in WITHOUT_DROPOUT else {"model.disable_dropout": False}
            own_loop = {"train.eval_interval": 0, "train.save_interval": 0} if trainer == "IterativeSFTTrainer" else {}
            limited = of_any_class(context, "save_total_limit") is not None
            kept = {} if limited else {"train.keep_checkpoints": 1_000_000}  # practically all
            sampled = {} if trainer == "RewardTrainer" else {"rollout.max_new_tokens": 1}  # each call gives its own
            return {"method.name": method, **kept, **dropout, **own_loop, **sampled}
    if "DDPOConfig" in context.given:
        return {"method.name": "ddpo", "optimizer.name": "adamw", "train.eval_interval": 0}
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
    own = dict(of_any_class(context, "tracker_kwargs", {}).get("wandb") or {})
    run = {"run_name": name} if (name := own.pop("name", None) or context.get("DDPOConfig.run_name")) else {}
    project_name = of_any_class(context, "tracker_project_name", "trl")
    return {"train.trackers": [{"name": "wandb", "project": project_name, **run, **own}]}


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
                "train.mixed_precision and train.sharding (docs/distributed.md)"
            )
    return found


def project(value: Any, context: Context) -> Settings:
    """Return how many checkpoints are kept; the directory is read with ``logdir``, which names that of the run."""
    if odd := sorted(value.keys() - {"project_dir", "logging_dir", "automatic_checkpoint_naming", "total_limit"}):
        raise RefusedError(f"given {', '.join(odd)}; checkpoints of trainkit are numbered by their steps; remove it")
    if value.get("logging_dir"):
        context.remarks.append("logging_dir has no effect: logs are in the directory of the run")
    return {"train.keep_checkpoints": limit} if (limit := value.get("total_limit")) else {}


def project_of_ppo(value: Any, _context: Context) -> Settings:
    """Return the directory of the run, ``project_dir`` or ``logging_dir``; nothing else is written there by itself."""
    if odd := sorted(value.keys() - {"project_dir", "logging_dir"}):
        raise RefusedError(f"given {', '.join(odd)}; PPOTrainer saves nothing by itself; remove it")
    found = value.get("project_dir") or value.get("logging_dir")
    return {"train.run_dir": str(found)} if found else {}


def threads(value: Any, context: Context) -> Settings:
    """Return the threads that call the reward function while further images are sampled; 0 if that is not asked for."""
    return {"method.reward_workers": context.get("DDPOConfig.max_workers", 2) if value else 0}


def negative(value: Any, _context: Context) -> Settings:
    """Return the negative prompt, one text."""
    return {"method.negative_prompt": value or ""}


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


def mini_batches(value: Any, context: Context) -> Settings:
    """Return the rows of a step over all processes, and those of a pass in one."""
    rows = value * context.get("PPOConfig.gradient_accumulation_steps", 1)
    return {"train.batch_size": rows * context.processes, "train.microbatch_size": value}


def preference_loss(value: Any, _context: Context) -> Settings:
    """Return the loss of a pair."""
    if value not in ("sigmoid", "hinge", "ipo", "kto_pair"):
        raise RefusedError(f"given {value!r}; losses are sigmoid, hinge, ipo and kto_pair")
    return {"method.loss_type": value}


def sampled_in_evaluations(value: Any, context: Context) -> Settings:
    """Return how long responses of evaluations may be: to the length of a side."""
    if not value:
        return {}
    context.remarks.append(
        "each evaluation samples responses of the policy, not of the reference, to the first prompts, as many as "
        "per_device_eval_batch_size: samples.jsonl in the directory of the run"
    )
    length, prompt = (
        of_any_class(context, name) or usual for name, usual in (("max_length", 512), ("max_prompt_length", 128))
    )
    return {"rollout.max_new_tokens": max(length - prompt, 1), "rollout.overlong_prompts": "truncate"}
