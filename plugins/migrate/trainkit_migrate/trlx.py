"""Values of trlX that trainkit writes differently. Each function returns settings of trainkit by their dotted paths."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainkit_migrate.conversions import Context, RefusedError, Settings

ONLINE = ("ppo", "rft")
"""Methods of trlX that sample what they train on."""
METHODS = {"ppoconfig": "ppo", "ilqlconfig": "ilql", "sftconfig": "sft", "rftconfig": "rft"}

SECTIONS = {
    "TrainConfig": "train",
    "ModelConfig": "model",
    "TokenizerConfig": "tokenizer",
    "OptimizerConfig": "optimizer",
}
SECTIONS |= {
    "SchedulerConfig": "scheduler",
    **dict.fromkeys(("PPOConfig", "ILQLConfig", "SFTConfig", "RFTConfig"), "method"),
}
"""The sections of the configuration by the classes that have their fields."""


def _method(context: Context) -> str:
    """Return the method that the configuration names, in trainkit."""
    trainer = str(context.get("train.trainer", "")).lower()
    named = trainer.removeprefix("accelerate").removeprefix("nemo").removesuffix("trainer")
    return named or METHODS.get(str(context.get("method.name", "")).lower(), "")


def method_name(value: Any, context: Context) -> Settings:
    """Return the method; in trlX the trainer decides, and the method has the settings."""
    name = METHODS.get(str(value).lower())
    if name is None:
        raise RefusedError(
            f"{value!r} is no method of trlX ({', '.join(METHODS)}); register yours as a trainer of trainkit"
        )
    if _method(context) not in ("", name):
        raise RefusedError(f"train.trainer is {context.get('train.trainer')!r}, which does not train with {value!r}")
    return {"method.name": name}


def epochs(value: Any, context: Context) -> Settings:
    """Return the passes over the data; for PPO the steps of so many collections, if these are fewer."""
    if _method(context) != "ppo":
        return {"train.epochs": value}
    steps = math.ceil(context.get("method.num_rollouts", 128) / context.get("train.batch_size", 1))
    collected = value * context.get("method.ppo_epochs", 1) * steps
    return {"train.total_steps": min(collected, context.get("train.total_steps", collected))}


def save_best(value: Any, context: Context) -> Settings:
    """Return whether the best model is exported; the adapter compares rewards, or `reward` of a metric function."""
    if value and _method(context) not in ONLINE:
        context.remarks.append(
            "has no effect: there is no reward by which evaluations are compared. If metric_fn returns reward, write "
            "train.save_best: {metric: eval/reward, mode: max}"
        )
        return {}
    return {"train.save_best": value}


def rows_of_a_step(value: Any, context: Context) -> Settings:
    """Return the rows of a step over all processes."""
    return {"train.batch_size": value * context.processes}


def rollouts(value: Any, context: Context) -> Settings:
    """Return the rows of a collection over all processes."""
    return {"rollout.num_rollouts": value * context.processes}


def unfrozen(value: Any, context: Context) -> Settings:
    """Return how many layers are trained; with an adapter it alone is trained, whatever the number is."""
    if value >= 0 and context.get("model.peft_config"):
        context.remarks.append("has no effect: with model.peft_config the adapter alone is trained")
        return {}
    return {"model.num_layers_unfrozen": value}


def adapter(value: Any, context: Context) -> Settings:
    """Return the adapter; if it has dropout, dropout is not switched off, as it never was in trlX."""
    dropout = value.get("lora_dropout") if isinstance(value, Mapping) else getattr(value, "lora_dropout", None)
    if not dropout:
        return {"model.peft_config": value}
    context.remarks.append(
        "because of lora_dropout, dropout of the model acts in training too, as in trlX (model.disable_dropout)"
    )
    return {"model.peft_config": value, "model.disable_dropout": False}


def reward_bound(value: Any, _context: Context) -> Settings:
    """Return the bound of scores; 0 turned it off."""
    return {"method.cliprange_reward": value or None}


def truncation(value: Any, context: Context) -> Settings:
    """Return the side of prompts and samples that is cut; reward functions of trainkit see whole prompts."""
    if _method(context) not in ONLINE:
        return {}
    return {"rollout.overlong_prompts": "truncate" if value == "left" else "truncate_right"}


def trackers(value: Any, context: Context) -> Settings:
    """Return the trackers, with the names that wandb takes; trlX gave none to TensorBoard."""
    if value is None:
        return {"train.trackers": []}
    if value not in ("wandb", "tensorboard"):
        raise RefusedError(f"given {value!r}; trlX has wandb and tensorboard, trainkit more: see train.trackers")
    if value == "tensorboard":
        return {"train.trackers": ["tensorboard"]}
    words = {"project": "project_name", "run_name": "run_name", "entity": "entity_name", "group": "group_name"}
    named = {ours: context.get(f"train.{theirs}") for ours, theirs in {**words, "tags": "tags"}.items()}
    named["project"] = named["project"] or "trlx"
    return {"train.trackers": [{"name": "wandb", **{key: text for key, text in named.items() if text}}]}


def implied(config: Settings, context: Context) -> Settings:
    """Return what trlX does without a field for it, and the section ``rollout``.

    Args:
        config: the sections of trainkit so far.
        context: the configuration of trlX.
    """
    own: Settings = {"train.max_grad_norm": None}
    usual: dict[str, Settings] = {
        "seed": {"train.seed": 1000},
        "checkpoint_dir": {"train.run_dir": "ckpts"},
        "save_best": {"train.save_best": _method(context) in ONLINE},
        "tracker": trackers("wandb", context),
    }
    for name, settings in usual.items():
        own |= {} if name in context.get("train", usual) else settings
    if context.get("tokenizer.truncation_side") == "left":
        own["tokenizer.kwargs"] = {**config.get("tokenizer", {}).get("kwargs", {}), "truncation_side": "left"}
    if _method(context) == "ppo":
        own["method.ratio_threshold"] = None
    rollout = sampled(config, context)
    if _method(context) in ONLINE:  # trlX cuts prompts without a field for it, too, on the right by default
        rollout.setdefault("overlong_prompts", "truncate_right")
    if _method(context) == "rft":
        shared = context.processes * context.get("method.n_generations_per_prompt", 32)
        rollout["num_rollouts"] = shared * math.ceil(128 / shared)
    return {**own, "rollout": rollout}


def do_sample(value: Any, context: Context) -> Settings:
    """Return the temperature of greedy decoding; nothing if it samples."""
    if value or (_method(context) in ONLINE and not context.get("method.gen_experience_kwargs")):
        return rollouts_do_sample(value, context)
    return {"eval.temperature": 0.0}


def rollouts_do_sample(value: Any, _context: Context) -> Settings:
    """Return nothing if rollouts are sampled; greedy ones are refused."""
    if not value:
        raise RefusedError(
            "an algorithm that learns from its own responses needs different ones; remove do_sample: false"
        )
    return {}


def sampled(config: Settings, context: Context) -> Settings:
    """Return the section ``rollout`` of trainkit.

    In trlX the sampling settings of evaluations are those of rollouts too, unless these have their own.

    Args:
        config: the sections so far; ``eval`` has the sampling settings of evaluations, ``rollout`` those of rollouts.
        context: the configuration of trlX.
    """
    evaluated, rollout = dict(config.get("eval", {})), dict(config.get("rollout", {}))
    if _method(context) == "ilql":
        unset: Settings = {"top_k": 20, "max_new_tokens": 32}
    else:
        greedy = _method(context) == "sft" and context.get("method.gen_kwargs.do_sample") is None  # as in transformers
        unset = {"temperature": 0.0} if greedy else {"top_k": 50}
    given = {**unset, **evaluated}
    differ = {name: value for name, value in given.items() if isinstance(value, list) and not name.startswith("stop_")}
    swept = [name for name in context.get("method.gen_kwargs", {}) if name in differ]
    for name in swept[1:]:  # as in trlX
        given[name] = differ.pop(name)[0]
        context.remarks.append(f"one setting of gen_kwargs is swept, {swept[0]}; {name} is {given[name]}")
    if context.get("method.gen_experience_kwargs"):
        return {"top_k": 50, **rollout, "eval_kwargs": given}
    if given.get("temperature") == 0:  # of evaluations alone, as beta, which the section does not have
        differ["temperature"] = given.pop("temperature")
    if "beta" in given:
        differ["beta"] = given.pop("beta")
    shared = {name: value[0] if name in differ else value for name, value in given.items()}
    return {**rollout, **shared, **({"eval_kwargs": differ} if differ else {})}


def schedule(value: Any, context: Context) -> Settings:
    """Return the schedule: torch's CosineAnnealingLR or LinearLR."""
    name, kwargs = str(value.get("name")).lower(), dict(value.get("kwargs") or {})
    known = {"cosine_annealing": "CosineAnnealingLR", "linear": "LinearLR"}
    if name not in known:
        raise RefusedError(f"given {name!r}; trlX has {' and '.join(known)}, trainkit more: see scheduler.name")
    if name == "cosine_annealing" and kwargs.get("eta_min") == context.get("optimizer.kwargs.lr"):
        return {"scheduler.name": "constant"}  # the lowest rate is the first
    return {"scheduler.name": known[name], "scheduler.kwargs": kwargs}
