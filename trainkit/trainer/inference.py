"""Trained models that are tried without training: loaded with the settings of their run, to generate and evaluate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedConfig

from trainkit.config import MethodConfig, ModelConfig, SamplingConfig, TRLConfig
from trainkit.data import Batch, Row, prompt_rows, written_prompts
from trainkit.errors import ConfigError
from trainkit.metrics import Metrics
from trainkit.models import context_length
from trainkit.models.adapters import has_score_head
from trainkit.models.loading import is_classifier, load_model_config
from trainkit.plugins import get_trainer, register_trainer
from trainkit.rollouts import Record as Measured
from trainkit.runs import Record
from trainkit.runs.exports import Source, find_model
from trainkit.runs.student import quantile
from trainkit.seeding import placed, turn_seed
from trainkit.trainer.accelerate import AccelerateRLTrainer
from trainkit.trainer.best import check_best

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
        return self.trainer.settings(**{**self.own, **self.given})

    @property
    def own(self) -> dict[str, Any]:
        """The sampling settings of the model's generation config; empty for an export of a run."""
        config = getattr(self.trainer.unwrapped.model, "generation_config", None)
        if self.source.run is not None or not getattr(config, "do_sample", None):
            return {}
        settings = {name: getattr(config, name, None) for name in ITS_OWN}
        return {name: value for name, value in settings.items() if value is not None}


