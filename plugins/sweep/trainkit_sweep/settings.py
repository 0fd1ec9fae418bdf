"""The settings of a sweep, as a file in YAML has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Discriminator, Field, Tag, field_validator, model_validator

from trainkit.config import EvalMetric, Section

Number = Annotated[int | float, Field(allow_inf_nan=False)]
DATA = ("task", "prompts", "samples", "eval_prompts", "eval_samples", "reward_fn", "environment")
"""Options of ``trainkit train`` that a sweep passes on."""
CHOICES, RANGE = "choices", "range"
"""The two forms of a parameter."""


class RunArguments(Section):
    """What a trial runs: the arguments of ``trainkit train``. Paths are relative to the working directory."""

    config: str | None = None
    """The configuration file. Give this or `method`."""
    method: str | None = None
    """An algorithm, with its default configuration."""
    script: str | None = None
    """A Python file whose function ``main(hparams)`` trains with trainkit-trlx; ``hparams`` are settings of trlX by
    dotted path. It takes the place of a configuration and of data."""
    overrides: dict[str, Any] = Field({})
    """Changes of the configuration by dotted path, such as ``train.total_steps: 200``."""
    task: str | None = None
    """A function that returns arguments of `trainkit.train`: ``FILE.py:FUNCTION``."""
    prompts: str | None = None
    """Prompts: a file, a directory or a hub id."""
    samples: str | None = None
    """Samples to learn from."""
    eval_prompts: str | None = None
    """Prompts for evaluations."""
    eval_samples: str | None = None
    """Held-out samples for evaluations."""
    reward_fn: str | None = None
    """The reward function: ``FILE.py:FUNCTION``."""
    environment: str | None = None
    """The environment: ``FILE.py:NAME``."""

    @model_validator(mode="after")
    def _one_configuration(self) -> Self:
        if [self.config, self.method, self.script].count(None) != 2:
            raise ValueError(
                "give either config, a file, or method, the name of an algorithm, or script, a Python file"
            )
        if self.script is not None and (given := [name for name in DATA if getattr(self, name) is not None]):
            raise ValueError(f"the script has its own data and functions; remove {', '.join(given)}")
        return self


class Range(Section):
    """A range of numbers, which includes its ends."""

    low: Number
    """The least value."""
    high: Number
    """The largest value."""
    log: bool = False
    """Whether values are drawn by their logarithm."""
    step: Number | None = Field(None, gt=0)
    """The distance between values; None: any value, and any integer where the setting is one."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if self.low >= self.high:
            raise ValueError("low should be less than high")
        if self.log and self.low <= 0:
            raise ValueError("low should be above 0 if log is true")
        if self.log and self.step is not None:
            raise ValueError("a range has log or step, not both")
        if self.step is not None and self.step > self.high - self.low:
            raise ValueError("step should be at most the difference of high and low")
        return self

    @property
    def integers(self) -> bool:
        """Whether all numbers of it are written as integers."""
        return all(isinstance(each, int) for each in (self.low, self.high, self.step) if each is not None)


def _form(value: Any) -> str | None:
    if isinstance(value, Mapping | Range):
        return RANGE
    return CHOICES if isinstance(value, list) else None


Parameter = Annotated[
    Annotated[list[Any], Field(min_length=1), Tag(CHOICES)] | Annotated[Range, Tag(RANGE)],
    Discriminator(
        _form,
        custom_error_type="parameter",
        custom_error_message="should be a list of choices, or a mapping with low and high",
    ),
]
"""What the values of a setting are taken from."""


def _once(values: list[int]) -> list[int]:
    if len(set(values)) < len(values):
        raise ValueError("a seed is given twice; name each once")
    return values


class SweepConfig(Section):
    """A sweep."""

    run: RunArguments
    """What a trial is."""
    parameters: Annotated[dict[str, Parameter], Field(min_length=1)]
    """Settings by dotted path: a list of choices, or a range."""
    metric: EvalMetric = "eval/reward"
    """The metric of evaluations. Of a run, its last evaluation counts."""
    direction: Literal["maximize", "minimize"] = "maximize"
    """Whether the metric should be large or small."""
    trials: int | None = Field(None, ge=1)
    """How many trials are made. None: with the sampler ``grid``, all points; required with others."""
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1), AfterValidator(_once)] = Field([1])
    """The seeds that each trial is run with; its value is their mean."""
    sampler: Literal["tpe", "random", "grid"] = "tpe"
    """How parameters are chosen: by a tree-structured Parzen estimator, at random, or every combination once."""
    pruner: Literal["median", "hyperband", "none"] = "median"
    """Which trials are ended early, by the evaluations of their first seed: those below the median of the completed
    trials at the same step, after five have completed; by successive halving; or none."""
    workers: int = Field(1, ge=1)
    """How many runs go on at the same time on this machine."""
    keep: Literal["all", "best"] = "all"
    """Whether the checkpoints and models of all trials are kept, or only those of the best."""
    name: str | None = Field(None, min_length=1)
    """The name of the study. None: that of the file, without its suffix."""
    directory: str | None = Field(None, min_length=1)
    """Where the runs and results are. None: ``sweeps/NAME``."""
    storage: str | None = None
    """The URL of a database that several machines share. None: SQLite, in `directory`."""

    @field_validator("pruner", mode="before")
    @classmethod
    def _null(cls, value: Any) -> Any:
        return "none" if value is None else value

    @model_validator(mode="after")
    def _ends(self) -> Self:
        if self.trials is None and self.sampler != "grid":
            raise ValueError("trials: required, unless the sampler is 'grid'")
        return self
