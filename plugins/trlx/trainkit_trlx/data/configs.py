"""The configuration of trlX: mutable, with its field names. `TRLConfig.translated` gives trainkit's."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import yaml

import trainkit
from trainkit.errors import ConfigError, describe, suggest
from trainkit_migrate import Translation, translate
from trainkit_trlx.data.method_configs import MethodConfig, check_arguments, checked, get_method
from trainkit_trlx.overrides import own_class

log = logging.getLogger(__name__)
KINDS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("train.trainer", "train.pipeline"), (str, "a registered name")),
    **dict.fromkeys(("train.seed", "train.batch_size", "train.epochs"), (int, "an integer")),
    "train.checkpoint_dir": (str | os.PathLike, "a directory"),
    "train.resume_from_checkpoint": (str | os.PathLike | None, "the directory of a checkpoint, or None"),
}
"""What fields should be that are read before trainkit checks its own configuration."""


def merge(base: dict[str, Any], update: Mapping[str, Any], updated: set[str] | None = None) -> dict[str, Any]:
    """Return ``base`` with nested changes; neither is modified. ``updated`` gets the names of what has changed."""
    found = dict(base)
    for key, value in update.items():
        old = found.get(key)
        nested = isinstance(old, dict) and isinstance(value, Mapping)
        found[key] = merge(old, value, updated) if nested else value  # type: ignore[arg-type]
        if updated is not None:
            updated.add(key)
    return found


def copied(value: Any) -> Any:
    """Return plain data as a copy; what is in it of other types, such as models and functions, is not copied."""
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return [copied(each) for each in value] if isinstance(value, list) else value


class Section:
    """What the sections have in common."""

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Refuse fields that the section does not have."""
        check_arguments(cls, section_name(cls), given)
        return super().__new__(cls)

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Return the section with these fields.

        Raises:
            ConfigError: one of them does not exist, or one is missing.
        """
        return cls(**checked(cls, section_name(cls), config))


def section_name(cls: type[Any]) -> str:
    """Return the name of the section that a class is of."""
    return own_class(cls).__name__.removesuffix("Config").lower()


@dataclass
class ModelConfig(Section):
    """Which model is trained."""

    model_path: Any
    model_arch_type: str = "causal"
    num_layers_unfrozen: int = -1
    peft_config: Any = None
    model_extra_configs: dict[str, Any] = field(default_factory=dict)


@dataclass
class TokenizerConfig(Section):
    """Which tokenizer is used."""

    tokenizer_path: str
    padding_side: str = "left"
    truncation_side: str = "right"
    tokenizer_extra_configs: dict[str, Any] = field(default_factory=dict)


@dataclass
class OptimizerConfig(Section):
    """The optimizer."""

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class SchedulerConfig(Section):
    """The learning-rate schedule."""

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class TrainConfig(Section):
    """The training loop."""

    total_steps: int
    seq_length: int
    epochs: int
    batch_size: int
    checkpoint_interval: int
    eval_interval: int
    pipeline: str
    trainer: str
    trainer_kwargs: dict[str, Any] = field(default_factory=dict)
    project_name: str = "trlx"
    run_name: str | None = None
    entity_name: str | None = None
    group_name: str | None = None
    checkpoint_dir: str = "ckpts"
    rollout_logging_dir: str | None = None
    save_best: bool = True
    save_optimizer: bool = True
    resume_from_checkpoint: str | None = None
    tracker: str | None = "wandb"
    logging_dir: str | None = None
    tags: list[str] | None = field(default_factory=list)
    seed: int = 1000
    minibatch_size: int | None = None


SECTIONS: dict[str, Any] = {
    "model": ModelConfig,
    "tokenizer": TokenizerConfig,
    "optimizer": OptimizerConfig,
    "scheduler": SchedulerConfig,
    "train": TrainConfig,
}


@dataclass
class TRLConfig:
    """The whole configuration."""

    method: MethodConfig
    model: ModelConfig
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig
    tokenizer: TokenizerConfig
    train: TrainConfig

    @classmethod
    def load_yaml(cls, yml_fp: str) -> Self:
        """Read a YAML file."""
        with open(yml_fp, encoding="utf-8") as file:
            return cls.from_dict(yaml.safe_load(file))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Return the configuration with these sections; the name of the method decides its class.

        Raises:
            ConfigError: a section or a field does not exist, or one is missing.
        """
        known = ("method", *SECTIONS)
        if not isinstance(config, Mapping):
            raise ConfigError(f"a configuration has the sections {', '.join(known)}; given {describe(config)}")
        unknown = [f"{name!r} is no section{suggest(str(name), known)}" for name in config if name not in known]
        missing = [f"the section {name} is missing" for name in known if name not in config]
        if wrong := [*unknown, *missing]:
            raise ConfigError(f"{'; '.join(wrong)}; a configuration has {', '.join(known)}")
        method = config["method"]
        if not isinstance(method, Mapping) or not isinstance(method.get("name"), str):
            raise ConfigError("method.name should say which method the settings are of, such as PPOConfig; add it")
        sections = {name: section.from_dict(config[name]) for name, section in SECTIONS.items()}
        return cls(method=get_method(method["name"]).from_dict(method), **sections)

    def to_dict(self) -> dict[str, Any]:
        """Return the sections as dictionaries; changing these does not change the configuration."""
        return {name: copied(vars(getattr(self, name))) for name in ("method", *SECTIONS)}

    def evolve(self, **kwargs: Any) -> Self:
        """Return a copy with nested changes: ``config.evolve(method=dict(gamma=0.9), train=dict(seed=2))``."""
        return type(self).from_dict(merge(self.to_dict(), kwargs))

    @classmethod
    def update(cls, baseconfig: Mapping[str, Any] | TRLConfig, config: Mapping[str, Any]) -> Self:
        """Return a configuration changed by dotted path or by section: ``{"train.seed": 2, "method": {"gamma": 1}}``.

        Raises:
            ConfigError: a field does not exist. (trlX says so of sections alone, and ignores other fields.)
        """
        base = baseconfig.to_dict() if isinstance(baseconfig, TRLConfig) else copied(dict(baseconfig))
        for path, value in config.items():
            nested = value
            for part in reversed(path.split(".")):
                nested = {part: nested}
            cls._check_known(base, nested)
            base = merge(base, nested)
        return cls.from_dict(base)

    @classmethod
    def _check_known(cls, base: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
        classes = {**SECTIONS, "method": get_method(str(base.get("method", {}).get("name", "MethodConfig")))}
        known = {part: {*base.get(part, {}), *(about.name for about in fields(classes[part]))} for part in classes}
        names = [*known, *(f"{part}.{name}" for part in known for name in known[part])]
        for section, values in changes.items():
            if section in known and not isinstance(values, Mapping):
                raise ConfigError(f"{section} should be changed by a mapping of settings; given {describe(values)}")
            wrong = [section]
            if section in known:
                wrong = [f"{section}.{name}" for name in values if name not in known[section]]
            for name in wrong:
                said = suggest(name, names)
                raise ConfigError(f"parameter {name!r} is not present in the config (typo or a wrong config){said}")

    def __str__(self) -> str:
        return json.dumps(self.to_dict(), indent=4, default=str)

    def check_kinds(self) -> None:
        """Raise a `ConfigError` if a field is of another type than what it is read as."""
        for path, (kind, wanted) in KINDS.items():
            section, _, name = path.partition(".")
            if not isinstance(value := getattr(getattr(self, section), name), kind):
                raise ConfigError(f"{path} should be {wanted}; given {describe(value)}")
        model = self.model.model_path
        if not isinstance(model, str | os.PathLike | None) and not (
            hasattr(model, "config") or hasattr(model, "to_dict")
        ):
            raise ConfigError(f"model.model_path should be a hub id, a directory or a model; given {describe(model)}")

    def translated(self, measured: bool = False, trainer: str | None = None) -> trainkit.TRLConfig[Any]:
        """Return the configuration of trainkit. What has no effect in trainkit is logged once.

        Args:
            measured: whether there is a metric function, by which `train.save_best` may compare evaluations.
            trainer: the trainer of this package that trains; None: that of ``train.trainer``.

        Raises:
            ConfigError: a setting has no counterpart; says what to write instead.
        """
        self.check_kinds()
        settings = self._translation(measured, trainer).accepted("settings of trlX", say_once)
        method = settings.get("method", {}).get("name", "ppo")
        return trainkit.default_config(method).evolve(**settings)

    def _translation(self, measured: bool, trainer: str | None) -> Translation:
        given = self.to_dict()
        given["train"].pop("trainer_kwargs")  # `train` passes them on
        for name in ("pipeline", "rollout_logging_dir"):  # `train` makes the pipeline, the trainer writes rollouts
            given["train"].pop(name)
        if trainer is not None:
            given["train"]["trainer"] = trainer
        method: Any = own_class(type(self.method))  # further settings of a class of one's own are read by its trainer
        if method in (MethodConfig, object):
            raise ConfigError(
                f"method is a {type(self.method).__name__}, which has the settings of no method of trlX; derive it "
                "from PPOConfig, ILQLConfig, SFTConfig or RFTConfig, or derive the trainer from AccelerateRLTrainer"
            )
        given["method"] = {each.name: given["method"].get(each.name) for each in fields(method)}
        given["method"]["name"] = method.__name__
        best = given["train"].pop("save_best") if measured else False
        if not isinstance(given["model"]["model_path"], str):
            given["model"].pop("model_path")  # a config or model object, which `train` passes on
        given["train"]["resume_from_checkpoint"] = of_this_run(self.train.resume_from_checkpoint)
        found = translate("trlx", given, processes=int(os.environ.get("WORLD_SIZE", 1)))
        if measured:
            found.set("train.save_best", best)
        return found


def of_this_run(checkpoint: str | None) -> str | None:
    """Return the checkpoint of trainkit for one named as in trlX, ``checkpoint_<step>``, if there is one beside it."""
    name = re.fullmatch(r"checkpoint_0*(\d+)", Path(checkpoint or "").name)
    if checkpoint is None or name is None:
        return checkpoint
    found = Path(checkpoint).parent / "checkpoints" / f"step_{int(name[1]):08d}"
    return str(found) if found.is_dir() else checkpoint


_said: set[str] = set()


def say_once(text: str) -> None:
    """Log a warning, once per process."""
    if text not in _said:
        _said.add(text)
        log.warning("%s", text)