def load_tried(
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
        config, omitted = _config_of_model(source, trust_remote_code), _without_run(source)
    else:
        config, omitted = _config_of_run(source, source.run, known)
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
    compares: object = cls.needs_reference  # a property where it depends on the settings
    if compares is True and source.run is not None:  # some ask for a teacher when they are made; none is loaded
        config = config.update({"model.reference_path": source.model})
    trainer = cls(config, trust_remote_code=trust_remote_code, **known)
    trainer.text.encode.advice = "Shorten it" + ("" if trainer.text.is_encoder_decoder else ", or lower max_new_tokens")
    trainer.progress.step = int(source.mark.get("step", 0))
    trainer.models.use(trainer.models.load_policy().to(trainer.parallel.device))  # without optimizer and reference
    return Tried(source, trainer, wanted, omitted)


IMAGES = "Load it with diffusers: DiffusionPipeline.from_pretrained(path)(prompt).images"


def _scores(name: str) -> str:
    """Return what can be done with a model that scores text."""
    return (
        f"{name!r} is a reward model, which scores text and writes none. Score text with "
        "trainkit.RewardModel.from_pretrained(path), give that as reward_fn in training, or evaluate the model on "
        "eval_samples"
    )


def _refuse_pipeline(source: Source) -> None:
    if source.pipeline:
        raise ConfigError(f"{source.model!r} is a diffusion pipeline ({source.pipeline}): it makes images. {IMAGES}")


def _config_of_run(source: Source, run: Path, arguments: Mapping[str, Any]) -> tuple[TRLConfig[Any], list[str]]:
    """Return the configuration to try a run's export with, and what it omits of the run's."""

    def without(section: str, names: Sequence[str]) -> dict[str, Any]:
        given = sections.get(section)
        return {k: v for k, v in given.items() if k not in names} if isinstance(given, Mapping) else {}

    sections = dict(Record(run).config)
    rollout = sections.get("rollout")
    engine = rollout.get("engine", "local") if isinstance(rollout, Mapping) else "local"
    engine = str(engine.get("name") if isinstance(engine, Mapping) else engine)
    sections |= {section: without(section, names) for section, names in OF_TRAINING.items()}
    if "environment" not in arguments:
        sections["rollout"] = without("rollout", OF_ENVIRONMENTS)
        sections.pop("environment", None)
    if "reward_fn" not in arguments:
        sections.pop("reward", None)
    kwargs = sections["model"].get("kwargs") or {}
    kwargs = {name: value for name, value in kwargs.items() if name not in ("revision", "subfolder")}
    sections["model"] |= {"model_path": source.model, "kwargs": kwargs}
    sections["train"]["trackers"] = []
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


def _without_run(source: Source) -> list[str]:
    """Return what is not used of an export that is not in the directory of its run."""
    if not source.mark:
        return []
    return [
        f"{source.model!r} is an export of {source.mark.get('method')!r} without the configuration of its run, which "
        "is in the directory of the run: it is sampled from as any language model, without heads that it may have"
    ]


def _dtype(config: PreTrainedConfig) -> str:
    name = str(config.dtype).removeprefix("torch.")
    return name if name in ("float32", "bfloat16", "float16") else "float32"


def _room(config: PreTrainedConfig) -> int:
    limit = context_length(config)
    return LONGEST if limit is None else max(min(LONGEST, limit // 2), 1)


# ------------------------------------------------------------------------------------------- responses to many prompts


@dataclass(frozen=True)
class Response:
    """A response to a prompt, and why it ended: ``stop`` (EOS, a stop token or a stop string) or ``length``.

    It has a score if it is one of the best of several.
    """

    row: Row
    output: str
    finish_reason: str
    score: float | None = None


def respond(
    tried: Tried, prompts: Sequence[Any], samples_per_prompt: int = 1, first: int = 0, *, best_of: int | None = None
) -> Iterator[Response]:
    """Yield the responses to all prompts in order, those to one prompt one after the other; sample them in batches.

    The random numbers of a response follow from the seed of the run, the position of its prompt and its number among
    the responses to it, and not from the size of the batches.

    Args:
        tried: the model.
        prompts: text, conversations, or dicts with one of them under ``prompt`` and further columns.
        samples_per_prompt: the number of responses to each prompt.
        first: the number of responses that are skipped at the beginning, because they are known.
        best_of: sample so many responses to each prompt, and yield the ``samples_per_prompt`` of them with the highest
            scores of the reward function, the best first.

    Raises:
        ConfigError: the best cannot be chosen; see `trainkit.AccelerateRLTrainer.best_of`.
        DataError: a prompt is none, or too long.
        RewardError: the reward function failed.
    """
    trainer, settings = tried.trainer, tried.settings
    if best_of is not None:
        check_best(best_of, samples_per_prompt, None, settings, scored=trainer.scoring.available)
    asked = prompt_rows(prompts)
    rows = placed(written_prompts(asked, trainer.tokenizer))
    queries = [trainer.text.query(row, f"prompt {index}") for index, row in enumerate(rows)]
    repeated = [index for index in range(len(rows)) for _ in range(best_of or samples_per_prompt)]
    row_seeds = trainer.sampling.seeds([rows[index] for index in repeated], "generate")
    size, seeds = trainer.config.rollout.batch_size, [turn_seed(seed, 0) for seed in row_seeds]
    with trainer.sampling.ready():
        if best_of is not None:
            yield from _best(
                tried, asked, [rows[index] for index in repeated], row_seeds, best_of, samples_per_prompt, first
            )
            return
        for start in range(first, len(repeated), size):
            part = repeated[start : start + size]
            rollouts = trainer.sampling.respond(
                [rows[index] for index in part],
                [queries[index] for index in part],
                settings,
                "generate",
                seeds[start : start + size],
            )
            for index, output, ended in zip(part, rollouts.outputs, rollouts.terminated.tolist(), strict=True):
                yield Response(asked[index], output, "stop" if ended else "length")


def _best(
    tried: Tried, asked: list[Row], rows: list[Row], seeds: list[int], n: int, keep: int, first: int
) -> Iterator[Response]:
    """Yield the ``keep`` best of ``n`` responses to each prompt of ``asked``; ``rows`` has each of them n times."""
    trainer = tried.trainer
    together = max(trainer.config.rollout.batch_size // n, 1)  # prompts; none has responses in two parts
    for start in range(first // keep, len(asked), together):
        part = slice(start * n, (start + together) * n)
        rollouts, scores = trainer.responder.best(rows[part], tried.settings, seeds[part], n, keep)
        responses = zip(rollouts.outputs, rollouts.terminated.tolist(), scores.tolist(), strict=True)
        for index, (output, ended, score) in enumerate(responses, start * keep):
            if index >= first:
                yield Response(asked[index // keep], output, "stop" if ended else "length", score)


# ---------------------------------------------------------------------------------------------------------- evaluation


@dataclass(frozen=True)
class Estimate:
    """The mean of a number over responses, with its deviation and the half width of its 95 % interval (Student's t)."""

    mean: float
    std: float
    half: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Return the mean of one value or more; deviation and interval of one value are NaN."""
        count, mean = len(values), math.fsum(values) / len(values)
        if count < 2:
            return cls(mean, math.nan, math.nan, count)
        std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
        return cls(mean, std, quantile(0.95, count - 1) * std / math.sqrt(count), count)

    @property
    def interval(self) -> tuple[float, float]:
        """The ends of the interval."""
        return self.mean - self.half, self.mean + self.half


@dataclass(frozen=True)
class Evaluated:
    """An evaluation: the metrics that training records, and a record of each response."""

    metrics: dict[str, float]
    records: list[Measured]

    @property
    def means(self) -> dict[str, Estimate]:
        """The means of the numbers that each response has, by name and swept setting; those of one reward first."""
        values_of: dict[str, list[float]] = {}
        for record in self.records:
            suffix = f"@{record['setting']}" if "setting" in record else ""
            for name, value in record.items():
                if isinstance(value, int | float):
                    values_of.setdefault(name + suffix, []).append(float(value))
        return {
            name: Estimate.of(values_of[name])
            for name in sorted(values_of, key=lambda name: not name.startswith("reward"))
        }

    def ranked(self) -> list[Measured]:
        """Return the records with a reward, the highest first; empty if there are none."""
        rewarded = [record for record in self.records if record.get("reward") is not None]
        return sorted(rewarded, key=lambda record: -record["reward"])


def evaluate(tried: Tried, prompts: Sequence[Any]) -> Evaluated:
    """Evaluate on prompts as training does: of a run's export, the numbers are those of its last evaluation.

    Raises:
        DataError: a prompt is none, or too long.
        RewardError: the reward or metric function failed.
    """
    trainer = tried.trainer
    if changed := {**tried.own, **trainer.config.rollout.eval_kwargs, **tried.given}:
        trainer.config = trainer.config.update({"rollout.eval_kwargs": changed})
    trainer.add_eval_pipeline(prompts)
    with trainer.sampling.ready():
        return Evaluated(*trainer.evaluation())
