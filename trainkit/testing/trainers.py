"""A tiny real trainer of any algorithm, with data made to fit what it learns from: the bench for laws and checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainkit.config import TRLConfig
from trainkit.registry import available_trainers, get_trainer
from trainkit.testing import character_tokenizer, tiny_gpt2
from trainkit.trainer.accelerate import AccelerateRLTrainer
from trainkit.trainer.loop import AcceleratedLoop

LETTERS = "abcdefgh"
FITTED: dict[str, dict[str, Any]] = {"rft": {"rft_k": 4}}
"""Settings of algorithms whose own are too large for so little data."""
PROMPTS = ("a", "bc", "def", "ghab", "ccc", "hg", "e", "fa")
SAMPLES = tuple((prompt, (prompt * 3)[: 2 + i % 4]) for i, prompt in enumerate(PROMPTS * 2))
PAIRS = tuple(
    {"prompt": prompt, "chosen": output, "rejected": output[::-1] + "h" * (i % 3 + 1)}
    for i, (prompt, output) in enumerate(SAMPLES)
)

SHORT: dict[str, Any] = {"total_steps": 6, "epochs": None, "eval_interval": 0, "save_interval": 0, "trackers": []}
"""A run of six steps that writes nothing in between."""


def count_first_letters(outputs: list[str], **_: Any) -> list[float]:
    """A reward with variance: how many letters of the first half of the alphabet a response has."""
    return [float(sum(letter in LETTERS[:4] for letter in output)) for output in outputs]


def language_trainers() -> list[str]:
    """Names of the trainers of language models, about which some laws speak alone: masks, tokens, stop strings."""
    return [name for name in available_trainers() if issubclass(get_trainer(name), AccelerateRLTrainer)]


def tiny_trainer(
    name: str,
    run_dir: Path,
    *,
    callbacks: Iterable[object] = (),
    model: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """A trainer of ``name`` on a two-layer model with 8 prompts, 16 samples or 16 pairs, ready to ``learn()``.

    One that says by `tiny_arguments` what it is made of, as those of other than language models do, is made of that.

    Args:
        name: the registered name.
        run_dir: where its run goes.
        callbacks: hooks.
        model: fields of the model's config instead of a tiny GPT-2's.
        **changes: dotted config paths with ``__`` for dots: ``train__seed=2``.
    """
    if (own := get_trainer(name).tiny_arguments()) is not None:
        return _made_of(own, name, run_dir, callbacks, model, changes)
    tokenizer = character_tokenizer(LETTERS)
    config: TRLConfig[Any] = TRLConfig.from_dict(
        {
            "method": {"name": name, **FITTED.get(name, {})},
            "model": {"model_path": dict(model or tiny_gpt2(len(tokenizer)))},
            "optimizer": {"lr": 1e-3},
            "rollout": {"max_new_tokens": 6, "num_rollouts": 16, "batch_size": 8},
            "train": {"batch_size": 8, **SHORT},
        }
    ).update({"train.run_dir": str(run_dir), **{key.replace("__", "."): value for key, value in changes.items()}})
    cls = get_trainer(name)
    online = "prompts" in cls.inputs
    trainer = cls(config, tokenizer=tokenizer, callbacks=callbacks, reward_fn=count_first_letters if online else None)
    if online:
        trainer.add_prompt_pipeline(list(PROMPTS))
    else:
        rewards = [float(i % 3) for i in range(len(SAMPLES))] if "rewards" in cls.inputs else None
        trainer.add_samples(PAIRS if cls.sample_format == "preference" else SAMPLES, rewards)
    if cls.generates:
        trainer.add_eval_pipeline(list(PROMPTS))
    else:
        trainer.add_eval_samples(PAIRS)
    return trainer


def _made_of(
    arguments: Mapping[str, Any],
    name: str,
    run_dir: Path,
    callbacks: Iterable[object],
    model: Mapping[str, Any] | None,
    changes: Mapping[str, Any],
) -> AcceleratedLoop[Any]:
    """A trainer of arguments of `trainkit.train`."""
    given = dict(arguments)
    sections = dict(given.pop("config", {}))
    sections["method"] = {**sections.get("method", {}), "name": name}
    sections["model"] = {**sections.get("model", {}), "model_path": dict(model or given.pop("model_path"))}
    sections["optimizer"] = {"lr": 1e-3, **sections.get("optimizer", {})}
    sections["train"] = {**SHORT, **sections.get("train", {})}
    config: TRLConfig[Any] = TRLConfig.from_dict(sections).update(
        {"train.run_dir": str(run_dir), **{key.replace("__", "."): value for key, value in changes.items()}}
    )
    data = {key: given.pop(key, None) for key in ("prompts", "samples", "rewards", "eval_prompts")}
    given.pop("model_path", None)
    trainer = get_trainer(name)(config, callbacks=callbacks, **given)
    if data["prompts"] is not None:
        trainer.add_prompt_pipeline(data["prompts"])
        trainer.add_eval_pipeline(data["eval_prompts"] or data["prompts"])
    else:
        trainer.add_samples(data["samples"], data["rewards"])
    return trainer
