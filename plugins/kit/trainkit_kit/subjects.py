"""What is checked: a plugin, with the properties that decide which checks apply, and its tiny trainers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from pydantic import TypeAdapter

from trainkit.config import EngineEntry, ModelConfig
from trainkit.models.loading import load_model_config
from trainkit.plugins import discover, get_hooks, get_trainer, is_registered, load_plugin
from trainkit.plugins.registry import Registered, hooks_of
from trainkit.rollouts import Engine
from trainkit.rollouts.engines import engine_class
from trainkit.testing import Declaration, tiny_gpt2
from trainkit.testing.declarations import declaration_of
from trainkit.testing.trainers import tiny_trainer
from trainkit.trainer.accelerate import AccelerateRLTrainer
from trainkit_kit.engines import Serving
from trainkit_kit.reinforce import registered

Kind = Literal["trainer", "observer", "sampler", "engine", "sharding"]
PARTS = ("engine", "sharding")
"""Kinds of plugins of which a run has one; they may be given with settings."""


@dataclass(frozen=True)
class Subject:
    """A plugin to check, with the properties that decide which checks apply."""

    name: str
    kind: Kind = "trainer"
    variant: str = ""
    """The name of the declared variant whose settings all its trainers have; empty: the defaults."""
    entry: Any = None
    """Of an engine or a sharding, what a run has in `rollout.engine` or `train.sharding`: its name, or a mapping with
    its settings."""
    model: Mapping[str, Any] | None = None
    """Of an engine, fields of the config of the model that it serves; None: `trainkit_kit.engines.MODEL`."""

    @cached_property
    def engine_class(self) -> type[Engine]:
        """The class of the engine."""
        return engine_class(TypeAdapter(EngineEntry).validate_python(self.entry))

    @cached_property
    def serving(self) -> Serving:
        """The running engine, which the checks share; starting one may take a minute."""
        return Serving(self.entry, self.model)

    def stop(self) -> None:
        """Stop the engine, if it runs; it is started again when it is next used."""
        if (running := vars(self).pop("serving", None)) is not None:
            running.close()

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The settings of the variant, by dotted path."""
        return dict(self.declaration.variants[self.variant]) if self.variant else {}

    @cached_property
    def tiny(self) -> Any:
        """A tiny trainer of the subject, which has not made its model."""
        return tiny_trainer(self.name, Path("unused"), **self.settings)

    @property
    def inputs(self) -> tuple[str, ...]:
        """What the trainer learns from, with the settings of the variant."""
        inputs: tuple[str, ...] = self.tiny.inputs if self.variant else self.trainer_class.inputs
        return inputs

    @cached_property
    def module(self) -> ModuleType | None:
        """The installed plugin's module; None for a trainer that was registered in another way."""
        return load_plugin(self.name) if self.installed else None

    @cached_property
    def hook_class(self) -> Registered | None:
        """The class with hooks that is registered as the plugin's name; None if its module has the hooks."""
        return get_hooks(self.name) if self.installed else None

    @property
    def hooks(self) -> list[str]:
        """The hooks that the plugin implements, in a registered class or in its module."""
        return hooks_of(self.module if self.hook_class is None else self.hook_class.made)

    @property
    def tracker(self) -> bool:
        """Whether the plugin is a tracker, whose hooks are called on the main process only."""
        return self.hook_class is not None and self.hook_class.tracker

    def hooks_in(self, trainer: Any) -> Any:
        """Return the object or module with the plugin's hooks in the run of ``trainer``."""
        return self.module if self.hook_class is None else trainer.hooks.made[self.name]

    @cached_property
    def trainer_name(self) -> str:
        """The trainer that the checks run: the plugin's, or the kit's if the plugin has only hooks."""
        if self.kind not in PARTS and (self.kind == "trainer" or is_registered(self.name)):
            return self.name
        return registered()

    @cached_property
    def trainer_class(self) -> Any:
        """The trainer's class."""
        return get_trainer(self.trainer_name)

    @cached_property
    def declaration(self) -> Declaration:
        """What the algorithm declares."""
        return declaration_of(self.trainer_class)

    @property
    def online(self) -> bool:
        """Whether the trainer learns from what it samples."""
        return "prompts" in self.inputs

    @property
    def rewarded(self) -> bool:
        """Whether the trainer learns from the rewards of what it samples."""
        return bool({"reward_fn", "environment"} & {*self.inputs})

    @cached_property
    def keeps(self) -> bool:
        """Whether the trainer chooses what it trains on, with a method `keep`."""
        overridden = self.language and self.trainer_class.keep is not AccelerateRLTrainer.keep
        return overridden and bool(self.tiny.keeps)

    @property
    def plays(self) -> bool:
        """Whether the trainer can learn from environments: its model reads an episode as one text."""
        return self.causal and self.samples_text and self.rewarded and self.trainer_class.environments

    @property
    def needs_environment(self) -> bool:
        """Whether the trainer learns only with an environment."""
        return "environment" in self.inputs

    @property
    def language(self) -> bool:
        """Whether the trainer trains language models."""
        return issubclass(self.trainer_class, AccelerateRLTrainer)

    @cached_property
    def causal(self) -> bool:
        """Whether it trains language models, and its tiny model reads prompt and response as one text."""
        if not self.language:
            return False
        path = self.declaration.arguments.get("model_path", tiny_gpt2(8))
        return not load_model_config(ModelConfig(model_path=path)).is_encoder_decoder

    @property
    def installed(self) -> bool:
        """Whether it is a plugin of an installed distribution, so that another process finds it, too."""
        return any(plugin.name == self.name for plugin in discover())

    @property
    def method_fields(self) -> set[str]:
        """Names of the method's settings."""
        return set(self.trainer_class.method_class.model_fields)

    @property
    def samples_text(self) -> bool:
        """Whether the trainer learns from text that it samples."""
        return self.online and self.language

    @property
    def writes_text(self) -> bool:
        """Whether the trained model is a policy over tokens."""
        return self.language and self.trainer_class.generates

    @cached_property
    def needs_reference(self) -> bool:
        """Whether the trainer uses a reference."""
        return bool(self.tiny.needs_reference)

    @cached_property
    def chooses_reference(self) -> bool:
        """Whether its settings name another reference than the model before the first update."""
        return self.tiny.chosen_reference is not None


