"""Trained models that are tried without training: loaded with the settings of their run, to generate and evaluate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedConfig

from trainkit.config import MethodConfig, ModelConfig, SamplingConfig, TRLConfig
from trainkit.data import Batch, Row, prompt_rows, written_prompts
from trainkit.errors import ConfigError, DataError
from trainkit.metrics import Metrics
from trainkit.models import context_length
from trainkit.models.adapters import HEADS, has_score_head
from trainkit.models.loading import is_classifier, load_model_config
from trainkit.plain import read_yaml
from trainkit.plugins import get_trainer, register_trainer
from trainkit.plugins.hooks import name_of
from trainkit.rollouts import Record
from trainkit.runs.exports import CONFIG, Source, find_model
from trainkit.seeding import PLACE, placed, turn_seed
from trainkit.trainer import evaluation
from trainkit.trainer.accelerate import AccelerateRLTrainer

NAME = "_trying"
"""The registered name of the trainer for models without a run; the underscore excludes it from listings."""
LONGEST = 512
"""Tokens of a response of a model without a run, where its context has room for them."""
OF_TRAINING: dict[str, tuple[str, ...]] = {
    "model": ("model_path", "reference_path", "num_layers_unfrozen", "peft_config"),
    "tokenizer": ("tokenizer_path",),
    "train": ("trackers", "resume", "sharding", "save_best"),
    "rollout": ("engine", "staleness", "correction", "correction_level", "correction_cap", "max_refills"),
}
"""Settings of a run that concern its training alone, by section; an export has its own tokenizer."""
OF_ENVIRONMENTS = ("max_turns", "max_episode_tokens")
"""Settings of the section ``rollout`` that need an environment."""
ITS_OWN = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Sampling settings that a model may bring in its generation config."""


class TryingConfig(MethodConfig):
    """Settings of `TryingTrainer`: none besides the name."""

    name: str = NAME
    """The registered name."""


class TryingTrainer(AccelerateRLTrainer[TryingConfig]):
    """Generates and evaluates with a language model that no run describes; it trains nothing."""

    inputs: ClassVar[tuple[str, ...]] = ("samples",)

    def make_experience(self, rows: list[Row]) -> Batch:
        """Raise an error: nothing is trained."""
        raise NotImplementedError("a model that is tried is not trained")

    def loss(self, batch: Any) -> tuple[Tensor, Metrics]:
        """Raise an error: nothing is trained."""
        raise NotImplementedError("a model that is tried is not trained")


@dataclass
class Tried:
    """A model that is ready to generate.

    Attributes:
        source: where it comes from.
        trainer: has the model, its tokenizer and the settings of its run.
        given: sampling settings that the user gave, over those of the run or of the model.
        notes: sentences about settings of the run that are not used.
    """

    source: Source
    trainer: AccelerateRLTrainer[Any]
    given: dict[str, Any]
    notes: list[str] = field(default_factory=list)

    @property
    def settings(self) -> SamplingConfig:
        """The sampling settings: those of the run, or of the model's generation config, with those that were given."""
        return self.trainer.settings(**{**self._own, **self.given})

    @property
    def _own(self) -> dict[str, Any]:
        config = getattr(self.trainer.unwrapped.model, "generation_config", None)
        if self.source.run is not None or not getattr(config, "do_sample", None):
            return {}
        found = {name: getattr(config, name, None) for name in ITS_OWN}
        return {name: value for name, value in found.items() if value is not None}


