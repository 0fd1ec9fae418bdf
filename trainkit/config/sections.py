"""The sections of the configuration, except for the algorithm's own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from trainkit.config.arguments import check_adapter, check_optimizer, check_schedule, present_arguments
from trainkit.config.base import EvalMetric, Plain, SamplingConfig, Section
from trainkit.config.entries import MOST, EngineEntry, ShardingEntry, TrackerEntry, named_once
from trainkit.security import HUB_TOKENS, MASK


def one_token(kwargs: Mapping[str, Any]) -> Plain:
    """Return arguments of `from_pretrained` with the token of the hub under its present name, ``token``.

    A tokenizer would take ``hf_token`` for one of its special tokens, and save it.
    """
    tokens = {name: kwargs[name] for name in HUB_TOKENS if name in kwargs}
    real = {name: token for name, token in tokens.items() if token != MASK} or tokens
    if len(real) > 1:
        raise ValueError(f"{' and '.join(real)} are given, which are one setting; give token alone")
    rest = {name: value for name, value in kwargs.items() if name not in tokens}
    for token in real.values():
        if not all("!" <= character <= "~" for character in str(token)):
            raise ValueError("the token has a space, a line break or another character that no token has; copy it")
        rest["token"] = token
    return rest


Kwargs = Annotated[Plain, AfterValidator(one_token)]
"""Arguments of `from_pretrained`."""


def _path(value: str) -> str:
    """Return a path or hub id. Nothing in it is expanded."""
    if not value or value != value.strip():
        raise ValueError("should be a path or hub id without spaces around it; null is none")
    if re.match(r"~|\$\w", value):
        raise ValueError("~ and $NAME are not expanded; write the whole path, or ${HOME} and ${NAME} in a file")
    if address := re.match(r"https?://[^/]+/([\w.-]+(/[\w.-]+)?)", value):
        raise ValueError(f"is an address; write the hub id alone: {address[1]}")
    return value


PathText = Annotated[str, AfterValidator(_path)]
"""A path, or the id of a repository on the hub."""


def with_own_dtype(section: Any) -> Any:
    """Return a section ``model`` with the dtype among its ``kwargs``, by its old name or the new one, in its own field.

    Raises:
        ValueError: the section has another one.
    """
    if not isinstance(section, Mapping) or not isinstance(section.get("kwargs"), Mapping):
        return section
    rest = {name: value for name, value in section["kwargs"].items() if name not in ("dtype", "torch_dtype")}
    moved = [value for name, value in section["kwargs"].items() if name not in rest and value is not None]
    names = {
        str(value).removeprefix("torch.") for value in [*moved, *([section["dtype"]] if "dtype" in section else [])]
    }
    if moved and len(names) > 1:
        raise ValueError(f"{' and '.join(sorted(names))} are given as dtype and in kwargs; give model.dtype alone")
    return {**section, "kwargs": rest, **({"dtype": names.pop()} if moved else {})}


class ModelConfig(Section):
    """Which model is trained, its dtype, and which part of it is trained."""

    model_path: str | Plain | None = None
    """A hub id, a local directory, or the fields of a model config with its `model_type` (random weights). None: a
    live model is passed to `train`."""
    reference_path: str | Plain | None = None
    """The model that an algorithm with a reference compares with: a hub id, a local directory, or the fields of a model
    config (random weights), with the vocabulary of the trained model. None: the trained model as it is before the first
    update."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The type of the weights. Trained weights of lower precision have float32 copies in the optimizer. None: bfloat16
    where `train.mixed_precision` is not set either and is `bf16` by default, and the optimizer makes such copies;
    float32 for everything else, such as an adapter and its base, whose weights are stored as in their checkpoint."""
    num_layers_unfrozen: int = Field(-1, ge=-1)
    """Train only this many of the top layers, and what follows them. The embeddings and the layers below are frozen,
    run once per sequence, and shared with the reference. Of an encoder-decoder, the layers of the decoder are counted;
    the encoder is frozen. -1: train everything."""
    freeze_vision: bool = False
    """Freeze the part of the model that reads images. What projects its output into the language model is trained."""
    peft_config: Plain | None = None
    """Train an adapter instead of the weights: the fields of a peft config (`peft_type` is LORA by default), or a
    peft config object. Unless `reference_path` is set, the reference is the model without the adapter. PROMPT_TUNING,
    PREFIX_TUNING and P_TUNING train virtual tokens; the reference has these as they were before the first update."""
    disable_dropout: bool = True
    """Disable dropout in the policy, so that old and new log-probabilities come from the same function. The reference
    never has dropout."""
    kwargs: Kwargs = {}
    """Passed to `from_pretrained` or `from_config`, e.g. `attn_implementation`, `revision`. A `dtype` or `torch_dtype`
    among them is that of the section."""

    @field_validator("kwargs")
    @classmethod
    def _of_today(cls, value: Plain) -> Plain:
        return present_arguments(value)

    @model_validator(mode="before")
    @classmethod
    def _one_dtype(cls, data: Any) -> Any:
        return with_own_dtype(data)

    @field_validator("peft_config", mode="before")
    @classmethod
    def _peft_fields(cls, value: Any) -> Any:
        if hasattr(value, "peft_type") and hasattr(value, "to_dict"):
            return _peft_fields(value)
        return _plain(value) if isinstance(value, Mapping) else value

    @field_validator("peft_config")
    @classmethod
    def _known_adapter(cls, value: Plain | None) -> Plain | None:
        if value is not None:
            check_adapter(value)
            if isinstance(rank := value.get("r"), int) and rank < 1:
                raise ValueError(f"r is {rank}, the rank of the adapter; give 1 or more")
        return value

    @model_validator(mode="after")
    def _one_way_of_freezing(self) -> Self:
        if self.peft_config is not None and self.num_layers_unfrozen >= 0:
            raise ValueError(
                "peft_config freezes the whole model below its adapter, and num_layers_unfrozen asks for trained "
                "layers; give one of the two (peft's layers_to_transform puts adapters on some layers only)"
            )
        if self.peft_config is not None and self.freeze_vision:
            raise ValueError(
                "peft_config freezes the whole model below its adapter, and freeze_vision a part of it; give "
                "target_modules that name the modules with adapters, such as '.*language_model.*(q|v)_proj'"
            )
        return self

    @field_validator("model_path", "reference_path", mode="before")
    @classmethod
    def _path_or_fields(cls, value: Any) -> Any:
        if value is not None and not isinstance(value, str | Mapping):
            raise ValueError("should be a hub id or directory, the fields of a model config, or None")
        if isinstance(value, Mapping) and "model_type" not in value:
            raise ValueError("the fields of a model config need model_type, such as gpt2 or llama; add it")
        return _path(value) if isinstance(value, str) else value


class TokenizerConfig(Section):
    """Which tokenizer is used."""

    tokenizer_path: PathText | None = None
    """A hub id or local directory. None: the model's own, or the tokenizer object passed to `train`."""
    chat_template: PathText | None = None
    """The chat template of conversations: the name of one that trainkit has, which marks what is trained on (`chatml`,
    `llama3`, `qwen3`, ...), or a file with a Jinja template. None: the tokenizer's own."""
    kwargs: Kwargs = {}
    """Passed to `AutoTokenizer.from_pretrained`, e.g. `eos_token`."""

    @model_validator(mode="after")
    def _one_template(self) -> Self:
        if self.chat_template is not None and "chat_template" in self.kwargs:
            raise ValueError(
                "tokenizer.chat_template and tokenizer.kwargs.chat_template are given; give one of the two"
            )
        return self


