"""The configuration: a frozen tree of plain data, checked as a whole before anything is loaded.

Free of torch. The section ``method`` belongs to the algorithm and is validated by its plugin's own class.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from trainkit.errors import ConfigError, RegistryError, describe, suggest
from trainkit.plugins import get_trainer

Plain = dict[str, Any]


class Section(BaseModel):
    """Base of every section: frozen, no unknown fields, docstrings as descriptions."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        ser_json_inf_nan="constants",
    )


class SamplingConfig(Section):
    """How responses are sampled."""

    max_new_tokens: int = Field(40, ge=1)
    """Longest response, in tokens, EOS included."""
    temperature: float = Field(1.0, ge=0)
    """Divides the logits when sampling, and wherever log-probabilities are trained on. 0 (greedy) in evaluation
    only."""
    top_k: int = Field(0, ge=0)
    """Sample from the k likeliest tokens; 0 is off. Log-probabilities stay those of the whole distribution."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this mass; 1 is off. Log-probabilities stay those of the whole
    distribution."""
    min_p: float = Field(0.0, ge=0, le=1)
    """Sample from the tokens that are at least this share of the likeliest one's probability; 0 is off.
    Log-probabilities stay those of the whole distribution."""
    repetition_penalty: float = Field(1.0, gt=0)
    """Tokens of the prompt and the response so far (with an encoder-decoder, of the response) are sampled with their
    logits divided by this if positive, multiplied if negative; 1 is off, above 1 makes repeating rarer.
    Log-probabilities stay those without it."""
    stop_sequences: list[str] = []
    """Strings that end a response; cut from the text that the reward function sees."""

    @field_validator("stop_sequences")
    @classmethod
    def _no_empty_stop(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError("an empty stop string would end every response at once; remove it")
        return value


class MethodConfig(Section):
    """Base of an algorithm's own section. Subclass it, give ``name`` a default, add the algorithm's numbers."""

    section_defaults: ClassVar[Plain] = {}
    """Values of other sections that suit this algorithm, used where a config says nothing: ``{"train": {...}}``."""
    sampling: ClassVar[type[SamplingConfig]] = SamplingConfig
    """The class of the sampling settings; derived from `SamplingConfig` where the algorithm has some of its own."""

    name: str
    """The registered name of the algorithm."""


class ModelConfig(Section):
    """Which model is trained, and how it is held."""

    model_path: str | Plain | None = None
    """A hub id, a local directory, or the fields of a model config with its `model_type` (random weights). None: a
    live model is given to `train`."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The weights' type. For mixed precision keep float32 here and set `train.mixed_precision`."""
    num_layers_unfrozen: int = Field(-1, ge=-1)
    """Train only so many of the uppermost layers, and what follows them; embeddings and the layers below are frozen,
    run once per sequence, and shared with the reference. Of an encoder-decoder, the decoder's layers; the encoder is
    frozen. -1: train everything."""
    peft_config: Plain | None = None
    """Train an adapter instead of the weights: the fields of a peft config (`peft_type` is LORA unless given), or
    the object. The reference is the model without it."""
    disable_dropout: bool = True
    """Switch dropout off in the policy, so that old and new log-probabilities speak of the same function. The
    reference never has any."""
    kwargs: Plain = {}
    """Passed on to `from_pretrained` or `from_config`, e.g. `attn_implementation`, `revision`."""

    @field_validator("kwargs")
    @classmethod
    def _no_second_place(cls, value: Plain) -> Plain:
        if "dtype" in value:
            raise ValueError("dtype has a field of its own in this section; set model.dtype")
        return value

    @field_validator("peft_config", mode="before")
    @classmethod
    def _peft_fields(cls, value: Any) -> Any:
        return _peft_fields(value) if hasattr(value, "peft_type") and hasattr(value, "to_dict") else value

    @model_validator(mode="after")
    def _one_way_of_freezing(self) -> Self:
        if self.peft_config is not None and self.num_layers_unfrozen >= 0:
            raise ValueError(
                "peft_config freezes the whole model below its adapter, and num_layers_unfrozen asks for trained "
                "layers; give one of the two (peft's layers_to_transform puts adapters on some layers only)"
            )
        return self

    @field_validator("model_path", mode="before")
    @classmethod
    def _path_or_fields(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, str | Mapping):
            raise ValueError("should be a hub id or directory, the fields of a model config, or None")
        return value


class TokenizerConfig(Section):
    """Which tokenizer is used."""

    tokenizer_path: str | None = None
    """A hub id or local directory. None: the model's own, or the live tokenizer given to `train`."""
    kwargs: Plain = {}
    """Passed on to `AutoTokenizer.from_pretrained`, e.g. `eos_token`, `chat_template`."""


class OptimizerConfig(Section):
    """The optimizer, from `torch.optim`."""

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    """The optimizer."""
    lr: float = Field(1e-5, gt=0)
    """Peak learning rate."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay."""
    kwargs: Plain = {}
    """Further arguments of the optimizer, e.g. `betas`, `eps`, `momentum`."""

    @field_validator("kwargs")
    @classmethod
    def _no_second_place(cls, value: Plain) -> Plain:
        if taken := {"lr", "weight_decay"} & value.keys():
            raise ValueError(f"{', '.join(sorted(taken))} has a field of its own in this section; set it there")
        return value


class SchedulerConfig(Section):
    """The learning-rate schedule, from `transformers.get_scheduler`."""

    name: Literal["constant", "linear", "cosine", "polynomial", "inverse_sqrt", "cosine_with_min_lr"] = "constant"
    """The shape after warm-up; it ends at the last step of the run."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the rate rises linearly from 0."""
    kwargs: Plain = {}
    """Further arguments of the schedule, e.g. `min_lr_rate`."""


class RolloutConfig(SamplingConfig):
    """How experience is collected."""

    num_rollouts: int = Field(128, ge=1)
    """Responses per collection, all processes together. Offline algorithms collect their whole dataset."""
    batch_size: int = Field(128, ge=1)
    """Rows that are sampled, scored and run through the models together, per process."""
    overlong_prompts: Literal["error", "truncate", "drop"] = "error"
    """What to do with prompts that leave no room for `max_new_tokens`: refuse, keep their end, or leave them out."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text that reward and metric functions see."""
    eval_kwargs: Plain = {}
    """Sampling settings that differ in evaluation, the algorithm's own among them. One may be a list: each of its
    values is evaluated, e.g. `{temperature: [0, 1]}`."""

    @field_validator("eval_kwargs")
    @classmethod
    def _sampling_settings(cls, value: Plain, info: ValidationInfo) -> Plain:
        swept = _swept(value)
        if len(swept) > 1:
            raise ValueError(f"one setting may be a list of values to sweep; given: {', '.join(swept)}")
        sampling: type[SamplingConfig] | None = (info.context or {}).get("sampling")
        for _, settings in sweep(value):
            known = {name: v for name, v in settings.items() if sampling or name in SamplingConfig.model_fields}
            (sampling or SamplingConfig).model_validate(known)  # of a method's own, `TRLConfig` knows
        if swept and not value[swept[0]]:
            raise ValueError(f"the list of values for {swept[0]} is empty; give at least one")
        return value


def sweep(eval_kwargs: Plain) -> list[tuple[str, Plain]]:
    """(suffix, settings) of each evaluation: one, or one per value of the setting that is a list (S-33)."""
    for name in _swept(eval_kwargs):
        return [(f"@{name}={value}", {**eval_kwargs, name: value}) for value in eval_kwargs[name]]
    return [("", eval_kwargs)]


def _swept(settings: Plain) -> list[str]:
    return [name for name, value in settings.items() if isinstance(value, list) and name != "stop_sequences"]


class TrainConfig(Section):
    """The loop: how long, how much at a time, and what is kept."""

    seed: int = Field(1, ge=0)
    """Seed of everything random: weights, data order, sampling, dropout."""
    total_steps: int | None = Field(None, ge=0)
    """Optimizer steps after which the run ends; if `epochs` is given too, the earlier of the two ends it."""
    epochs: int | None = Field(None, ge=1)
    """Passes over the prompts or samples. None: as many as `total_steps` needs, or one if that is not given either."""
    batch_size: int = Field(32, ge=1)
    """Rows per optimizer step, all processes together."""
    microbatch_size: int | None = Field(None, ge=1)
    """Rows per forward and backward pass in one process; changes memory and speed, never the gradient. None: as many
    as make up 2,048 tokens on a CPU, 32,768 on an accelerator."""
    seq_length: int | None = Field(None, ge=2)
    """Longest prompt and response together, in tokens; of an encoder-decoder, the longest of each, its decoder's start
    token included. None: the model's context."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Gradients are scaled down to this global norm at every step. None: never."""
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """Autocast of the forward pass, by accelerate."""
    eval_interval: int = Field(100, ge=0)
    """Steps between evaluations (one more before the first and after the last step). 0: none."""
    save_interval: int = Field(1000, ge=0)
    """Steps between checkpoints (one more at the end). 0: none."""
    keep_checkpoints: int = Field(2, ge=1)
    """Newest checkpoints that stay on disk."""
    save_best: bool = False
    """Export the model to `best/` whenever the evaluation's mean reward is higher than ever before."""
    run_dir: str | None = None
    """Directory of the run. None: `runs/<method>-<date>-<time>`."""
    resume: str | None = None
    """`auto`: go on from the newest whole checkpoint in `run_dir`, if there is one. A path: from that checkpoint."""
    trackers: list[str] = ["tensorboard"]
    """Where metrics go beside the console and `metrics.jsonl`: `tensorboard`, or any other tracker of accelerate."""

    @field_validator("mixed_precision", mode="before")
    @classmethod
    def _yaml_no(cls, value: Any) -> Any:
        return "no" if value is False else value  # YAML 1.1 reads an unquoted no as false

    @model_validator(mode="after")
    def _resumable(self) -> Self:
        if self.resume == "auto" and self.run_dir is None:
            raise ValueError("resume 'auto' looks into run_dir, which is not set; set train.run_dir")
        return self


M = TypeVar("M", bound=MethodConfig)


class TRLConfig(BaseModel, Generic[M]):
    """The whole configuration of a run.

    ``method`` may be a `MethodConfig`, a dict with its ``name``, or the name alone. Where other sections say
    nothing, the algorithm's own `section_defaults` apply, then the defaults of the fields.

    Raises:
        ConfigError: lists every fault at once, each with its key, what was given and what is allowed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, ser_json_inf_nan="constants")

    method: SerializeAsAny[M]
    """The algorithm and its numbers."""
    model: ModelConfig = ModelConfig()
    """The model."""
    tokenizer: TokenizerConfig = TokenizerConfig()
    """The tokenizer."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """The learning-rate schedule."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling."""
    train: TrainConfig = TrainConfig()
    """The loop."""
    plugins: list[str] = []
    """Installed plugins whose hooks take part in the run; the plugin of `method` always does."""

    def __init__(self, /, **data: Any) -> None:
        context = {"sampling": _sampling_class(data.get("method"))}
        try:
            self.__pydantic_validator__.validate_python(copy.deepcopy(data), self_instance=self, context=context)
        except ValidationError as error:
            raise ConfigError(_explain(error, data)) from None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the class before parametrisation: ``TRLConfig[M]`` cannot be looked up by its name."""
        origin = self.__pydantic_generic_metadata__["origin"] or type(self)
        return object.__new__, (origin,), self.__getstate__()

    @model_validator(mode="before")
    @classmethod
    def _apply_section_defaults(cls, data: Any) -> Any:
        try:
            method = _method_class(data.get("method"))
        except PydanticCustomError:
            return data  # reported, with everything else, by the validator of `method`
        return _merge(copy.deepcopy(method.section_defaults), data) if method else data

    @field_validator("method", mode="before")
    @classmethod
    def _plugin_validates(cls, value: Any) -> Any:
        if isinstance(value, MethodConfig):
            return value
        method = _method_class(value)
        if method is None:
            raise PydanticCustomError("method", "should be a method's name, or a mapping with its 'name'")
        return method.model_validate({**({} if isinstance(value, str) else value), "name": _name_of(value)})

    @model_validator(mode="after")
    def _method_knows_sampling(self) -> Self:
        for _, settings in sweep(self.rollout.eval_kwargs):  # of a section that was made on its own
            self.method.sampling.model_validate(settings)
        return self

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """The configuration that a plain dict describes."""
        if not isinstance(config, Mapping):
            raise ConfigError(f"a config is a mapping of sections; given {describe(config)}")
        return cls(**{str(key): value for key, value in config.items()})

    def to_dict(self) -> Plain:
        """The configuration as plain data; changing the result changes nothing here."""
        return self.model_dump(mode="json")

    @classmethod
    def load_yaml(cls, path: str | Path) -> Self:
        """Read a YAML file; numbers like ``1e-5`` are numbers."""
        return cls.from_dict(read_yaml(Path(path)))

    def save_yaml(self, path: str | Path) -> None:
        """Write a YAML file that `load_yaml` reads back equal."""
        Path(path).write_text(str(self), encoding="utf-8")

    def evolve(self, **sections: Any) -> Self:
        """A copy with nested changes: ``config.evolve(train=dict(seed=2), method=dict(gamma=0.9))``.

        Naming another method replaces the whole section ``method``.
        """
        return type(self)(**_merge(self.to_dict(), _named(sections)))

    def update(self, changes: Mapping[str, Any]) -> Self:
        """A copy with changes by dotted path: ``config.update({"train.seed": 2, "optimizer.kwargs.eps": 1e-6})``.

        Every path is checked to its leaf; free-form fields (``kwargs``, ``eval_kwargs``) take new keys.
        """
        nested: Plain = {}
        for path, value in changes.items():
            nested = _merge(nested, _named(_nest(path.split("."), value)))
        return self.evolve(**nested)

    def __str__(self) -> str:
        return to_yaml(self.to_dict())


def default_config(method: str) -> TRLConfig[Any]:
    """The configuration of ``method`` with every default, those that the algorithm suggests included."""
    return TRLConfig(method=method)


def to_yaml(plain: Plain) -> str:
    """Plain data as YAML, keys in their order."""
    return str(yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def read_yaml(path: Path) -> Plain:
    """Plain data from a YAML file, with YAML 1.2's floats (``1e-5``).

    Raises:
        ConfigError: there is no such file, or it is not YAML, or not a mapping.
    """
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the config {str(path)!r}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} should hold a mapping of sections; it holds {describe(data)}")
    return data


def parse_yaml(text: str) -> Any:
    """Plain data from YAML text; no object but plain data can be built."""
    return yaml.load(text, Loader=_Loader)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, reading ``1e-5`` as the number that YAML 1.2 says it is; a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                problem = f"the key {key!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """PyYAML's safe dumper, quoting the strings that `_Loader` would read as numbers, such as ``12e4``."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
    )


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    rare_breaks = any(mark in text for mark in "\x85\u2028\u2029")  # unless escaped, read back as plain line breaks
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if rare_breaks else None)


