"""The configuration: a frozen tree of plain data, checked as a whole before anything is loaded.

This module does not import torch.

The section ``method`` belongs to the algorithm and is validated by its plugin's own class.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from trainkit.errors import ConfigError, RegistryError, describe, suggest
from trainkit.plain import DEPTH, read_yaml, to_yaml
from trainkit.plugins import get_hooks, get_method_class
from trainkit.plugins.discovery import ACCELERATE_TRACKERS, why_disabled
from trainkit.plugins.hooks import name_of
from trainkit.plugins.registry import ENGINES, PARTS, SHARDINGS, Part, get_part, is_known
from trainkit.security import HUB_TOKENS, MASK, TRUST, code_settings, filled, guarded, hidden, is_secret

Plain = dict[str, Any]

SHOWN, WIDTH, SHORT = 20, 2000, 80
"""How many faults an error message has, how long each may be, and how long a value that is quoted; a configuration may
be somebody else's."""
MOST = 32
"""How many plugins a run may name; finding one takes milliseconds."""


class Frozen(BaseModel):
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


class Section(Frozen):
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

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, hidden({name: value})[name]


class SamplingConfig(Section):
    """How responses are sampled."""

    max_new_tokens: int = Field(40, ge=1)
    """Maximum length of a response in tokens, EOS included."""
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


class PluginConfig(Section):
    """Base class of the settings of hooks and trackers. Subclass it, and register the subclass with their class."""

    name: str
    """The name of the plugin."""


class _Unread(PluginConfig):
    """Settings of a disabled plugin, which are kept as they were given."""

    model_config = ConfigDict(extra="allow")


def _one_token(kwargs: Plain) -> Plain:
    """Return arguments of `from_pretrained` with the token of the hub under its present name, ``token``.

    A tokenizer would take ``hf_token`` for one of its special tokens, and save it.
    """
    found = {name: kwargs[name] for name in HUB_TOKENS if name in kwargs}
    given = {name: token for name, token in found.items() if token != MASK} or found
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are given, which are one setting; give token alone")
    rest = {name: value for name, value in kwargs.items() if name not in found}
    for token in given.values():
        if not all("!" <= character <= "~" for character in str(token)):
            raise ValueError("the token has a space, a line break or another character that no token has; copy it")
        rest["token"] = token
    return rest


Kwargs = Annotated[Plain, AfterValidator(_one_token)]
"""Arguments of `from_pretrained`."""


def _of_hooks(value: Any) -> str | PluginConfig:
    return _entry(value, tracker=False)


def _of_tracker(value: Any) -> str | PluginConfig:
    return _entry(value, tracker=True)


def _of_part(part: Part, value: Any) -> str | PluginConfig:
    """Return the name of an engine or a sharding, or its validated settings if it has settings."""
    given, name = _given(value, f"the name of a {part.label}")
    try:
        settings = None if name.lower() in part.own else get_part(part, name).settings
    except RegistryError as error:
        raise _refused(str(error)) from error
    if settings is None:
        if given:
            raise _refused(f"{name!r} has no settings; remove {', '.join(map(repr, given))}")
        return name.lower()
    return settings.model_validate({**given, "name": name.lower()})


HooksEntry = Annotated[str | SerializeAsAny[PluginConfig], BeforeValidator(_of_hooks)]
"""A plugin with hooks: its name, or its settings if it has settings."""
TrackerEntry = Annotated[str | SerializeAsAny[PluginConfig], BeforeValidator(_of_tracker)]
"""A tracker: its name, or its settings if it is a plugin with settings."""
EngineEntry = Annotated[str | SerializeAsAny[PluginConfig], BeforeValidator(partial(_of_part, ENGINES))]
"""A generation engine: its name, or its settings if it has settings."""
ShardingEntry = Annotated[str | SerializeAsAny[PluginConfig], BeforeValidator(partial(_of_part, SHARDINGS))]
"""A way to divide the model: its name, or its settings if it has settings."""


def _entry(value: Any, *, tracker: bool) -> str | PluginConfig:
    """Return the name of a plugin, or its validated settings if it has settings.

    Names that no plugin has are returned unchanged for trackers: accelerate may know them.
    """
    given, name = _given(value)
    if why_disabled(name):  # a run does without it
        return _Unread(name=name, **given) if given else name
    if tracker and (name in ACCELERATE_TRACKERS or not (given or is_known(name))):
        if given:
            raise _refused("a tracker of accelerate has no settings; give its name alone")
        return name
    try:
        hooks = get_hooks(name)
    except RegistryError as error:
        raise _refused(str(error)) from error
    if tracker != (hooks is not None and hooks.tracker):
        is_one, place = ("no", "plugins") if tracker else ("a", "train.trackers")
        raise _refused(f"{name!r} is {is_one} tracker; name it in {place}")
    if hooks is None or hooks.settings is None:
        if given:
            raise _refused(f"{name!r} has no settings; remove {', '.join(map(repr, given))}")
        return name
    return hooks.settings.model_validate({**given, "name": name.lower()})


