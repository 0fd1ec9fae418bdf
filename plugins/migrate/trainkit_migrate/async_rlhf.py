"""Values of async_rlhf that trainkit writes differently. Each function returns settings of trainkit."""

from __future__ import annotations

from typing import Any

from trainkit_migrate.conversions import Context, Settings
from trainkit_migrate.training_arguments import given, rows_of_a_step, steps_of_episodes

METHODS = {"RLOOConfig": "rloo", "OnlineDPOConfig": "online_dpo"}


def _collection(mini_batches: int, context: Context) -> int:
    """Return the responses of so many steps: a row of RLOO is a response, one of online DPO a prompt with k of them."""
    rows = given(context, "per_device_train_batch_size", 8) * given(context, "gradient_accumulation_steps", 1)
    responses = given(context, "rloo_k", 2) if "OnlineDPOConfig" in context.given else 1
    return int(rows * context.processes * mini_batches * responses)


def implied(config: Settings, context: Context) -> Settings:
    """Return the method, and what async_rlhf does where a field is not given."""
    name = next((METHODS[each] for each in context.given if each in METHODS), None)
    if name is None:
        return {}
    usual: Settings = {
        **rows_of_a_step(given(context, "per_device_train_batch_size", 8), context),
        "rollout.num_rollouts": _collection(given(context, "num_mini_batches", 1), context),
        "rollout.max_new_tokens": given(context, "response_length", 53),
        "rollout.temperature": given(context, "temperature", 0.7),
        "train.eval_interval": 0,
        "train.seed": 42,
        "optimizer.lr": 5e-5,
        "scheduler.name": "linear",
    }
    if name == "rloo":
        usual |= {"method.rloo_k": 2, "method.rloo_epochs": 4}
    elif given(context, "vllm"):
        usual |= staleness(given(context, "sync", False), context)
    return {
        "method.name": name,
        **{
            path: v for path, v in usual.items() if path.partition(".")[2] not in config.get(path.partition(".")[0], {})
        },
    }


def collection(value: Any, context: Context) -> Settings:
    """Return the responses of a collection: those of so many steps."""
    return {"rollout.num_rollouts": _collection(value, context)}


def episodes(value: Any, context: Context) -> Settings:
    """Return the steps in which so many responses are sampled and trained on."""
    return {"train.total_steps": steps_of_episodes(value, context)}


def policy(value: Any, context: Context) -> Settings:
    """Return the model, of which the other name gives the tokenizer."""
    other = given(context, "model_name_or_path", value)
    return {"model.model_path": value, **({} if other == value else {"tokenizer.tokenizer_path": other})}


def unfinished(value: Any, context: Context) -> Settings:
    """Return the score of a response that is cut at the length limit."""
    if not value:
        return {}
    context.remarks.append("it is the score of responses that the length limit has cut, whatever their stop string")
    return {"method.missing_eos_score": float(given(context, "penalty_reward_value", -1))}


def staleness(value: Any, context: Context) -> Settings:
    """Return how many collections old the weights may be that sample; without vLLM they are the newest."""
    return {"rollout.staleness": 0 if value or given(context, "vllm") is False else 1}
