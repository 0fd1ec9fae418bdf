"""The whole configuration."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from textwrap import indent
from typing import Annotated, Any, Generic, Self, TypeVar

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    SecretStr,
    SerializeAsAny,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from trainkit.config.base import FrozenModel, MethodConfig, Plain, SamplingConfig
from trainkit.config.entries import MOST, HooksEntry, as_named, named_once
from trainkit.config.faults import Fault, faults_of, report
from trainkit.config.places import DEFAULT, METHOD, PYTHON, Places, leaves, place_of, value_at, with_comment
from trainkit.config.sections import (
    DataConfig,
    EnvironmentConfig,
    ModelConfig,
    OptimizerConfig,
    RewardFunctionConfig,
    RolloutConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainConfig,
    sweep,
    with_own_dtype,
)
from trainkit.errors import ConfigError, RegistryError, describe
from trainkit.plain import DEPTH, read_yaml_lines, to_yaml
from trainkit.plugins import get_method_class
from trainkit.security import MASK, TRUST, code_settings, filled, guarded, hidden

M = TypeVar("M", bound=MethodConfig)
BY_NAME = ("method", "engine", "sharding")
"""Settings that may be a name alone instead of a mapping with the name."""


class TRLConfig(FrozenModel, Generic[M]):
    """The whole configuration of a run.

    ``method`` may be a `MethodConfig`, a dict with its ``name``, or the name alone. Where other sections set
    nothing, the algorithm's `section_defaults` apply, then the defaults of the fields.

    Raises:
        ConfigError: the configuration is invalid; lists every fault with its key, what was given and what is allowed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, ser_json_inf_nan="constants")

    method: SerializeAsAny[M]
    """The algorithm and its settings."""
    model: ModelConfig = ModelConfig()
    """The model."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """The tokenizer."""
    data: DataConfig = DataConfig()
    """The reading of datasets."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """The learning-rate schedule."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling and the collection of experience."""
    environment: EnvironmentConfig = EnvironmentConfig()
    """The calls of environments."""
    reward: RewardFunctionConfig = RewardFunctionConfig()
    """The calls of the reward function."""
    train: TrainConfig = TrainConfig()
    """The training loop."""
    plugins: Annotated[list[HooksEntry], Field(max_length=MOST), AfterValidator(named_once)] = []
    """Installed plugins with hooks, besides that of `method`: names, or mappings with settings."""

    __slots__ = ("_places",)  # of no part in comparisons, copies and pickles

    def __init__(self, /, **data: Any) -> None:
        self._validate(data, dict.fromkeys(leaves(data), PYTHON))

    def _validate(self, data: Plain, places: Places, faults: Iterable[Fault] = ()) -> None:
        """Set the fields from plain data; ``faults`` are found already, and reported with the others."""
        sections = {name: value for name, value in data.items() if name == "method" or value is not None}
        data, found = guarded(sections), []
        context = {"sampling": sampling_class(data.get("method"))}
        try:
            self.__pydantic_validator__.validate_python(copy.deepcopy(data), self_instance=self, context=context)
        except ValidationError as error:
            found = faults_of(error, data)
        if found := [*found, *faults]:
            raise ConfigError(report(found, places))
        object.__setattr__(self, "_places", places)

    @property
    def places(self) -> Places:
        """Where the values that are set come from, by their keys."""
        return dict(getattr(self, "_places", {}))

    def place(self, *key: str) -> str:
        """Return where a value comes from: ``default``, ``method`` (its `section_defaults`), or who has set it.

        That is a file with its line, ``command line``, or ``Python``.

        Args:
            key: the keys that lead to the value: ``config.place("optimizer", "lr")``.
        """
        if place := place_of(key, self.places):
            return place
        return DEFAULT if value_at(self.method.section_defaults, key) is ... else METHOD

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the unparametrised class: ``TRLConfig[M]`` cannot be looked up by its name."""
        origin = self.__pydantic_generic_metadata__["origin"] or type(self)
        return object.__new__, (origin,), self.__getstate__()

    @model_validator(mode="before")
    @classmethod
    def _apply_section_defaults(cls, data: Any) -> Any:
        try:
            method = method_class(data.get("method"))
        except PydanticCustomError:
            return data  # reported, with everything else, by the validator of `method`
        return merged(copy.deepcopy(method.section_defaults), data) if method else data

    @field_validator("method", mode="before")
    @classmethod
    def _plugin_validates(cls, value: Any) -> Any:
        if isinstance(value, MethodConfig):
            return value
        method = method_class(value)
        if method is None:
            reason = f"should be a method's name, or a mapping with its 'name'{as_named(value)}"
            raise PydanticCustomError("method", "{reason}", {"reason": reason})
        return method.model_validate({**({} if isinstance(value, str) else value), "name": _name_of(value)})

    @model_validator(mode="after")
    def _method_knows_sampling(self) -> Self:
        for _, settings in sweep(self.rollout.eval_kwargs):  # for a section that was built without the method
            lengths = {name: getattr(self.rollout, name) for name in ("max_new_tokens", "min_new_tokens")}
            self.method.sampling.model_validate(lengths | settings)
        return self

    @classmethod
    def from_dict(
        cls, config: Mapping[str, Any], places: Places | None = None, *, faults: Iterable[Fault] = ()
    ) -> Self:
        """Build a configuration from a plain dict.

        Args:
            config: the sections.
            places: where values come from, by their keys, as `place` and error messages say it.
            faults: what is wrong with it already, to be reported with what is found.
        """
        if not isinstance(config, Mapping):
            raise ConfigError(f"a config is a mapping of sections; given {describe(config)}")
        data = {str(key): value for key, value in config.items()}
        made = cls.__new__(cls)
        made._validate(data, dict.fromkeys(leaves(data), PYTHON) if places is None else dict(places), faults)
        return made

    def to_dict(self, *, secrets: bool = False) -> Plain:
        """Return the configuration as plain data; changing the result does not change the configuration.

        Args:
            secrets: whether tokens, passwords and API keys are included; by default a mask is in their place.
        """
        plain = self.model_dump(mode="json")
        return dict(_revealed(plain, self.model_dump())) if secrets else dict(hidden(plain))

    @classmethod
    def load_yaml(cls, path: str | Path) -> Self:
        """Read a YAML file; ``1e-5`` is read as a number."""
        data, lines = read_yaml_lines(Path(path))
        return cls.from_dict(data, {key: f"{path}:{line}" for key, line in lines.items()})

    def save_yaml(self, path: str | Path, *, places: bool = False) -> None:
        """Write a YAML file, from which `load_yaml` restores an equal configuration, except for its secrets.

        Args:
            path: the file.
            places: whether each value has a comment that says where it comes from.
        """
        Path(path).write_text(self.placed_yaml() if places else str(self), encoding="utf-8")

    def placed_yaml(self) -> str:
        """Return the configuration as YAML, in which each value has a comment that says where it comes from."""
        text = ""
        for section, values in self.to_dict().items():
            if isinstance(values, dict):
                text += f"{section}:\n"
                for name, value in values.items():
                    text += with_comment(indent(to_yaml({name: value}), "  "), self.place(section, name))
            else:
                text += with_comment(to_yaml({section: values}), self.place(section))
        return text

    def evolve(self, **sections: Any) -> Self:
        """Return a copy with nested changes: ``config.evolve(train=dict(seed=2), method=dict(gamma=0.9))``.

        Naming another method replaces the whole section ``method``.
        """
        changes = _named(sections)
        places = {**self.places, **dict.fromkeys(leaves(changes), PYTHON)}
        return type(self).from_dict(merged(self.to_dict(secrets=True), changes), places)

    def update(self, changes: Mapping[str, Any]) -> Self:
        """Return a copy changed by dotted path: ``config.update({"train.seed": 2, "optimizer.kwargs.eps": 1e-6})``.

        Every path must name an existing field; free-form fields such as ``kwargs`` accept new keys.
        """
        nested: Plain = {}
        for path, value in changes.items():
            nested = merged(nested, nest(path, value))
        return self.evolve(**nested)

    def settled(self, *, trust_remote_code: bool = False) -> Self:
        """Return the configuration that a run uses, with secrets in place of masks.

        Args:
            trust_remote_code: whether code of the repositories of model and tokenizer may run; it is then allowed in
                ``model.kwargs`` and ``tokenizer.kwargs``, unless these say otherwise.

        Raises:
            ConfigError: a setting would run such code and ``trust_remote_code`` is false, or a secret is missing; says
                where it is taken from.
        """
        fields = self.to_dict(secrets=True)
        if not trust_remote_code and (named := list(code_settings(fields))):
            raise ConfigError(
                f"{', '.join(named)} would run code that comes with a model, which a configuration alone cannot "
                "allow. If you trust that code, allow it with --trust-remote-code (trust_remote_code=True in Python); "
                "otherwise remove the setting"
            )
        plain, missing = filled(fields, os.environ)
        if missing:
            raise ConfigError(f"{MASK!r} stands for a secret, and secrets are not saved:\n  " + "\n  ".join(missing))
        for part in ("model", "tokenizer") if trust_remote_code else ():
            plain[part]["kwargs"].setdefault(TRUST, True)
        return self if plain == fields else self.from_dict(plain, self.places)

    def check_metric(self, metric: str, setting: str) -> None:
        """Check that a run has evaluations, and one at the value of a swept setting that a metric names.

        Args:
            metric: the name of a metric of evaluations. Which of them a run has is known when the first one is made.
            setting: what reads the metric, for messages.

        Raises:
            ConfigError: it has not.
        """
        if not self.train.eval_interval:
            raise ConfigError(
                f"{setting} compares evaluations, and train.eval_interval is 0, so there are none; set it to the steps "
                f"between them, or remove {setting}"
            )
        suffixes = [suffix for suffix, _ in sweep(self.rollout.eval_kwargs)]
        named = re.search(r"@\w+=[^@]*$", metric)
        if named and named[0] not in suffixes:
            at = ", ".join(each[1:] for each in suffixes)
            why = "it is no list of values" if suffixes == [""] else f"they are at {at}"
            raise ConfigError(
                f"{setting} compares {metric!r}, and no evaluation is at {named[0][1:]} (rollout.eval_kwargs: {why})"
            )

    def __str__(self) -> str:
        return to_yaml(self.to_dict())


def default_config(method: str) -> TRLConfig[Any]:
    """Return the default configuration of ``method``, including the algorithm's `section_defaults`."""
    return TRLConfig(method=method)