def _given(value: Any, what: str = "a plugin's name") -> tuple[Plain, str]:
    """Return the settings that an entry gives, without the name, and the name."""
    if isinstance(value, PluginConfig):
        value = value.model_dump()
    fields = dict(value) if isinstance(value, Mapping) else {"name": value}
    name = fields.pop("name", None)
    if not isinstance(name, str):
        raise _refused(f"should be {what}, or a mapping with its 'name' and settings")
    return fields, name


def _refused(reason: str) -> PydanticCustomError:
    return PydanticCustomError("plugin", "{reason}", {"reason": reason})


def _named_once(entries: list[str | PluginConfig]) -> list[str | PluginConfig]:
    """Return the entries without repetitions.

    Raises:
        ValueError: a plugin is named twice with different settings.
    """
    found: dict[str, str | PluginConfig] = {}
    for entry in entries:
        name = name_of(entry)
        if found.setdefault(name, entry) != entry and not isinstance(entry, str):
            raise ValueError(f"{name!r} is named twice with different settings; name it once")
    return list(found.values())


class ModelConfig(Section):
    """Which model is trained, its dtype, and which part of it is trained."""

    model_path: str | Plain | None = None
    """A hub id, a local directory, or the fields of a model config with its `model_type` (random weights). None: a
    live model is passed to `train`."""
    reference_path: str | Plain | None = None
    """The model that an algorithm with a reference compares with: a hub id, a local directory, or the fields of a model
    config (random weights), with the vocabulary of the trained model. None: the trained model as it is before the first
    update."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The type of the weights. For mixed precision keep float32 here and set `train.mixed_precision`."""
    num_layers_unfrozen: int = Field(-1, ge=-1)
    """Train only this many of the top layers, and what follows them. The embeddings and the layers below are frozen,
    run once per sequence, and shared with the reference. Of an encoder-decoder, the layers of the decoder are counted;
    the encoder is frozen. -1: train everything."""
    peft_config: Plain | None = None
    """Train an adapter instead of the weights: the fields of a peft config (`peft_type` is LORA by default), or a
    peft config object. Unless `reference_path` is set, the reference is the model without the adapter."""
    disable_dropout: bool = True
    """Disable dropout in the policy, so that old and new log-probabilities come from the same function. The reference
    never has dropout."""
    kwargs: Kwargs = {}
    """Passed to `from_pretrained` or `from_config`, e.g. `attn_implementation`, `revision`."""

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

    @field_validator("model_path", "reference_path", mode="before")
    @classmethod
    def _path_or_fields(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, str | Mapping):
            raise ValueError("should be a hub id or directory, the fields of a model config, or None")
        return value


class TokenizerConfig(Section):
    """Which tokenizer is used."""

    tokenizer_path: str | None = None
    """A hub id or local directory. None: the model's own, or the tokenizer object passed to `train`."""
    kwargs: Kwargs = {}
    """Passed to `AutoTokenizer.from_pretrained`, e.g. `eos_token`, `chat_template`."""


class DataConfig(Section):
    """How datasets are read."""

    ignore_columns: list[str] = []
    """Columns that are removed from all rows, as if the dataset did not have them. Reward functions, metric functions
    and environments do not get them either."""


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
    """The schedule after warm-up; it ends at the last step of the run."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the learning rate rises linearly from 0."""
    kwargs: Plain = {}
    """Further arguments of the schedule, e.g. `min_lr_rate`."""


