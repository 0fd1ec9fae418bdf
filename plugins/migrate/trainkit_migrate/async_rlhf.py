"""Values of async_rlhf and TRL 0.9 to 0.11 that trainkit writes differently. Each function returns its settings."""

from __future__ import annotations

from typing import Any

from trainkit_migrate.conversions import Context, RefusedError, Settings
from trainkit_migrate.training_arguments import given, passes_of, steps_of_episodes
from trainkit_migrate.trl1 import filled

METHODS = {"RLOOConfig": "rloo", "OnlineDPOConfig": "online_dpo", "PPOv2Config": "ppo"}
OF_TRL = ("max_new_tokens", "missing_eos_penalty")
"""Fields of OnlineDPOConfig of TRL 0.11, which async_rlhf's does not have."""


def _collection(mini_batches: int, context: Context) -> int:
    """Return the responses of so many steps: a row is a response, one of online DPO a prompt with k of them."""
    rows = given(context, "per_device_train_batch_size", 8) * given(context, "gradient_accumulation_steps", 1)
    responses = given(context, "rloo_k", 2) if "OnlineDPOConfig" in context.given else 1
    return int(rows * context.processes * mini_batches * responses)


def implied(config: Settings, context: Context) -> Settings:
    """Return the method, and what the trainers do where a field is not given."""
    cls = next((each for each in context.given if each in METHODS), None)
    if cls is None:
        return {}
    usual: Settings = {
        "rollout.num_rollouts": _collection(given(context, "num_mini_batches", 1), context),
        "rollout.max_new_tokens": given(context, "response_length", 53),
        "rollout.temperature": 0.7,
        "optimizer.lr": 5e-5,
    }
    if cls == "RLOOConfig":
        usual |= {"method.rloo_k": 2, "method.rloo_epochs": 4}
    elif cls == "PPOv2Config":
        usual |= {"method.ppo_epochs": 4, "method.init_kl_coef": 0.05, "method.vf_coef": 0.1}
    elif any(given(context, name) is not None for name in OF_TRL):
        usual |= {"rollout.max_new_tokens": 64, "rollout.temperature": 0.9, "optimizer.lr": 5e-7}
    elif given(context, "vllm"):
        usual |= staleness(given(context, "sync", False), context)
    elif given(context, "response_length") is None:
        context.remarks.append(
            "OnlineDPOConfig has the defaults of async_rlhf, as no field is TRL's alone; with max_new_tokens it has "
            "those of TRL 0.11: 64 tokens, temperature 0.9, learning_rate 5e-7"
        )
    found = filled(METHODS[cls], usual, config, context)
    return {path: value for path, value in found.items() if path != "train.trackers"}  # all that are installed


def collection(value: Any, context: Context) -> Settings:
    """Return the responses of a collection: those of so many steps."""
    return {"rollout.num_rollouts": _collection(value, context)}


def episodes(value: Any, context: Context) -> Settings:
    """Return the steps in which so many responses are sampled and trained on."""
    return {"train.total_steps": steps_of_episodes(value, context)}


def sampled_evaluations(value: Any, context: Context) -> Settings:
    """Return the steps between evaluations, of which there are so many in a run."""
    if not value:
        return {}
    if not (sampled := given(context, "total_episodes")):
        raise RefusedError("the steps between evaluations are not known without total_episodes; write eval_steps")
    context.remarks.append("evaluations sample responses to eval_prompts, which are in samples.jsonl")
    a_collection = passes_of(context) * given(context, "num_mini_batches", 1)
    collections = steps_of_episodes(sampled, context) // a_collection
    return {"train.eval_interval": max(1, collections // value) * a_collection}


def longest_prompt(value: Any, context: Context) -> Settings:
    """Return the length of prompt and response; longer prompts are left out."""
    return {
        "train.seq_length": value + given(context, "response_length", 53),
        "rollout.overlong_prompts": "drop",
    }


def dtype(value: Any, context: Context) -> Settings:
    """Return the type of the trained weights, which is float32 for float16."""
    if value not in (None, "float32", "bfloat16", "float16"):
        raise RefusedError("write float32, bfloat16 or float16")
    if value == "float16":
        context.remarks.append("trained weights are float32, as in rloo.py; half precision is train.mixed_precision")
    return {} if value is None else {"model.dtype": "float32" if value == "float16" else value}


def directory(value: Any, context: Context) -> Settings:
    """Return the directory of the run inside another one, without the number of the job between them."""
    return {"train.run_dir": f"{value}/{given(context, 'output_dir', '')}"} if value else {}


def policy(value: Any, context: Context) -> Settings:
    """Return the model, of which the other name gives the tokenizer."""
    other = given(context, "model_name_or_path", value)
    return {"model.model_path": value, **({} if other == value else {"tokenizer.tokenizer_path": other})}


def unfinished(value: Any, context: Context) -> Settings:
    """Return the score of a response that is cut at the length limit, or what is subtracted from it."""
    if not value:
        return {}
    score = float(given(context, "penalty_reward_value", -1))
    if "PPOv2Config" not in context.given:
        context.remarks.append("it is the score of responses that the length limit has cut, whatever their stop string")
        return {"method.missing_eos_score": score}
    if score >= 0:
        raise RefusedError("PPO subtracts a penalty above 0 from these scores; write a negative penalty_reward_value")
    context.remarks.append("it is subtracted from the score of such responses, which penalty_reward_value replaces")
    return {"method.missing_eos_penalty": -score}


def first(value: Any, _context: Context) -> Settings:
    """Return β, the same in all epochs."""
    values = value if isinstance(value, list) else [value]
    if len({*values}) != 1:
        raise RefusedError(f"given {values}; beta is one number: write runs that go on from each other")
    return {"method.beta": values[0]}


def preference_loss(value: Any, _context: Context) -> Settings:
    """Return the loss of a pair; that of `ipo` compares sums over tokens."""
    if value not in ("sigmoid", "hinge", "ipo"):
        raise RefusedError(f"given {value!r}; losses are sigmoid, hinge and ipo")
    return {"method.loss_type": value, **({"method.ipo_length_normalize": False} if value == "ipo" else {})}


def staleness(value: Any, context: Context) -> Settings:
    """Return how many collections old the weights may be that sample; without vLLM they are the newest."""
    return {"rollout.staleness": 0 if value or given(context, "vllm") is False else 1}