def load(
    given: str,
    *,
    best: bool = False,
    settings: Mapping[str, Any] | None = None,
    seed: int | None = None,
    batch_size: int | None = None,
    trust_remote_code: bool = False,
    **arguments: Any,
) -> Tried:
    """Load a model to try it: no reference, no optimizer, and nothing is written.

    An export of a run is loaded by the class of the run's algorithm and sampled from with the run's settings. Adapters
    are merged.

    Args:
        given: the directory of a run, of an export or of another model, or a hub id.
        best: of a run, its best export instead of the last.
        settings: sampling settings instead of those of the run, by name.
        seed: instead of ``train.seed``.
        batch_size: instead of ``rollout.batch_size``.
        trust_remote_code: whether Python code that comes with the model may run.
        **arguments: those of the trainer: ``reward_fn``, ``metric_fn``, ``environment``, ``logit_mask``,
            ``tokenizer``, ``stop_sequences``.

    Raises:
        ConfigError: there is no such model, it generates no text, or a setting is not valid.
    """
    source, wanted = find_model(given, best=best), dict(settings or {})
    _refuse_pipeline(source)
    known = {name: value for name, value in arguments.items() if value is not None}
    if source.run is None:
        config, notes = _config_of_model(source, trust_remote_code), []
    else:
        config, notes = _config_of_run(source, source.run, known)
    changes: dict[str, Any] = {} if seed is None else {"train.seed": seed}
    changes |= {} if batch_size is None else {"rollout.batch_size": batch_size}
    if "max_new_tokens" in wanted:  # it also limits the prompts
        changes["rollout.max_new_tokens"] = wanted["max_new_tokens"]
    config = config.update(changes) if changes else config
    cls = get_trainer(config.method.name)
    if not issubclass(cls, AccelerateRLTrainer):
        raise ConfigError(f"{given!r} is a model of {config.method.name!r}, which generates no text. {IMAGES}")
    if not cls.generates:
        raise ConfigError(_scores(given))
    trainer = cls(config, trust_remote_code=trust_remote_code, **known)
    trainer.progress.step = int(source.mark.get("step", 0))
    trainer.prepare_model()
    return Tried(source, trainer, wanted, notes)


IMAGES = "Load it with diffusers: DiffusionPipeline.from_pretrained(path)(prompt).images"


def _scores(given: str) -> str:
    """Return what can be done with a model that scores text."""
    return (
        f"{given!r} is a reward model, which scores text and writes none. Score text with "
        "trainkit.RewardModel.from_pretrained(path), give that as reward_fn in training, or evaluate the model on "
        "eval_samples"
    )


def _refuse_pipeline(source: Source) -> None:
    if source.pipeline:
        raise ConfigError(f"{source.model!r} is a diffusion pipeline ({source.pipeline}): it makes images. {IMAGES}")


def _config_of_run(source: Source, run: Path, arguments: Mapping[str, Any]) -> tuple[TRLConfig[Any], list[str]]:
    """Return the configuration to try a run's export with, and what it leaves out of the run's."""
    sections = {
        name: dict(value) if isinstance(value, Mapping) else value for name, value in read_yaml(run / CONFIG).items()
    }
    engine = name_of((sections.get("rollout") or {}).get("engine", "local"))
    for section, names in OF_TRAINING.items():
        for name in names:
            (sections.get(section) or {}).pop(name, None)
    if "environment" not in arguments:
        sections.pop("environment", None)
        for name in OF_ENVIRONMENTS:
            (sections.get("rollout") or {}).pop(name, None)
    if "reward_fn" not in arguments:
        sections.pop("reward", None)
    kwargs = {k: v for k, v in (sections["model"].get("kwargs") or {}).items() if k not in ("revision", "subfolder")}
    sections["model"] |= {"model_path": source.model, "kwargs": kwargs}
    sections["train"] = {**(sections.get("train") or {}), "trackers": []}
    told = f"the run generated with the engine {engine!r}; here trainkit's own sampler generates"
    return TRLConfig.from_dict(sections), [told] if engine != "local" else []


def _config_of_model(source: Source, trust_remote_code: bool) -> TRLConfig[Any]:
    """Return a configuration for a model that no run describes.

    Raises:
        ConfigError: the model cannot be loaded, or is no language model.
    """
    register_trainer(NAME)(TryingTrainer)
    path = source.model
    if has_score_head(Path(path)):
        raise ConfigError(_scores(path))
    allowed = {"trust_remote_code": True} if trust_remote_code else {}
    found = load_model_config(ModelConfig(model_path=path, kwargs=allowed), "MODEL")
    if is_classifier(found):
        raise ConfigError(_scores(path))
    return TRLConfig.from_dict(
        {
            "method": NAME,
            "model": {"model_path": path, "dtype": _dtype(found)},
            "rollout": {"max_new_tokens": _room(found), "batch_size": 8},
            "train": {"trackers": []},
        }
    )


def _dtype(config: PreTrainedConfig) -> str:
    name = str(config.dtype).removeprefix("torch.")
    return name if name in ("float32", "bfloat16", "float16") else "float32"


def _room(config: PreTrainedConfig) -> int:
    limit = context_length(config)
    return LONGEST if limit is None else max(min(LONGEST, limit // 2), 1)
