"""A tiny real trainer of any algorithm, with data that fit the algorithm, for tests and for the conformance kit."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trainkit.config import TRLConfig
from trainkit.config.tree import merged, nest
from trainkit.errors import ConfigError
from trainkit.plugins import available_trainers, get_trainer
from trainkit.rollouts import Turn
from trainkit.testing import character_tokenizer, tiny_gpt2
from trainkit.testing.declarations import declaration_of
from trainkit.trainer.accelerate import AccelerateRLTrainer

LETTERS = "abcdefgh"
PROMPTS = ("a", "bc", "def", "ghab", "ccc", "hg", "e", "fa")
SAMPLES = tuple((prompt, (prompt * 3)[: 2 + i % 4]) for i, prompt in enumerate(PROMPTS * 2))
PAIRS = tuple(
    {
        "prompt": prompt,
        "chosen": output,
        "rejected": ("h" + output[::-1] * 2)[: len(output) + i % 3 - 1],
        "margin": i % 3 / 4,
    }
    for i, (prompt, output) in enumerate(SAMPLES)
)
"""Pairs whose rejected side is shorter than the chosen one, as long, or longer."""

SHORT: dict[str, Any] = {
    "total_steps": 6,
    "epochs": None,
    "eval_interval": 0,
    "save_interval": 0,
    "verify_export": False,
    "trackers": [],
}
"""A run of six steps without evaluations and checkpoints in between, whose export is not loaded again."""


def count_first_letters(outputs: list[str], **_: Any) -> list[float]:
    """Reward each response by the number of its letters from the first half of the alphabet."""
    return [float(sum(letter in LETTERS[:4] for letter in output)) for output in outputs]


class Letters:
    """A game of two turns: the model is told a letter twice, and paid for letters of the first half of the alphabet."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.draws = random.Random(row["episode_seed"])
        self.turn = 0

    def step(self, output: str) -> Turn:
        """Return the next letter; the episode ends with the second output."""
        self.turn += 1
        paid = count_first_letters([output])[0]
        return Turn(self.draws.choice(LETTERS), paid + self.turn / 4, done=self.turn == 2)


def language_trainers() -> list[str]:
    """Return the names of the trainers of language models, the only ones with masks, tokens and stop strings."""
    return [name for name in available_trainers() if issubclass(get_trainer(name), AccelerateRLTrainer)]


def tiny_trainer(
    name: str,
    run_dir: Path,
    *,
    callbacks: Iterable[object] = (),
    model: Mapping[str, Any] | None = None,
    arguments: Mapping[str, Any] = MappingProxyType({}),
    **changes: Any,
) -> Any:
    """Return a trainer of ``name`` on a two-layer model with 8 prompts, 16 samples or 16 pairs, ready to ``learn()``.

    A trainer class that needs other arguments has them in its `Declaration`; one of other models must have them.

    Args:
        name: the registered name.
        run_dir: the run directory.
        callbacks: objects with hooks.
        model: fields of the model's config, instead of a tiny GPT-2's.
        arguments: arguments of `trainkit.train` that should differ: ``prompts``, ``reward_fn``, ``tokenizer``.
        **changes: dotted config paths with ``__`` for dots: ``train__seed=2``.
    """
    cls = get_trainer(name)
    usual = _of_language(cls) if issubclass(cls, AccelerateRLTrainer) else {}
    given = {**usual, **declaration_of(cls).arguments, **arguments}
    path, sections = given.pop("model_path"), given.pop("config", {})
    if model and sections.get("model", {}).get("reference_path"):  # it must read what the model reads
        sections = {**sections, "model": {**sections["model"], "reference_path": dict(model)}}
    defaults: dict[str, dict[str, Any]] = {
        "method": {
            "name": name,
            **({cls.group: min(cls.method_class.model_fields[cls.group].default, 4)} if cls.group else {}),
        },
        "model": {"model_path": dict(model or path)},
        "optimizer": {"lr": 1e-3},
        "rollout": {"max_new_tokens": 6, "num_rollouts": 16, "batch_size": 8} if usual else {},
        "train": {"batch_size": 8, "mixed_precision": "no", **SHORT},
    }
    _require_settings(cls, {**defaults["method"], **sections.get("method", {})})
    plain: dict[str, Any] = {key: {**section, **sections.get(key, {})} for key, section in defaults.items()}
    for key, value in {"train.run_dir": str(run_dir), **changes}.items():
        plain = merged(plain, nest(key.replace("__", "."), value))
    config: TRLConfig[Any] = TRLConfig.from_dict(plain)
    if usual:
        given = {**_paying(cls.inputs_for(config.method)), **given}
    prompts, samples, rewards = (given.pop(key, None) for key in ("prompts", "samples", "rewards"))
    trainer = cls(config, callbacks=callbacks, **given)
    if "samples" in trainer.inputs or not trainer.online:
        trainer.add_samples(samples, rewards)
    else:
        trainer.add_prompt_pipeline(prompts)
    if getattr(cls, "generates", True):
        trainer.add_eval_pipeline(prompts)
    else:
        trainer.add_eval_samples(samples)
    return trainer


def _require_settings(cls: Any, given: Mapping[str, Any]) -> None:
    """Raise a `ConfigError` if the method has settings without a default, and its `Declaration` gives no values."""
    fields = cls.method_class.model_fields
    if missing := [name for name, field in fields.items() if field.is_required() and name not in given]:
        values = ", ".join(f"{name!r}: ..." for name in missing)
        raise ConfigError(
            f"{cls.method_class.__qualname__} has no default for {' and '.join(missing)}, so tests need values; "
            f"write into the module of {cls.__qualname__}, or into a module kit beside it, KIT = "
            f"trainkit.testing.Declaration(arguments={{'config': {{'method': {{{values}}}}}}}). "
            f"A second language model has {len(character_tokenizer(LETTERS))} tokens: "
            f"tiny_gpt2({len(character_tokenizer(LETTERS))})"
        )


def _rewards(inputs: tuple[str, ...]) -> list[Any] | None:
    if "rewards" in inputs:
        return [float(i % 3) for i in range(len(SAMPLES))]
    return [i % 8 % 3 == 0 for i in range(len(SAMPLES))] if "labels" in inputs else None


def _of_language(cls: type[AccelerateRLTrainer[Any]]) -> dict[str, Any]:
    """Return the arguments of `trainkit.train` for a language model."""
    tokenizer = character_tokenizer(LETTERS)
    return {
        "model_path": tiny_gpt2(len(tokenizer)),
        "tokenizer": tokenizer,
        "prompts": list(PROMPTS),
        "samples": PAIRS if "pairs" in cls.inputs else SAMPLES,
        "rewards": _rewards(cls.inputs),
    }


def _paying(inputs: tuple[str, ...]) -> dict[str, Any]:
    """Return the reward function or the environment of an algorithm that learns from one."""
    known = {"reward_fn": count_first_letters, "environment": Letters}
    return {name: value if name in inputs else None for name, value in known.items()}
