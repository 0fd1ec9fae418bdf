"""The configuration of trlX: mutable, with its field names. `TRLConfig.translated` gives trainkit's."""

from __future__ import annotations

import copy
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Self

import yaml

import trainkit
from trainkit.errors import ConfigError
from trainkit.migrating import Translation, translate
from trainkit_trlx.data.method_configs import MethodConfig, get_method

log = logging.getLogger(__name__)


def merge(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with nested changes; neither is modified."""
    found = dict(base)
    for key, value in changes.items():
        old = found.get(key)
        found[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return found


class Section:
    """What the sections have in common."""

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Return the section with these fields.

        Raises:
            TypeError: one of them does not exist, or one is missing.
        """
        return cls(**config)


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
            TypeError: a field does not exist, or one is missing.
        """
        sections = {name: section.from_dict(config[name]) for name, section in SECTIONS.items()}
        return cls(method=get_method(config["method"]["name"]).from_dict(config["method"]), **sections)

    def to_dict(self) -> dict[str, Any]:
        """Return the sections as dictionaries; changing these does not change the configuration."""
        return {name: copy.deepcopy(vars(getattr(self, name))) for name in ("method", *SECTIONS)}

    def evolve(self, **kwargs: Any) -> Self:
        """Return a copy with nested changes: ``config.evolve(method=dict(gamma=0.9), train=dict(seed=2))``."""
        return type(self).from_dict(merge(self.to_dict(), kwargs))

    @classmethod
    def update(cls, baseconfig: Mapping[str, Any] | TRLConfig, config: Mapping[str, Any]) -> Self:
        """Return a configuration changed by dotted path or by section: ``{"train.seed": 2, "method": {"gamma": 1}}``.

        Raises:
            ValueError: a field does not exist. (trlX says so of sections alone, and ignores other fields.)
        """
        base = baseconfig.to_dict() if isinstance(baseconfig, TRLConfig) else copy.deepcopy(dict(baseconfig))
        for path, value in config.items():
            nested = value
            for part in reversed(path.split(".")):
                nested = {part: nested}
            cls._check_known(base, nested)
            base = merge(base, nested)
        return cls.from_dict(base)

    @classmethod
    def _check_known(cls, base: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
        for section, values in changes.items():
            names = (
                [section]
                if section not in base
                else [f"{section}.{name}" for name in values if name not in base[section]]
            )
            known = [*base, *(f"{part}.{name}" for part in base for name in base[part])]
            for name in names:
                near = get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"parameter {name!r} is not present in the config (typo or a wrong config){hint}")

    def __str__(self) -> str:
        return json.dumps(self.to_dict(), indent=4, default=str)

    def translated(self) -> trainkit.TRLConfig[Any]:
        """Return the configuration of trainkit. What has no effect in trainkit is logged once.

        Raises:
            ConfigError: a setting has no counterpart; says what to write instead.
        """
        found = self._translation()
        if found.refused:
            raise ConfigError("settings of trlX without counterpart:\n  " + "\n  ".join(map(str, found.refused)))
        for remark in found.remarks:
            say_once(str(remark))
        method = found.config.get("method", {}).get("name", "ppo")
        return trainkit.default_config(method).evolve(**found.config)

    def _translation(self) -> Translation:
        given = self.to_dict()
        given["train"].pop("trainer_kwargs")  # `train` passes them on
        if not isinstance(given["model"]["model_path"], str):
            given["model"].pop("model_path")  # a config or model object, which `train` passes on
        return translate("trlx", given, processes=int(os.environ.get("WORLD_SIZE", 1)))


_said: set[str] = set()


def say_once(text: str) -> None:
    """Log a warning, once per process."""
    if text not in _said:
        _said.add(text)
        log.warning("%s", text)