_Dumper.add_representer(str, _represent_text)


def _peft_fields(config: Any) -> Plain:
    """The fields of a peft config object that differ from its class's defaults, as plain data."""
    default = type(config)().to_dict()
    changed = {key: value for key, value in config.to_dict().items() if value != default.get(key)}
    plain: Plain = {"peft_type": str(getattr(config.peft_type, "value", config.peft_type))}
    for key, value in changed.items():
        plain[key] = sorted(value) if isinstance(value, set | frozenset) else getattr(value, "value", value)
    return plain


def _name_of(method: Any) -> str | None:
    name = method.get("name") if isinstance(method, Mapping) else getattr(method, "name", method)
    return name.lower() if isinstance(name, str) else None


def _method_class(method: Any) -> type[MethodConfig] | None:
    """The config class of a method given as name, mapping or instance; None if it is none of them."""
    if isinstance(method, MethodConfig):
        return type(method)
    name = _name_of(method)
    if name is None:
        return None
    try:
        return get_trainer(name).method_class
    except RegistryError as error:
        raise PydanticCustomError("unknown_method", "{reason}", {"reason": str(error)}) from error


def _sampling_class(method: Any) -> type[SamplingConfig]:
    """The class of a method's sampling settings; the core's where the method is none."""
    try:
        found = _method_class(method)
    except PydanticCustomError:  # reported by the validator of `method`
        return SamplingConfig
    return found.sampling if found else SamplingConfig


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Plain:
    """``base`` with ``changes`` laid over it, mapping by mapping; a section given as a model replaces."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping) and not _renamed(key, old, value):
            merged[key] = _merge(old, value)
        else:
            merged[key] = value
    return merged


def _renamed(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether laying ``new`` over ``old`` would mix two algorithms or two model architectures."""
    tag = {"method": "name", "model_path": "model_type"}.get(key)
    return tag is not None and tag in old and tag in new and str(new[tag]).lower() != str(old[tag]).lower()