class DataConfig(Section):
    """How datasets are read."""

    ignore_columns: list[str] = []
    """Columns that are removed from all rows, as if the dataset did not have them. Reward functions, metric functions
    and environments do not get them either."""
    image_urls: bool = False
    """Whether images that rows give by an address are fetched. If not, they are an error."""


class ParameterGroup(Section):
    """Settings of the trained parameters whose names match."""

    match: str = Field(min_length=1)
    """A regular expression, which is looked for in the names of parameters: `value_head`, `lora_B`, `\\.bias$`."""
    lr: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Peak learning rate. None: `optimizer.lr`."""
    weight_decay: float | None = Field(None, ge=0)
    """Weight decay. None: `optimizer.weight_decay`."""

    @field_validator("match")
    @classmethod
    def _is_an_expression(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"it is no regular expression: {error}") from error
        return value


class OptimizerConfig(Section):
    """The optimizer, from `torch.optim`. One of another library is passed to `trainkit.train` as an object."""

    name: Literal[
        "adamw", "adam", "sgd", "adafactor", "adagrad", "adadelta", "adamax", "asgd", "nadam", "radam", "rmsprop"
    ] = "adamw"
    """The optimizer, by its class in small letters."""
    lr: float = Field(1e-5, gt=0, allow_inf_nan=False)
    """Peak learning rate."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay."""
    groups: list[ParameterGroup] = []
    """Other rates or decays for some parameters, by their names; a parameter is in the first group that it matches."""
    kwargs: Plain = {}
    """Further arguments of the optimizer, e.g. `betas`, `eps`, `momentum`."""

    @field_validator("kwargs")
    @classmethod
    def _taken_arguments(cls, value: Plain, info: ValidationInfo) -> Plain:
        if taken := {"lr", "weight_decay"} & value.keys():
            raise ValueError(f"{', '.join(sorted(taken))} has a field of its own in this section; set it there")
        if name := info.data.get("name"):
            check_optimizer(name, value)
        return value