def _revealed(plain: Any, live: Any) -> Any:
    """Return dumped data with the values of those secrets that pydantic has masked: the fields of type `SecretStr`."""
    if isinstance(live, SecretStr):
        return live.get_secret_value()
    if isinstance(plain, Mapping) and isinstance(live, Mapping):
        return {key: _revealed(value, live.get(key)) for key, value in plain.items()}
    if isinstance(plain, list) and isinstance(live, list | tuple):
        return [_revealed(*pair) for pair in zip(plain, live, strict=True)]
    return plain


def _name_of(method: Any) -> str | None:
    name = method.get("name") if isinstance(method, Mapping) else getattr(method, "name", method)
    return name.lower() if isinstance(name, str) else None


def method_class(method: Any) -> type[MethodConfig] | None:
    """Return the config class of a method given as a name, mapping or instance; None for anything else."""
    if isinstance(method, MethodConfig):
        return type(method)
    name = _name_of(method)
    if name is None:
        return None
    try:
        return get_method_class(name)
    except RegistryError as error:
        raise PydanticCustomError("unknown_method", "{reason}", {"reason": str(error)}) from error


def sampling_class(method: Any) -> type[SamplingConfig]:
    """Return the class of a method's sampling settings; `SamplingConfig` if the method is invalid or missing."""
    try:
        cls = method_class(method)
    except PydanticCustomError:  # reported by the validator of `method`
        return SamplingConfig
    return cls.sampling if cls else SamplingConfig


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Plain:
    """Merge ``changes`` into ``base``, mapping by mapping; a section given as an object replaces the old one."""
    result = dict(base)
    for key, value in changes.items():
        old = result.get(key)
        if key in BY_NAME and isinstance(old, str) and isinstance(value, Mapping):
            old = {"name": old}
        if isinstance(value, Mapping) and isinstance(old, Mapping) and not _renamed(key, old, value):
            result[key] = merged(old, value)
        else:
            result[key] = value
    return result


def _renamed(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return whether merging ``new`` into ``old`` would mix two plugins or model architectures."""
    tag = "name" if key in BY_NAME else "model_type" if key in ("model_path", "reference_path") else None
    return tag is not None and tag in old and tag in new and str(new[tag]).lower() != str(old[tag]).lower()


def _named(sections: Plain) -> Plain:
    """Return ``sections`` as they are merged: a method that is a name as ``{"name": name}``, the dtype in its field."""
    with suppress(ValueError):  # reported when the sections are validated
        sections = {**sections, "model": with_own_dtype(sections["model"])} if "model" in sections else sections
    name = sections.get("method")
    return {**sections, "method": {"name": name}} if isinstance(name, str) else sections


def nest(path: str, value: Any) -> Plain:
    """Return the sections that set the value at a dotted path.

    Raises:
        ConfigError: the path has too many parts.
    """
    parts = path.split(".")
    if len(parts) > DEPTH:
        raise ConfigError(f"given {describe(path)}; a setting has at most {DEPTH} parts")
    for part in reversed(parts):
        value = {part: value}
    return _named(value)