USUAL = "its usual settings"


def _short(value: Any) -> str:
    """Return a value of a setting or an argument for messages."""
    text = getattr(value, "__name__", None) or repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Bench:
    """What a check works with: tiny real trainers of the subject, each with its own run directory.

    Args:
        subject: the plugin.
        folder: where the run directories are.
        **usual: changes of `tiny_trainer` that all trainers have, unless a check gives others.
    """

    def __init__(self, subject: Subject, folder: Path, **usual: Any) -> None:
        self.subject, self.folder, self.usual = subject, folder, {**subject.settings, **usual}
        self._places, self._probes = count(), list[str]()

    def under(self, **usual: Any) -> Bench:
        """Return a bench whose trainers have further changes; checks can be run on it under another condition."""
        bench = Bench(self.subject, self.place(), **{**self.usual, **usual})
        bench._probes = self._probes
        return bench

    def in_one_turn(self) -> Bench:
        """Return a bench whose trainers sample one response per prompt, also those that need an environment."""
        return self.under(rollout__max_turns=1) if self.subject.needs_environment else self

    @property
    def probe(self) -> str:
        """What the last trainer was made with, for messages."""
        return self._probes[-1] if self._probes else USUAL

    def place(self) -> Path:
        """Return the path of a new directory, which does not exist yet."""
        return self.folder / f"run-{next(self._places)}"

    def trainer(self, run_dir: Path | None = None, **changes: Any) -> Any:
        """Return a tiny trainer of the subject with its hooks; ``changes`` are those of `tiny_trainer`."""
        name = self.subject.trainer_name
        key = "train__trackers" if self.subject.tracker else "plugins"
        hooked: dict[str, Any] = {} if name == self.subject.name else {key: [self.subject.name]}
        arguments = {**self.usual.get("arguments", {}), **changes.get("arguments", {})}
        merged = {**hooked, **self.usual, **changes, **({"arguments": arguments} if arguments else {})}
        told = {**{k: v for k, v in merged.items() if k not in ("arguments", "callbacks", key)}, **arguments}
        self._probes.append(", ".join(f"{k.replace('__', '.')} = {_short(v)}" for k, v in told.items()) or USUAL)
        # the type is that of the default here; given, the configuration is not made again for it
        return tiny_trainer(name, run_dir or self.place(), **{"model__dtype": "float32", **merged})

    def collected(self, **changes: Any) -> Any:
        """Return a tiny trainer that has made one collection of experience and no step."""
        trainer = self.trainer(**changes)
        trainer.collect()
        return trainer

    def learnt(self, run_dir: Path | None = None, **changes: Any) -> Any:
        """Return a tiny trainer after its run."""
        trainer = self.trainer(run_dir, **changes)
        trainer.learn()
        return trainer