class SchedulerConfig(Section):
    """The learning-rate schedule, from `transformers.get_scheduler` or `torch.optim.lr_scheduler`."""

    name: Literal[
        "constant",
        "linear",
        "cosine",
        "cosine_with_restarts",
        "cosine_with_min_lr",
        "polynomial",
        "inverse_sqrt",
        "warmup_stable_decay",
        "ConstantLR",
        "CosineAnnealingLR",
        "CosineAnnealingWarmRestarts",
        "ExponentialLR",
        "LinearLR",
        "MultiStepLR",
        "PolynomialLR",
        "StepLR",
    ] = "constant"
    """The schedule after warm-up. Those in small letters are transformers', and end at the last step of the run; the
    others are classes of torch, whose lengths are arguments."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the learning rate rises linearly from 0."""
    kwargs: Plain = {}
    """Further arguments of the schedule, e.g. `min_lr_rate`."""

    @field_validator("kwargs")
    @classmethod
    def _taken_arguments(cls, value: Plain, info: ValidationInfo) -> Plain:
        if name := info.data.get("name"):
            check_schedule(name, value)
        return value

    @model_validator(mode="after")
    def _needed_arguments(self) -> Self:
        if self.name == "cosine_with_min_lr" and not {"min_lr", "min_lr_rate"} & self.kwargs.keys():
            raise ValueError("cosine_with_min_lr needs kwargs: {min_lr: ...} or {min_lr_rate: ...}; add one")
        needed = {"warmup_stable_decay": "num_decay_steps", "StepLR": "step_size", "MultiStepLR": "milestones"}
        needed |= {"ExponentialLR": "gamma", "CosineAnnealingLR": "T_max", "CosineAnnealingWarmRestarts": "T_0"}
        if (lacking := needed.get(self.name)) and lacking not in self.kwargs:
            raise ValueError(f"{self.name} needs kwargs: {{{lacking}: ...}}; add it")
        return self


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
    overlong_prompts: Literal["error", "truncate", "truncate_right", "drop"] = "error"
    """What to do with prompts that leave no room for `max_new_tokens`: raise an error, keep their end or, with
    `truncate_right`, their beginning, or drop them."""
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
            accepted = {name: v for name, v in settings.items() if sampling or name in SamplingConfig.model_fields}
            lengths = {name: info.data[name] for name in ("max_new_tokens", "min_new_tokens") if name in info.data}
            (sampling or SamplingConfig).model_validate(lengths | accepted)  # `TRLConfig` checks those of the method
        if swept and not value[swept[0]]:
            raise ValueError(f"the list of values for {swept[0]} is empty; give at least one")
        return value


def sweep(eval_kwargs: Plain) -> list[tuple[str, Plain]]:
    """Return (suffix, settings) of each evaluation: one, or one per value of the setting that is a list."""
    for name in _swept(eval_kwargs):
        return [(f"@{name}={value}", {**eval_kwargs, name: value}) for value in eval_kwargs[name]]
    return [("", eval_kwargs)]


def _swept(settings: Plain) -> list[str]:
    return [name for name, value in settings.items() if isinstance(value, list) and not name.startswith("stop_")]


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


