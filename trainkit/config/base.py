"""What the configuration is built from: frozen sections, the settings of algorithms and of plugins."""

from __future__ import annotations

from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Self, Union, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from trainkit.errors import ConfigError
from trainkit.security import guarded, hidden

Plain = dict[str, Any]


class FrozenModel(BaseModel):
    """A part of the configuration, which cannot be changed in place."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Raise a ConfigError that says how to make a changed copy, if ``name`` is a field."""
        try:
            super().__setattr__(name, value)
        except ValidationError:
            raise ConfigError(_frozen(self, name, value)) from None

    def __delattr__(self, name: str) -> None:
        """Raise a ConfigError, as `__setattr__`."""
        try:
            super().__delattr__(name)
        except ValidationError:
            raise ConfigError(_frozen(self, name, None)) from None


class Section(FrozenModel):
    """Base class of all sections: frozen, no unknown fields, docstrings as descriptions."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        ser_json_inf_nan="constants",
    )

    @model_validator(mode="before")
    @classmethod
    def _guard_secrets(cls, data: Any) -> Any:
        return guarded(data)  # before pydantic can quote one in an error message

    @field_validator("*", mode="before")
    @classmethod
    def _of_another_language(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[str(info.field_name)].annotation
        kinds = set(get_args(annotation)) if get_origin(annotation) in (Union, UnionType) else {annotation}
        if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
            raise ValueError("should be a number, not true or false")
        if isinstance(value, str) and value.lower() == "none" and NoneType in kinds:
            raise ValueError("should be null, which is None in YAML")
        return value

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, hidden({name: value})[name]


class SamplingConfig(Section):
    """How responses are sampled."""

    max_new_tokens: int = Field(40, ge=1)
    """Maximum length of a response in tokens, EOS included."""
    min_new_tokens: int = Field(0, ge=0)
    """Tokens of a response before EOS or one of ``stop_token_ids`` may be sampled; 0: off. Stop strings may end it
    earlier. Log-probabilities remain those of the whole distribution."""
    temperature: float = Field(1.0, ge=0)
    """The logits are divided by this in sampling and in the log-probabilities that training uses. 0 (greedy) is
    allowed in evaluation only."""
    top_k: int = Field(0, ge=0)
    """Sample from the k most likely tokens; 0: off. Log-probabilities remain those of the whole distribution."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this probability mass; 1: off. Log-probabilities remain those of
    the whole distribution."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample from the tokens whose probability is at least this fraction of the largest one; 0: off.
    Log-probabilities remain those of the whole distribution."""
    repetition_penalty: float = Field(1.0, gt=0)
    """For sampling, the logits of tokens that occur in the prompt or in the response so far (with an encoder-decoder,
    in the response only) are divided by this if positive and multiplied by it if negative. 1: off; values above 1 make
    repetition less likely. Log-probabilities remain those without the penalty."""
    stop_sequences: list[str] = []
    """Strings that end a response; the text passed to the reward function ends before them."""
    stop_token_ids: list[NonNegativeInt] = []
    """Token ids that end a response, besides the EOS ids of the tokenizer and of the model's generation config. Like
    EOS, the token belongs to the response and is trained."""

    @model_validator(mode="after")
    def _shortest_fits(self) -> Self:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens is {self.min_new_tokens} and max_new_tokens {self.max_new_tokens}; "
                "the shortest response should not be longer than the longest"
            )
        return self

    @field_validator("stop_sequences")
    @classmethod
    def _no_empty_stop(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError("an empty stop string would end every response at once; remove it")
        return value


class MethodConfig(Section):
    """Base class of an algorithm's section. Subclass it, give ``name`` a default, and add the algorithm's settings."""

    section_defaults: ClassVar[Plain] = {}
    """Defaults of other sections that suit this algorithm, used where a config sets nothing: ``{"train": {...}}``."""
    sampling: ClassVar[type[SamplingConfig]] = SamplingConfig
    """The class of the sampling settings; a subclass of `SamplingConfig` if the algorithm adds settings."""

    name: str
    """The registered name of the algorithm."""


def _two_to_compare(value: Any) -> Any:
    if isinstance(value, int) and value < 2:
        raise ValueError(
            "the responses to one prompt are compared with each other, which needs at least two; give at least 2"
        )
    return value


GroupSize = Annotated[int, Field(ge=2), BeforeValidator(_two_to_compare)]
"""A setting of a method: the number of responses to each prompt, for algorithms that compare them with each other."""


def _of_evaluations(name: str) -> str:
    if len(name) > len(EVAL) and name.startswith(EVAL):
        return name
    meant = "" if EVAL[:-1] in name.lower() else f"; did you mean {EVAL + name!r}?"
    raise ValueError(f"should be a metric of evaluations, such as 'eval/reward' or 'eval/loss/total'{meant}")


EVAL = "eval/"
EvalMetric = Annotated[str, AfterValidator(_of_evaluations), Field(json_schema_extra={"pattern": f"^{EVAL}."})]
"""A metric of evaluations, as it is logged, such as `eval/reward` or `eval/loss/total`."""


class PluginConfig(Section):
    """Base class of the settings of hooks and trackers. Subclass it, and register the subclass with their class."""

    name: str
    """The name of the plugin."""

    def check(self, config: Any) -> None:
        """Check the settings with the others of a run, before anything is loaded; `trainkit config check` does, too.

        Args:
            config: the `TRLConfig` of the run.

        Raises:
            ConfigError: they do not fit each other.
        """


SHORT = 80
"""The longest value that the message about an assignment repeats."""


def _frozen(part: FrozenModel, name: str, value: Any) -> str:
    """Return what to write instead of assigning ``value`` to a field."""
    from trainkit.config.tree import TRLConfig

    sections = {field.annotation: key for key, field in TRLConfig.model_fields.items()}
    key = "method" if isinstance(part, MethodConfig) else sections.get(type(part))
    text = repr(hidden({name: value})[name])
    shown = text if len(text) <= SHORT else "..."
    change = f"{name}={shown}" if isinstance(part, TRLConfig) else f"{key}=dict({name}={shown})" if key else "..."
    return (
        f"{type(part).__name__} is frozen, and {name!r} cannot be assigned. Make a changed copy: "
        f"config = config.evolve({change})"
    )