class RolloutConfig(SamplingConfig):
    """How experience is collected."""

    num_rollouts: int = Field(128, ge=1)
    """Responses per collection, over all processes. Offline algorithms collect their whole dataset."""
    batch_size: int = Field(128, ge=1)
    """Rows that are sampled, scored and passed through the models at a time, per process."""
    engine: EngineEntry = "local"
    """What generates: `local`, which is trainkit's sampler on the trained model; `ray`; `vllm`; or another engine
    plugin. A name, or a mapping with the name and the engine's settings, e.g. `{name: ray, actors: 2}`."""
    staleness: int = Field(0, ge=0)
    """Collections by which the weights that sample are older than those that are trained. 0: every collection is
    sampled with the newest weights. With 1 or more, an engine that has its own copy of the weights samples while the
    policy is trained; the result does not depend on the engine."""
    correction: Literal["auto", "none", "sampler", "decoupled", "masked"] = "auto"
    """How the loss corrects for rollouts that were sampled with other weights, or by another engine: not at all; by the
    ratio to the sampler's probabilities; by truncated importance weights beside the ratio to the newest weights; or by
    weights that are 0 beyond `correction_cap`. `auto`: `none` with `staleness` 0 and trainkit's own sampler, otherwise
    `decoupled` if the algorithm supports it."""
    correction_level: Literal["token", "sequence"] = "token"
    """Whether importance weights are those of tokens or of whole responses."""
    correction_cap: float = Field(2.0, gt=1)
    """Largest importance weight; with `masked`, its reciprocal is the smallest."""
    overlong_prompts: Literal["error", "truncate", "drop"] = "error"
    """What to do with prompts that leave no room for `max_new_tokens`: raise an error, keep their end, or drop them."""
    skip_special_tokens: bool = True
    """Remove special tokens from the text that is passed to reward and metric functions."""
    max_refills: int = Field(10, ge=0)
    """With an algorithm that chooses what it trains on (`keep`): how often further prompts are sampled to fill a
    collection. If it is not full then, training goes on with what was kept."""
    max_turns: int = Field(8, ge=1)
    """With an environment: outputs per episode; one that has not ended by then is truncated."""
    max_episode_tokens: int | None = Field(None, ge=2)
    """With an environment: maximum length of an episode in tokens, prompt, outputs and observations together; longer
    ones are truncated. None: the model's context, or `train.seq_length`."""
    eval_kwargs: Plain = {}
    """Sampling settings that differ in evaluation, the algorithm's own included. One of them may be a list: an
    evaluation is run for each of its values, e.g. `{temperature: [0, 1]}`."""

    @field_validator("eval_kwargs")
    @classmethod
    def _sampling_settings(cls, value: Plain, info: ValidationInfo) -> Plain:
        swept = _swept(value)
        if len(swept) > 1:
            raise ValueError(f"one setting may be a list of values to sweep; given: {', '.join(swept)}")
        sampling: type[SamplingConfig] | None = (info.context or {}).get("sampling")
        for _, settings in sweep(value):
            known = {name: v for name, v in settings.items() if sampling or name in SamplingConfig.model_fields}
            (sampling or SamplingConfig).model_validate(known)  # `TRLConfig` checks those of the method
        if swept and not value[swept[0]]:
            raise ValueError(f"the list of values for {swept[0]} is empty; give at least one")
        return value


def sweep(eval_kwargs: Plain) -> list[tuple[str, Plain]]:
    """Return (suffix, settings) of each evaluation: one, or one per value of the setting that is a list (S-33)."""
    for name in _swept(eval_kwargs):
        return [(f"@{name}={value}", {**eval_kwargs, name: value}) for value in eval_kwargs[name]]
    return [("", eval_kwargs)]


def _swept(settings: Plain) -> list[str]:
    return [name for name, value in settings.items() if isinstance(value, list) and name != "stop_sequences"]


class EnvironmentConfig(Section):
    """How the methods of environments are called; only with an environment."""

    workers: int = Field(8, ge=1)
    """Episodes whose environments run at the same time, per process."""
    timeout: float = Field(60.0, gt=0)
    """Seconds that one call of an environment may take."""
    on_error: Literal["raise", "fail_episode"] = "raise"
    """What to do if `step` raises, takes too long or returns something invalid: end the run, or end the episode."""
    fail_reward: float = Field(0.0, allow_inf_nan=False)
    """Reward of the turn in which an episode failed, with `on_error: fail_episode`."""

    @model_validator(mode="after")
    def _fail_reward_has_an_effect(self) -> Self:
        if self.on_error == "raise" and self.fail_reward:
            raise ValueError("fail_reward has an effect only if on_error is 'fail_episode'; set on_error, or remove it")
        return self