class Best(Section):
    """What the best evaluation is."""

    metric: EvalMetric
    """The metric of evaluations, as it is logged, such as `eval/loss/total`."""
    mode: Literal["max", "min"]
    """Whether higher (`max`) or lower (`min`) values are better."""


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
    microbatch_size: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """Rows per forward and backward pass in one process; affects memory and speed. The gradient is the same up to
    rounding, unless dropout is on, which draws different masks. None: as many as make up 2,048 tokens on a CPU, 32,768
    tokens on an accelerator, fewer where the memory of a CUDA device does not suffice. `auto`: no more of these than
    fit into memory; when a pass does not fit, the step is made again with half as many rows. It needs a model that is
    not divided among processes. None is `auto` on one GPU."""
    gradient_checkpointing: bool | Literal["mlp"] = False
    """Keep only the inputs of the trained layers for the backward pass, and compute their activations again in it. A
    step takes less memory and about a third more arithmetic. The gradient is the same. `mlp`: only the inputs of their
    MLPs, which leaves two to three fifths of the activations for about a fifth more arithmetic."""
    share_prompts: bool | None = None
    """Whether the model runs a prompt once for all rows of a micro-batch that have it, such as the responses of a group
    or the two sides of a pair. Results are the same up to rounding. None: where the model allows it and it saves work.
    """
    padding_free: bool | None = None
    """Whether the model runs the tokens of all rows of a micro-batch as one row without padding, in which each row
    attends to itself alone. Results are the same up to rounding. None: on CUDA in 16 bits, where the model allows it;
    true: on any device, and an error where the model does not allow it."""
    seq_length: int | None = Field(None, ge=2)
    """Maximum length of prompt and response together, in tokens; of an encoder-decoder, of each of the two, the
    decoder's start token included. None: the model's context length."""
    max_grad_norm: float | None = Field(1.0, gt=0)
    """Maximum global norm to which gradients are clipped at every step. None: no clipping."""
    mixed_precision: Literal["no", "bf16", "fp16"] | None = None
    """Autocast of the forward pass, by accelerate. None: `bf16` on an NVIDIA GPU that has products of it, else `no`."""
    compile: bool = False
    """Compile each block of the model (`torch.compile`), for any length, to save time on a GPU, where it has not been
    measured yet. The first steps take longer. Results are the same up to rounding. It is an error where the model does
    not allow it, or gives other numbers then."""
    deterministic: bool = False
    """Use kernels that give the same bits in every run (`torch.use_deterministic_algorithms`), which are slower on a
    GPU; an operation that has none is an error. It holds for the whole process."""
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
    save_best: bool | Best = False
    """Export the model to `best/` whenever an evaluation is the best so far: `true` compares mean rewards. Another
    metric is given with its mode: `{metric: eval/loss/total, mode: min}`."""
    verify_export: bool | None = None
    """Load each export, and compare its outputs on a short text with those of the trained model. If they differ, the
    run ends with an error, and its state is saved in a checkpoint. None: if the weights have at most 4 GB. Models that
    `sharding` divides are not compared."""
    push_to_hub: str | None = Field(None, pattern=r"^[\w.-]+/[\w.-]+$")
    """The id of a repository on the hub, `owner/name`, where the exported model is published when the run ends, with
    its card, configuration and metrics. A new repository is private. Needs a token: `hf auth login` or `HF_TOKEN`."""
    run_dir: PathText | None = None
    """Directory of the run. None: `runs/<method>-<date>-<time>`."""
    resume: PathText | None = None
    """`auto`: resume from the newest complete checkpoint in `run_dir`, if there is one. A path: resume
    from that checkpoint."""
    trackers: Annotated[list[TrackerEntry], Field(max_length=MOST), AfterValidator(named_once)] = ["tensorboard"]
    """Where metrics are logged besides the console and `metrics.jsonl`: `tensorboard`, another accelerate tracker, or
    a plugin that is a tracker, by its name or by a mapping with its `name` and settings, such as `{name: wandb,
    project: x}`."""

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


def _peft_fields(config: Any) -> Plain:
    """Return the fields of a peft config object that differ from its class's defaults, as plain data."""
    default = type(config)().to_dict()
    changed = {key: value for key, value in config.to_dict().items() if value != default.get(key)}
    return _plain({"peft_type": config.peft_type, **changed})


def _plain(fields: Mapping[str, Any]) -> Plain:
    """Return the fields of a peft config as plain data: lists for sets, and the values of enumerations."""
    return {
        key: sorted(value) if isinstance(value, set | frozenset) else getattr(value, "value", value)
        for key, value in fields.items()
    }