def _named(sections: Plain) -> Plain:
    """``sections`` with a method given by its name alone as the mapping that it stands for."""
    name = sections.get("method")
    return {**sections, "method": {"name": name}} if isinstance(name, str) else sections


def _nest(path: list[str], value: Any) -> Plain:
    return {path[0]: value if len(path) == 1 else _nest(path[1:], value)}


def _explain(error: ValidationError, data: Mapping[str, Any]) -> str:
    """One line per fault: key path, what was given, what is allowed, the nearest right name."""
    lines = []
    for fault in error.errors():
        path = ".".join(str(part) for part in fault["loc"]) or "config"
        if fault["type"] == "extra_forbidden":
            known = _fields_at(fault["loc"][:-1], data)
            near = suggest(str(fault["loc"][-1]), known)
            lines.append(f"{path}: unknown field{near} (given {describe(fault['input'])}; known: {', '.join(known)})")
        elif fault["type"] == "missing":
            lines.append(f"{path}: required, not given")
        else:
            message = fault["msg"].removeprefix("Value error, ").removeprefix("Input ")
            lines.append(f"{path}: {message} (given {describe(fault['input'])})")
    count = len(lines)
    return f"{count} fault{'s' if count > 1 else ''} in the config:\n" + "\n".join(f"  {line}" for line in lines)


def _fields_at(loc: tuple[int | str, ...], data: Mapping[str, Any]) -> list[str]:
    model: type[BaseModel] | None = TRLConfig
    for part in loc:
        if part in ("method", "eval_kwargs"):
            method = data.get("method")
            model = _method_class(method) if part == "method" else _sampling_class(method)
            continue
        field = model.model_fields.get(str(part)) if model else None
        inner = [t for t in (field.annotation, *get_args(field.annotation)) if _is_model(t)] if field else []
        model = inner[0] if inner else None
    return list(model.model_fields) if model else []


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)