class RewardFunctionConfig(Section):
    """How the reward function is called, and what its scores may be; only with a reward function."""

    timeout: float | None = Field(600.0, gt=0)
    """Seconds that one call may take. The function is then called in a thread of its own. None: no limit, and it is
    called in the thread that needs the scores, which is the main thread unless responses are sampled ahead."""
    retries: int = Field(0, ge=0)
    """How often a call is repeated that raised an exception of `retry_on`, after waits that grow from one second to one
    minute. 0: never."""
    retry_on: list[Annotated[str, Field(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*$")]] = ["ConnectionError", "TimeoutError"]
    """Exceptions after which a call is repeated: names of their classes or of base classes, with or without the module,
    e.g. `ConnectionError` or `requests.exceptions.HTTPError`. A call that exceeds `timeout` is not repeated."""
    on_nonfinite: Literal["error", "drop_row", "clip"] = "error"
    """What to do with scores that are NaN, infinite or out of the range of float32: end the run; do not train on the
    response, nor on the others to its prompt if these are compared; or set infinite ones to the largest and smallest
    finite score of the collection, while NaN still ends the run."""

    @model_validator(mode="after")
    def _retries_have_an_effect(self) -> Self:
        default = type(self).model_fields["retry_on"].default
        if not self.retries and self.retry_on != default:
            raise ValueError("retry_on has an effect only if retries is at least 1; set retries, or remove it")
        if self.retries and not self.retry_on:
            raise ValueError("retries has an effect only if retry_on names an exception; name one, or set retries to 0")
        return self


class TrainConfig(Section):
    """The training loop: its length, batch sizes, evaluation, checkpoints and logging."""

    seed: int = Field(1, ge=0)
    """Seed of everything random: weights, data order, sampling, dropout."""
    total_steps: int | None = Field(None, ge=0)
    """Optimizer steps after which the run ends; if `epochs` is set too, whichever is reached first ends it."""
    epochs: int | None = Field(None, ge=1)
    """Passes over the prompts or samples. None: as many as `total_steps` needs, or one if that is not set either."""
    batch_size: int = Field(32, ge=1)
    """Rows per optimizer step, over all processes."""
    microbatch_size: int | None = Field(None, ge=1)
    """Rows per forward and backward pass in one process; affects memory and speed. The gradient is the same up to
    rounding, unless dropout is on, which draws different masks. None: as many as make up 2,048 tokens on a CPU, 32,768
    tokens on an accelerator."""
    seq_length: int | None = Field(None, ge=2)
    """Maximum length of prompt and response together, in tokens; of an encoder-decoder, of each of the two, the
    decoder's start token included. None: the model's context length."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Maximum global norm to which gradients are clipped at every step. None: no clipping."""
    mixed_precision: Literal["no", "bf16", "fp16"] = "no"
    """Autocast of the forward pass, by accelerate."""
    sharding: ShardingEntry = "none"
    """How the model, its gradients and the optimizer's state are divided among processes. `none`: each has all of them.
    `fsdp2`: each has a part of every tensor, and blocks are gathered when they run. Or the name of a plugin, such as
    `zero2` or `zero3`, or a mapping with the name and its settings."""
    timeout: float = Field(1800.0, gt=0)
    """Seconds that processes wait for each other. A run of several processes in which one makes no progress for this
    long ends with an error, and each process writes the stacks of its threads."""
    eval_interval: int = Field(100, ge=0)
    """Steps between evaluations; there is one before the first step and one after the last, too. 0: none at all."""
    save_interval: int = Field(1000, ge=0)
    """Steps between checkpoints; there is one at the end, too. 0: none at all."""
    save_async: bool = False
    """Write checkpoints in a thread while the training goes on, from a copy of weights, optimizer and collection in the
    memory of the CPU. The last checkpoint is complete when the run ends."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """Whether the run ends if a checkpoint cannot be written, or goes on and tries again at the next interval. It ends
    in any case if it was asked to save by a signal and to end."""
    keep_checkpoints: int = Field(2, ge=1)
    """How many of the newest checkpoints are kept on disk."""
    save_best: bool = False
    """Export the model to `best/` whenever the evaluation's mean reward is the highest so far."""
    run_dir: str | None = None
    """Directory of the run. None: `runs/<method>-<date>-<time>`."""
    resume: str | None = None
    """`auto`: resume from the newest complete checkpoint in `run_dir`, if there is one. A path: resume
    from that checkpoint."""
    trackers: Annotated[list[TrackerEntry], Field(max_length=MOST), AfterValidator(_named_once)] = ["tensorboard"]
    """Where metrics are logged besides the console and `metrics.jsonl`: `tensorboard`, another accelerate tracker, or
    a plugin that is a tracker, by its name or by a mapping with its `name` and settings."""

    health: Literal["warn", "stop", "off"] = "warn"
    """What to do when the metrics show that training goes wrong: log it once, with what to do about it; also end the
    run after the step, as at a regular end; or nothing."""

    @field_validator("mixed_precision", "health", mode="before")
    @classmethod
    def _yaml_no(cls, value: Any, info: ValidationInfo) -> Any:
        # YAML 1.1 reads an unquoted no or off as false
        return {"mixed_precision": "no", "health": "off"}[str(info.field_name)] if value is False else value

    @model_validator(mode="after")
    def _resumable(self) -> Self:
        if self.resume == "auto" and self.run_dir is None:
            raise ValueError("resume 'auto' looks into run_dir, which is not set; set train.run_dir")
        return self


M = TypeVar("M", bound=MethodConfig)


class TRLConfig(Frozen, Generic[M]):
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
    plugins: Annotated[list[HooksEntry], Field(max_length=MOST), AfterValidator(_named_once)] = []
    """Installed plugins with hooks, besides that of `method`: names, or mappings with settings."""

    def __init__(self, /, **data: Any) -> None:
        data = guarded(data)
        context = {"sampling": _sampling_class(data.get("method"))}
        try:
            self.__pydantic_validator__.validate_python(copy.deepcopy(data), self_instance=self, context=context)
        except ValidationError as error:
            raise ConfigError(_explain(error, data)) from None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the unparametrised class: ``TRLConfig[M]`` cannot be looked up by its name."""
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
        for _, settings in sweep(self.rollout.eval_kwargs):  # for a section that was built without the method
            self.method.sampling.model_validate(settings)
        return self

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> Self:
        """Build a configuration from a plain dict."""
        if not isinstance(config, Mapping):
            raise ConfigError(f"a config is a mapping of sections; given {describe(config)}")
        return cls(**{str(key): value for key, value in config.items()})

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
        return cls.from_dict(read_yaml(Path(path)))

    def save_yaml(self, path: str | Path) -> None:
        """Write a YAML file, from which `load_yaml` restores an equal configuration, except for its secrets."""
        Path(path).write_text(str(self), encoding="utf-8")

    def evolve(self, **sections: Any) -> Self:
        """Return a copy with nested changes: ``config.evolve(train=dict(seed=2), method=dict(gamma=0.9))``.

        Naming another method replaces the whole section ``method``.
        """
        return type(self)(**_merge(self.to_dict(secrets=True), _named(sections)))

    def update(self, changes: Mapping[str, Any]) -> Self:
        """Return a copy changed by dotted path: ``config.update({"train.seed": 2, "optimizer.kwargs.eps": 1e-6})``.

        Every path must name an existing field; free-form fields such as ``kwargs`` accept new keys.
        """
        nested: Plain = {}
        for path, value in changes.items():
            parts = path.split(".")
            if len(parts) > DEPTH:
                raise ConfigError(f"given {describe(path)}; a setting has at most {DEPTH} parts")
            nested = _merge(nested, _named(_nest(parts, value)))
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
        given = self.to_dict(secrets=True)
        if not trust_remote_code and (named := list(code_settings(given))):
            raise ConfigError(
                f"{', '.join(named)} would run code that comes with a model, which a configuration alone cannot "
                "allow. If you trust that code, allow it with --trust-remote-code (trust_remote_code=True in Python); "
                "otherwise remove the setting"
            )
        plain, missing = filled(given, os.environ)
        if missing:
            raise ConfigError(f"{MASK!r} stands for a secret, and secrets are not saved:\n  " + "\n  ".join(missing))
        for part in ("model", "tokenizer") if trust_remote_code else ():
            plain[part]["kwargs"].setdefault(TRUST, True)
        return self if plain == given else self.from_dict(plain)

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


def _peft_fields(config: Any) -> Plain:
    """Return the fields of a peft config object that differ from its class's defaults, as plain data."""
    default = type(config)().to_dict()
    changed = {key: value for key, value in config.to_dict().items() if value != default.get(key)}
    plain: Plain = {"peft_type": str(getattr(config.peft_type, "value", config.peft_type))}
    for key, value in changed.items():
        plain[key] = sorted(value) if isinstance(value, set | frozenset) else getattr(value, "value", value)
    return plain


def _name_of(method: Any) -> str | None:
    name = method.get("name") if isinstance(method, Mapping) else getattr(method, "name", method)
    return name.lower() if isinstance(name, str) else None


def _frozen(part: Frozen, name: str, value: Any) -> str:
    """Return what to write instead of assigning ``value`` to a field."""
    sections = {field.annotation: key for key, field in TRLConfig.model_fields.items()}
    key = "method" if isinstance(part, MethodConfig) else sections.get(type(part))
    text = repr(hidden({name: value})[name])
    given = text if len(text) <= SHORT else "..."
    change = f"{name}={given}" if isinstance(part, TRLConfig) else f"{key}=dict({name}={given})" if key else "..."
    return (
        f"{type(part).__name__} is frozen, and {name!r} cannot be assigned. Make a changed copy: "
        f"config = config.evolve({change})"
    )


def _method_class(method: Any) -> type[MethodConfig] | None:
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


def _sampling_class(method: Any) -> type[SamplingConfig]:
    """Return the class of a method's sampling settings; `SamplingConfig` if the method is invalid or missing."""
    try:
        found = _method_class(method)
    except PydanticCustomError:  # reported by the validator of `method`
        return SamplingConfig
    return found.sampling if found else SamplingConfig


def _merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> Plain:
    """Merge ``changes`` into ``base``, mapping by mapping; a section given as an object replaces the old one."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        if isinstance(value, Mapping) and isinstance(old, Mapping) and not _renamed(key, old, value):
            merged[key] = _merge(old, value)
        else:
            merged[key] = value
    return merged


def _renamed(key: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return whether merging ``new`` into ``old`` would mix two plugins or model architectures."""
    tag = {
        "method": "name",
        "engine": "name",
        "sharding": "name",
        "model_path": "model_type",
        "reference_path": "model_type",
    }.get(key)
    return tag is not None and tag in old and tag in new and str(new[tag]).lower() != str(old[tag]).lower()


def _named(sections: Plain) -> Plain:
    """Return ``sections``, with a method given as a name replaced by ``{"name": name}``."""
    name = sections.get("method")
    return {**sections, "method": {"name": name}} if isinstance(name, str) else sections


def _nest(path: list[str], value: Any) -> Plain:
    return {path[0]: value if len(path) == 1 else _nest(path[1:], value)}


def _explain(error: ValidationError, data: Mapping[str, Any]) -> str:
    """Return one line for each of the first faults: key path, what was given and is allowed, the nearest valid name."""
    lines = []
    for fault in error.errors()[:SHOWN]:
        path = ".".join(_parts(fault["loc"], data)) or "config"
        given = describe(MASK if any(map(is_secret, fault["loc"])) else fault["input"])
        if fault["type"] == "extra_forbidden":
            known = _fields_at(fault["loc"][:-1], data)
            near = suggest(str(fault["loc"][-1]), known)
            lines.append(f"{path}: unknown field{near} (given {given}; known: {', '.join(known)})")
        elif fault["type"] == "missing":
            lines.append(f"{path}: required, not given")
        else:
            message = fault["msg"].removeprefix("Value error, ").removeprefix("Input ")
            lines.append(f"{path}: {message} (given {given})")
    count = error.error_count()
    lines = [line if len(line) <= WIDTH else f"{line[:WIDTH]}…" for line in lines]
    lines += [f"… and {count - SHOWN} more"] if count > SHOWN else []
    return f"{count} fault{'s' if count > 1 else ''} in the config:\n" + "\n".join(f"  {line}" for line in lines)


def _parts(loc: tuple[int | str, ...], data: Mapping[str, Any]) -> list[str]:
    """Return the parts of the path to a fault; the index of settings in a list is followed by the plugin's name."""
    parts, at = [str(part) for part in loc], _settings_at(loc)
    if at and len(loc) > at:
        parts[at - 1] += f" ({_plugin_at(loc[:at], data)})"
    return parts


def _settings_at(loc: tuple[int | str, ...]) -> int:
    """Return how many parts of the path lead to the entry of a plugin; 0 if it leads to none."""
    return next((len(place) + 1 for place in (("plugins",), ("train", "trackers")) if loc[: len(place)] == place), 0)


def _plugin_at(loc: tuple[int | str, ...], data: Any) -> str:
    for part in loc:
        data = data[part]
    return _given(data)[1]


def _fields_at(loc: tuple[int | str, ...], data: Mapping[str, Any]) -> list[str]:
    model: type[BaseModel] | None = TRLConfig
    if at := _settings_at(loc):
        hooks = get_hooks(_plugin_at(loc[:at], data))
        model, loc = hooks.settings if hooks else None, loc[at:]
    elif named := [part for part in PARTS if ".".join(map(str, loc[:2])) == part.key]:
        model, loc = get_part(named[0], _plugin_at(loc[:2], data)).settings, loc[2:]
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
