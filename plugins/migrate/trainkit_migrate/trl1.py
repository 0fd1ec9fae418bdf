"""Values of TRL from 1.0 on that trainkit writes differently. Each function returns settings of trainkit."""

from __future__ import annotations

from typing import Any

from trainkit_migrate.conversions import Context, RefusedError, Settings, missing
from trainkit_migrate.training_arguments import given, rows_of_a_step

METHODS = {
    "SFTConfig": "sft",
    "DPOConfig": "dpo",
    "KTOConfig": "kto",
    "ORPOConfig": "orpo",
    "CPOConfig": "cpo",
    "RewardConfig": "reward",
    "GRPOConfig": "grpo",
    "RLOOConfig": "rloo",
}
RATES = {"sft": 2e-5, "reward": 1e-4}
AVERAGES = {"dapo": "tokens", "bnpo": "tokens", "grpo": "responses", "dr_grpo": "constant"}


def implied(config: Settings, context: Context) -> Settings:
    """Return the method, and what TRL does where a field is not given."""
    name = next((METHODS[each] for each in context.given if each in METHODS), None)
    if name is None:
        return {}
    usual: Settings = {"optimizer.lr": RATES.get(name, 1e-6)}
    if name in ("grpo", "rloo"):
        rows = rows_of_a_step(given(context, "per_device_train_batch_size", 8), context)
        usual |= {"rollout.num_rollouts": rows["train.batch_size"], "rollout.max_new_tokens": 256}
        usual |= {"method.rloo_k": 2} if name == "rloo" else {}
    else:
        usual["train.seq_length"] = 1024
    if name == "sft":
        usual["model.disable_dropout"] = False
    if name == "cpo":
        usual["method.cpo_alpha"] = 1.0  # with the loss of SimPO too
    return filled(name, usual, config, context)


def filled(name: str, usual: Settings, config: Settings, context: Context) -> Settings:
    """Return the method, and the defaults of it and of transformers, where a field is not given."""
    steps_given = given(context, "max_steps", -1) > 0
    usual = {
        **rows_of_a_step(given(context, "per_device_train_batch_size", 8), context),
        **({} if steps_given or "total_steps" in config.get("train", {}) else {"train.epochs": 3}),
        "train.eval_interval": 0,
        "train.save_interval": 500,
        "train.seed": 42,
        "train.trackers": [],
        "scheduler.name": "linear",
        **usual,
    }
    return {"method.name": name, **missing(usual, config)}


def completions(value: Any, _context: Context) -> Settings:
    """Return whether prompts are trained on too; None leaves it to the columns, as trainkit does."""
    return {} if value is None else {"method.train_on_prompts": not value}


PAIRS = (
    *("sigmoid", "hinge", "ipo", "robust", "sigmoid_norm", "exo_pair", "nca_pair", "bco_pair", "sppo_hard"),
    *("apo_zero", "apo_down", "discopop", "aot", "aot_unpaired"),
)
"""Losses that DPO has in TRL and here."""


def preference_loss(value: Any, _context: Context) -> Settings:
    """Return the loss of a pair; TRL takes a list of names too."""
    names = [value] if isinstance(value, str) else list(value)
    if len(names) != 1 or names[0] not in PAIRS:
        raise RefusedError(f"given {value!r}; trainkit-dpo has one loss of {', '.join(PAIRS)}")
    return {"method.loss_type": names[0]}


def contrastive_loss(value: Any, _context: Context) -> Settings:
    """Return the loss of a pair in CPO."""
    known = ("sigmoid", "hinge", "ipo", "simpo")
    if value not in known:
        raise RefusedError(f"given {value!r}; trainkit-orpo has {', '.join(known)}")
    return {"method.loss_type": value}


def group_loss(value: Any, _context: Context) -> Settings:
    """Return how the losses of tokens are averaged."""
    if value == "cispo":
        return {"method.surrogate": "cispo", "method.average": "tokens"}
    if value not in AVERAGES:
        raise RefusedError(f"given {value!r}; trainkit-grpo has {', '.join(AVERAGES)} and cispo, as method.average")
    return {"method.average": AVERAGES[value]}


def rollouts(value: Any, context: Context) -> Settings:
    """Return the responses of a collection: those of so many passes on each process."""
    rows = given(context, "per_device_train_batch_size", 8) * context.processes
    return {"rollout.num_rollouts": value * rows}


def most_likely(value: Any, _context: Context) -> Settings:
    """Return how many tokens are sampled from; None stands for all."""
    return {"rollout.top_k": value or 0}


def least_share(value: Any, _context: Context) -> Settings:
    """Return the least probability of a token; None stands for none."""
    return {"rollout.min_p": value or 0.0}
