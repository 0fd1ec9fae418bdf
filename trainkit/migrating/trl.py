"""Values of TRL that trainkit writes differently. Each function returns settings of trainkit by their dotted paths."""

from __future__ import annotations

import math
from typing import Any

from trainkit.migrating.conversions import Context, RefusedError, Settings
from trainkit.migrating.training_arguments import deepspeed, fsdp
from trainkit.migrating.training_arguments import given as of_any_class

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
ARGUMENTS = "TrainingArguments"


def implied(_config: Settings, context: Context) -> Settings:
    """Return what TRL does without a field for it."""
    for trainer, method in METHODS.items():
        if trainer in context.given:
            dropout = {} if trainer in WITHOUT_DROPOUT else {"model.disable_dropout": False}
            own_loop = {"train.eval_interval": 0, "train.save_interval": 0} if trainer == "IterativeSFTTrainer" else {}
            limited = _argument(context, "save_total_limit") is not None
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
    run = {"run_name": name} if (name := context.get("DDPOConfig.run_name")) else {}
    return {
        "train.trackers": [{"name": "wandb", "project": of_any_class(context, "tracker_project_name", "trl"), **run}]
    }


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


def project(value: Any, context: Context) -> Settings:
    """Return how many checkpoints are kept; the directory is read with ``logdir``, which names that of the run."""
    if odd := sorted(value.keys() - {"project_dir", "logging_dir", "automatic_checkpoint_naming", "total_limit"}):
        raise RefusedError(f"given {', '.join(odd)}; checkpoints of trainkit are numbered by their steps; remove it")
    if value.get("logging_dir"):
        context.remarks.append("logging_dir has no effect: logs are in the directory of the run")
    return {"train.keep_checkpoints": limit} if (limit := value.get("total_limit")) else {}


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


def rows_of_a_step(value: Any, context: Context) -> Settings:
    """Return the rows of a step over all processes, and those of a pass in one."""
    rows = value * context.get("PPOConfig.gradient_accumulation_steps", 1)
    return {"train.batch_size": rows * context.processes, "train.microbatch_size": value}


# ------------------------------------------------------------------------------------------------ TrainingArguments


def _argument(context: Context, name: str, default: Any = None) -> Any:
    return context.get(f"{ARGUMENTS}.{name}", default)


def _rows_of_a_step(context: Context) -> int:
    per_device = int(_argument(context, "per_device_train_batch_size", 8))
    return per_device * int(_argument(context, "gradient_accumulation_steps", 1)) * context.processes


def _steps_of_an_epoch(context: Context) -> int:
    if context.rows is None:
        raise RefusedError("the steps of an epoch are not known before the samples are packed or read; give steps")
    return math.ceil(context.rows / _rows_of_a_step(context))


def _total_steps(context: Context) -> int:
    most = int(_argument(context, "max_steps", -1))
    return most if most > 0 else math.ceil(_argument(context, "num_train_epochs", 3.0) * _steps_of_an_epoch(context))


def rows_per_device(value: Any, context: Context) -> Settings:
    """Return the rows of a step over all processes, and those of a pass in one."""
    return {"train.batch_size": _rows_of_a_step(context), "train.microbatch_size": value}


def length(value: Any, context: Context) -> Settings:
    """Return the steps of the run if they are given, or else the epochs; part of an epoch as steps."""
    if int(_argument(context, "max_steps", -1)) > 0 or value != int(value):
        return {"train.total_steps": _total_steps(context), "train.epochs": None}
    return {"train.epochs": int(value), "train.total_steps": None}


def adam(value: Any, context: Context) -> Settings:
    """Return the further arguments of AdamW, which other optimizers do not have."""
    if not str(_argument(context, "optim", "adamw_torch")).startswith("adam"):
        return {}
    betas = [value, _argument(context, "adam_beta2", 0.999)]
    return {"optimizer.kwargs": {"betas": betas, "eps": _argument(context, "adam_epsilon", 1e-8)}}


def schedule_arguments(value: Any, _context: Context) -> Settings:
    """Return the further arguments of the schedule."""
    return {"scheduler.kwargs": dict(value)} if value else {}


def warmup(value: Any, context: Context) -> Settings:
    """Return the steps of the warm-up, given as steps or as a share of the run; `constant` has none."""
    if not value or _argument(context, "lr_scheduler_type") == "constant":
        return {}
    return {"scheduler.warmup_steps": int(value) if value >= 1 else math.ceil(value * _total_steps(context))}


def largest_norm(value: Any, _context: Context) -> Settings:
    """Return the norm to which gradients are clipped; 0 turned that off."""
    return {"train.max_grad_norm": value or None}


def precision(value: Any, context: Context) -> Settings:
    """Return the mixed precision."""
    return {"train.mixed_precision": "bf16" if value else "fp16" if _argument(context, "fp16") else "no"}


def embedding_noise(value: Any, context: Context) -> Settings:
    """Return α of NEFTune, which SFT has."""
    if not value:
        return {}
    if "SFTTrainer" not in context.given and "IterativeSFTTrainer" not in context.given:
        raise RefusedError("only SFT adds noise to embeddings; remove it")
    return {"method.neftune_alpha": value}


def _interval(strategy: Any, steps: Any, context: Context) -> int:
    """Return the steps from one evaluation or checkpoint to the next; 0 for none."""
    if strategy == "epoch":
        return _steps_of_an_epoch(context)
    if strategy != "steps":
        return 0
    return int(steps) if steps >= 1 else math.ceil(steps * _total_steps(context))


def evaluation(value: Any, context: Context) -> Settings:
    """Return the steps between evaluations."""
    steps = _argument(context, "eval_steps") or _argument(context, "logging_steps", 500)
    return {} if value is None else {"train.eval_interval": _interval(value, steps, context)}


def saving(value: Any, context: Context) -> Settings:
    """Return the steps between checkpoints."""
    if value == "best":
        return {"train.save_interval": 0, **best(True, context)}
    return {"train.save_interval": _interval(value, _argument(context, "save_steps", 500), context)}


def best(value: Any, context: Context) -> Settings:
    """Return which evaluation is the best one, whose model is exported; the adapter loads it at the end."""
    if not value:
        return {}
    name = str(_argument(context, "metric_for_best_model") or "loss").removeprefix("eval_")
    greater = _argument(context, "greater_is_better")
    greater = not name.endswith("loss") if greater is None else greater
    metric = "eval/loss/total" if name == "loss" else f"eval/{name}"
    return {"train.save_best": {"metric": metric, "mode": "max" if greater else "min"}}


def repository(value: Any, context: Context) -> Settings:
    """Return the repository of the exported model."""
    name = _argument(context, "hub_model_id")
    if value and not name:
        raise RefusedError("give hub_model_id, owner/name")
    return {"train.push_to_hub": name if value else None}


def trackers(value: Any, context: Context) -> Settings:
    """Return the trackers; those that have names of runs get that of this one."""
    named = [value] if isinstance(value, str) else list(value or ())
    if "all" in named:
        raise RefusedError("name the trackers, such as ['wandb']; 'all' depends on what is installed")
    run = {"run_name": name} if (name := _argument(context, "run_name")) else {}
    entries = [{"name": "wandb", **run} if each == "wandb" else each for each in named if each != "none"]
    return {"train.trackers": entries}


def preference_loss(value: Any, _context: Context) -> Settings:
    """Return the loss of a pair."""
    if value not in ("sigmoid", "hinge", "ipo", "kto_pair"):
        raise RefusedError(f"given {value!r}; losses are sigmoid, hinge, ipo and kto_pair")
    return {"method.loss_type": value}
