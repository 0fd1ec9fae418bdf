"""The main entry point, `trainkit.train`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.config import TRLConfig
from trainkit.config.places import PYTHON, Places
from trainkit.errors import ConfigError, TrainkitError, describe
from trainkit.plain import read_yaml, read_yaml_lines
from trainkit.plugins import BUILT_IN, available_trainers, get_method_class, get_trainer, is_registered

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
    from typing_extensions import TypeIs

    from trainkit.data import Prompts, Row
    from trainkit.rollouts import EnvironmentMaker, MetricFn, RewardFn
    from trainkit.trainer.accelerate import AccelerateRLTrainer
    from trainkit.trainer.loop import AcceleratedLoop
    from trainkit.trainer.optim import MakeOptimizer, MakeScheduler


def train(
    model_path: str | Mapping[str, Any] | PreTrainedConfig | PreTrainedModel | None = None,
    reward_fn: RewardFn | None = None,
    dataset: tuple[Iterable[Any], Iterable[float]] | None = None,
    samples: Iterable[Any] | None = None,
    rewards: Iterable[float] | None = None,
    prompts: Prompts | None = None,
    eval_prompts: Prompts | None = None,
    metric_fn: MetricFn | None = None,
    config: TRLConfig[Any] | Mapping[str, Any] | str | Path | None = None,
    stop_sequences: list[str] | None = None,
    logit_mask: Tensor | None = None,
    callbacks: Iterable[object] = (),
    *,
    method: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    eval_samples: Iterable[Any] | None = None,
    formatting_func: Callable[[Any], Any] | None = None,
    reference: str | Mapping[str, Any] | PreTrainedConfig | PreTrainedModel | None = None,
    allow_drift: bool = False,
    trust_remote_code: bool = False,
    environment: EnvironmentMaker | None = None,
    optimizer: Optimizer | MakeOptimizer | None = None,
    scheduler: LRScheduler | MakeScheduler | None = None,
) -> AccelerateRLTrainer[Any]:
    """Train a model, online with a reward function or an environment, or offline on samples, and return the trainer.

    The data arguments decide the kind of training. The algorithm in parentheses is used unless ``method`` or
    ``config`` names another:

    * ``reward_fn`` with ``prompts``: online reinforcement learning (``ppo``).
    * ``environment``, with or without ``prompts`` and ``reward_fn``: the same, in episodes of several turns.
    * ``prompts`` alone: algorithms that need no reward, such as distillation; name the ``method``.
    * ``samples`` with ``rewards``: offline reinforcement learning (``ilql``).
    * ``samples`` that are labelled true or false: Kahneman-Tversky optimisation (``kto``).
    * ``samples`` that are pairs of ``chosen`` and ``rejected``: preference optimisation (``dpo``).
    * other ``samples``: supervised fine-tuning (``sft``), or algorithms that also sample responses to their prompts;
      name the ``method``.

    Args:
        model_path: a hub id, a local directory, a transformers config or its fields (random weights), or a live
            model (with ``tokenizer``), which is trained in place. A live model may be a peft model or have a value
            head (`trainkit.models`). Overrides ``config.model.model_path``.
        reward_fn: ``reward_fn(samples, prompts, outputs, tokenizer, **columns)`` returns one finite number per sample,
            or for dense rewards one list of numbers per sample: a reward for each response token, starting at the
            first; the list may be shorter than the response. ``samples``, ``prompts`` and ``outputs`` are lists of
            text; ``columns`` are the other keys of the prompts, each as a list.
        dataset: ``(samples, rewards)``. Deprecated: pass ``samples`` and ``rewards``.
        samples: text, ``(prompt, output)`` turns, lists of messages, or dicts of a dataset format (docs/data.md):
            ``text``, ``messages``, ``prompt`` and ``completion`` or ``output``; pairs are dicts with ``prompt``,
            ``chosen`` and ``rejected``. A list, a `datasets.Dataset` or any finite iterator. An iterable that has no
            length and can be iterated over repeatedly, such as a `datasets.IterableDataset`, is a stream: it is read
            during training.
        rewards: one number per sample.
        prompts: strings, lists of messages, or dicts with one of these under ``prompt`` and further columns; a list, a
            `datasets.Dataset` or any finite iterable. In online training without prompts, every response starts from
            the tokenizer's BOS token.
        eval_prompts: prompts for which evaluations generate responses. Online training defaults to the first of
            ``prompts``; offline training generates nothing without them.
        metric_fn: ``metric_fn(samples, prompts, outputs, **columns)`` returns a dict of numbers, or of lists with one
            number per sample; called at evaluations.
        config: the configuration, a mapping of its sections, or the path of a YAML file.
        stop_sequences: strings that end a response; the text passed to the reward function ends before them.
        logit_mask: bool [V], or [V, V] with a row per previous token; True = allowed (in trlX True = forbidden).
        callbacks: objects with methods marked by `trainkit.hookimpl`, which are called during the run.
        method: the algorithm, if ``config`` does not name it.
        tokenizer: a tokenizer object, used instead of the model's own.
        eval_samples: held-out samples of the same form as ``samples``, on which evaluations measure the loss;
            ``(samples, rewards)`` if the method needs rewards.
        formatting_func: converts each row of ``samples`` and ``eval_samples`` into a sample.
        environment: called with a row of ``prompts``, makes the environment of an episode
            (`trainkit.rollouts.Environment`), which answers the model's outputs and pays rewards; those of
            ``reward_fn`` are added. Without ``prompts`` the environment gives the prompts too.
        optimizer: an optimizer of torch over the model's trained parameters, or a function that makes one of a list of
            them, instead of ``config.optimizer``.
        scheduler: a learning-rate schedule of torch, or a function that makes one of the optimizer, instead of
            ``config.scheduler``. It is stepped once per optimizer step.
        reference: the model that an algorithm with a reference compares with, instead of the model before the first
            update: as ``model_path``; a live model is frozen in place. Overrides ``config.model.reference_path``.
        allow_drift: with ``train.resume``, resume even if settings have changed that affect the course of training.
            The new settings apply from then on, and the changes are logged.
        trust_remote_code: whether Python code that comes with the model, its reference or its tokenizer may run. No
            configuration can allow it: without this argument, ``trust_remote_code`` in ``model.kwargs`` is an error.

    Returns:
        The trainer, after training; it has ``trainer.generate(prompts)``, ``trainer.evaluate()`` and
        ``trainer.save_pretrained(directory)``.

    Raises:
        ConfigError: the arguments contradict each other, or the configuration is invalid.
        RegistryError: the algorithm is not installed; the message says what to install.
        DataError: the prompts, the samples or the tokenizer cannot be used; raised before the model is loaded.
        RewardError: the reward function raised an exception, or returned an invalid value.
    """
    if dataset is not None:
        samples, rewards = _unpack_dataset(dataset, samples, rewards)
    if samples is not None:
        from trainkit.data import formatted

        samples = formatted(samples, formatting_func)
    arguments = {
        "reward_fn": reward_fn,
        "environment": environment,
        "prompts": prompts,
        "samples": samples,
        "rewards": rewards,
    }
    present = [name for name, value in arguments.items() if value is not None]
    if environment is not None:
        _check_plays(_named_method(config, method) or "ppo")
    _check_combination(present, _named_method(config, method))
    if not isinstance(callbacks, Iterable):
        raise ConfigError(f"callbacks should be a list of objects; given {describe(callbacks)}. Write [callback]")
    models = {"model_path": model_path, "reference_path": reference}
    settled = _settle_config(config, method, models, lambda: usual_method(present, samples, config))
    trainer_class: type[AccelerateRLTrainer[Any]] = get_trainer(settled.method.name)
    _check_inputs(settled, trainer_class, present, samples)
    if metric_fn is not None and "prompts" not in trainer_class.inputs and eval_prompts is None:
        raise ConfigError("metric_fn is called at evaluations, which have no prompts; give eval_prompts too")
    # trainers of other models than language models take neither of the first two
    extra: dict[str, Any] = {"tokenizer": tokenizer, "environment": environment}
    extra = {name: value for name, value in extra.items() if value is not None}
    extra |= {name: value for name, value in (("optimizer", optimizer), ("scheduler", scheduler)) if value is not None}
    extra |= {"trust_remote_code": True} if trust_remote_code else {}
    trainer = trainer_class(
        settled,
        model=model_path if _is_model(model_path) else None,
        reference=reference if _is_model(reference) else None,
        **extra,
        reward_fn=reward_fn,
        metric_fn=metric_fn,
        logit_mask=logit_mask,
        stop_sequences=stop_sequences,
        callbacks=callbacks,
        allow_drift=allow_drift,
    )
    if samples is not None:
        trainer.add_samples(samples, rewards)
        rows = [{"prompt": row["prompt"]} for row in getattr(trainer.pipeline, "rows", ()) if trainer.online]
    else:
        rows = _add_prompts(trainer, prompts, played=environment is not None)
    if eval_prompts is None and rows:
        eval_prompts = rows[: _prompts_of_a_step(trainer)]
    if eval_prompts is not None:
        trainer.add_eval_pipeline(eval_prompts)
    if eval_samples is not None:
        trainer.add_eval_samples(*_eval_samples(eval_samples, trainer, formatting_func))
    trainer.learn()
    return trainer


def _add_prompts(trainer: AcceleratedLoop[Any], prompts: Prompts | None, *, played: bool) -> list[Row]:
    """Set the prompts to train on, and return them as rows; ``played``: an environment may give the prompts."""
    from trainkit.data import prompt_rows
    from trainkit.data.columns import without

    source = trainer.default_prompts() if prompts is None else without(prompts, trainer.config.data.ignore_columns)
    rows = prompt_rows(source, needed=not played)
    trainer.add_prompt_pipeline(rows)
    return rows


def _prompts_of_a_step(trainer: AcceleratedLoop[Any]) -> int:
    """Return how many prompts give one step's worth of responses, at one response per prompt."""
    config = trainer.config
    return max(config.train.batch_size * config.rollout.num_rollouts // trainer.experience_rows, 1)


def _eval_samples(
    eval_samples: Any, trainer: AcceleratedLoop[Any], formatting_func: Callable[[Any], Any] | None
) -> tuple[Any, Any]:
    from trainkit.data import are_rated, formatted

    rated = bool({"rewards", "labels"} & {*trainer.inputs})
    if rated and isinstance(eval_samples, tuple) and len(eval_samples) == 2:
        return formatted(eval_samples[0], formatting_func), eval_samples[1]
    samples = formatted(eval_samples, formatting_func)
    if rated and not are_rated(samples, trainer.config.data.ignore_columns):
        raise ConfigError(f"eval_samples should be (samples, rewards); given {describe(eval_samples)}")
    return samples, None


def _unpack_dataset(dataset: Any, samples: Any, rewards: Any) -> tuple[Any, Any]:
    if samples is not None or rewards is not None:
        raise ConfigError(
            "dataset and samples/rewards are both given; dataset is (samples, rewards): give one or the other"
        )
    if not isinstance(dataset, tuple | list) or len(dataset) != 2:
        raise ConfigError(f"dataset should be (samples, rewards); given {describe(dataset)}")
    warnings.warn("dataset=(samples, rewards) is deprecated; give samples= and rewards=", FutureWarning, stacklevel=3)
    return dataset[0], dataset[1]


def _check_combination(present: list[str], name: str | None) -> None:
    both = {"samples", "prompts"} <= {*get_trainer(name).inputs} if name and "samples" in present else False
    for one, other, why in (
        ("reward_fn", "samples", "reward_fn scores responses that are sampled, samples are trained on directly"),
        ("reward_fn", "rewards", "reward_fn scores responses that are sampled, rewards belong to samples"),
        ("environment", "samples", "an environment answers what is sampled, samples are trained on directly"),
        ("prompts", "samples", "prompts are for reward_fn; to evaluate while training on samples give eval_prompts"),
    ):
        if one in present and other in present and not (both and one == "reward_fn"):
            raise ConfigError(f"{one} and {other} are both given, and one would be ignored: {why}. Give one of the two")
    if "rewards" in present and "samples" not in present:
        raise ConfigError("rewards are given without samples; give the samples they belong to")
    if not present:
        raise ConfigError(
            "there is nothing to learn from; give reward_fn with prompts, an environment, samples with rewards, or "
            "samples"
        )


def _settle_config(
    config: TRLConfig[Any] | Mapping[str, Any] | str | Path | None,
    method: str | None,
    models: Mapping[str, Any],
    usual: Callable[[], str],
) -> TRLConfig[Any]:
    """Return the configuration with the method and models that the arguments name; ``usual()`` is the default method.

    ``models`` holds what is given for ``model.model_path`` and ``model.reference_path``.
    """
    fields, places = _config_sections(config), _config_places(config)
    section = fields.get("method")
    name = _named_method(config, method) or usual()
    get_method_class(name)  # raises at once if the algorithm is not installed
    fields["method"] = name if section is None or isinstance(section, str) else {**_as_dict(section), "name": name}
    for key, given in models.items():
        model = _as_dict(fields.get("model"))
        if _is_model(given) and model.get(key) is not None:
            what = "model" if key == "model_path" else "reference"
            raise ConfigError(f"a live {what} is given, and model.{key} is {model[key]!r}; give one of the two")
        if given is not None and not _is_model(given):
            path = given if isinstance(given, str) else _config_fields(given, key)
            fields["model"] = {**model, key: path}
            places = {**places, ("model", key): PYTHON}
    return TRLConfig.from_dict(fields, places or None)


def _named_method(config: Any, method: Any) -> str | None:
    """Return the method that the argument or the configuration names; None if neither does."""
    section = _config_sections(config).get("method")
    named = section if isinstance(section, str) else _as_dict(section).get("name")
    for source in (method, named):
        if source is not None and not isinstance(source, str):
            raise ConfigError(f"method should be a string; given {describe(source)}")
    if method and named and method.lower() != named.lower():
        raise ConfigError(f"method is {method!r} and the config's method is {named!r}; give one of the two")
    name: str | None = method or named
    return name


def _check_plays(name: str) -> None:
    """Raise a `ConfigError` unless the method can learn from an environment; it names those that can."""
    trainer_class = get_trainer(name)
    if _plays(trainer_class):
        return
    data, offline = " and ".join(trainer_class.inputs), "samples" in trainer_class.inputs
    raise ConfigError(
        f"method {name!r} learns from {data} and cannot use an environment. Remove environment"
        f"{' and give samples' if offline else ''}, or use a method that can: {', '.join(_playing_methods())}"
    )


def _playing_methods() -> list[str]:
    """Return the methods that can use an environment, of those that are imported or trainkit's own.

    Others are not imported, because the run does not name them.
    """
    methods = []
    for name in available_trainers():
        try:
            if (name in BUILT_IN or is_registered(name)) and _plays(get_trainer(name)):
                methods.append(name)
        except TrainkitError:  # it cannot be used, so it is not recommended
            continue
    return methods


def _plays(trainer_class: type[Any]) -> bool:
    """Return whether trainers of the class learn from rewards of text that they sample."""
    from trainkit.trainer.accelerate import AccelerateRLTrainer

    inputs = {*trainer_class.inputs}
    return issubclass(trainer_class, AccelerateRLTrainer) and bool({"reward_fn", "environment"} & inputs)


def usual_method(present: list[str], samples: Any, config: Any) -> str:
    """Return the algorithm that is used for the given data if neither the argument nor ``config`` names one."""
    if {"reward_fn", "environment"} & {*present}:
        return "ppo"
    if "prompts" in present:
        raise ConfigError(
            "prompts are given without reward_fn; give a reward_fn or an environment, samples to learn from, or a "
            "method that learns from prompts alone"
        )
    if "rewards" in present:
        return "ilql"
    from trainkit.data import first_format

    ignored = _as_dict(_config_sections(config).get("data")).get("ignore_columns")
    form = first_format(samples, ignored if isinstance(ignored, list | tuple) else ())  # it is validated later
    pairs = dict.fromkeys(("preference", "implicit preference", "tokenised preference"), "dpo")
    return {**pairs, "unpaired preference": "kto"}.get(form or "", "sft")


def _config_sections(config: Any) -> dict[str, Any]:
    """Return the sections of a configuration, of a mapping of sections, or of a YAML file."""
    if isinstance(config, str | Path):
        return read_yaml(Path(config))
    if isinstance(config, TRLConfig):
        return config.to_dict(secrets=True)
    if config is None or isinstance(config, Mapping):
        return dict(config or {})
    raise ConfigError(f"config should be a TRLConfig, a mapping of sections or a YAML file; given {describe(config)}")


def _config_places(config: Any) -> Places:
    """Return where the values of a configuration come from; nothing for a mapping."""
    if isinstance(config, str | Path):
        return {key: f"{config}:{line}" for key, line in read_yaml_lines(Path(config))[1].items()}
    return config.places if isinstance(config, TRLConfig) else {}


def _as_dict(section: Any) -> dict[str, Any]:
    """Return a section, given as a mapping or as an object, as a dict; an empty dict for None."""
    if section is None:
        return {}
    if isinstance(section, Mapping):
        return dict(section)
    if hasattr(section, "model_dump"):
        return dict(section.model_dump())
    raise ConfigError(f"a section of the config is a mapping; given {describe(section)}")


def _config_fields(source: Any, key: str) -> dict[str, Any]:
    """Return the fields of a transformers config as plain data; ``key`` is the setting that it is for."""
    if isinstance(source, Mapping):
        return dict(source)
    if hasattr(source, "to_diff_dict"):
        fields: dict[str, Any] = source.to_diff_dict()
        fields.pop("transformers_version", None)
        return {**fields, "model_type": source.model_type}
    argument = "model_path" if key == "model_path" else "reference"
    raise ConfigError(
        f"{argument} should be a hub id, a directory, a PreTrainedConfig, its fields, or a PreTrainedModel; "
        f"given {describe(source)}"
    )


def _is_model(value: Any) -> TypeIs[PreTrainedModel]:
    """Return whether ``value`` is a live model: a module, or a pipeline of several modules."""
    return hasattr(value, "config") and (hasattr(value, "parameters") or hasattr(value, "components"))


def _check_inputs(
    config: TRLConfig[Any], trainer_class: type[AcceleratedLoop[Any]], present: list[str], samples: Any
) -> None:
    """Raise a `ConfigError` unless the data are those that the method learns from."""
    from trainkit.data import are_rated

    method, ignored = config.method, config.data.ignore_columns
    inputs = trainer_class.inputs_for(method)
    varies = sum("inputs_for" in vars(base) for base in trainer_class.__mro__) > 1  # the class overrides it
    rated = {"rewards", "labels"} & {*inputs}
    met = {"prompts", "pairs", *present}  # prompts have a default; read_samples checks that samples are pairs
    met |= {"reward_fn"} if "environment" in present and "reward_fn" in inputs else set()
    if rated and ("rewards" in present or are_rated(samples, ignored)):
        met |= rated
    accepted = {*inputs, *(("reward_fn", "environment") if {"reward_fn", "environment"} & {*inputs} else ())}
    accepted |= {"rewards"} if rated else set()
    missing = [i for i in inputs if i not in met]
    unused = [p for p in present if p not in accepted]
    if missing or unused:
        who = f"method {method.name!r}{' with these settings' if varies else ''}"
        change = "Add " + " and ".join(missing) if missing else "Remove " + " and ".join(unused)
        raise ConfigError(
            f"{who} learns from {' and '.join(inputs)}; given {' and '.join(present)}. {change}, "
            f"{'change the settings, ' if varies else ''}or name another method"
        )
