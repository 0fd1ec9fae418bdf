"""What the trainers of TRL that learn from samples have in common: `transformers.Trainer`, as scripts know it."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, TrainerState, TrainingArguments
from transformers.trainer_utils import TrainOutput

import trainkit
from trainkit import get_trainer, hookimpl
from trainkit.data import is_stream
from trainkit.errors import ConfigError, DataError
from trainkit.models import has_adapter
from trainkit.runs import free_directory
from trainkit_migrate import framework, translate
from trainkit_trl.trainer.reward_config import OLD

log = logging.getLogger(__name__)

OBJECTS = (
    "self", "__class__", "model", "ref_model", "args", "train_dataset", "eval_dataset", "tokenizer", "formatting_func",
    "dataset_text_field", "dataset_batch_size", "ref_model_init_kwargs", "optimizers",
)  # fmt: skip
"""Arguments of trainers that are read as they are; the others are settings."""
NAMES = {"loss/total": "loss", "train/lr": "learning_rate", "train/grad_norm": "grad_norm"}
"""The names of transformers for metrics of trainkit."""


class Log:
    """Keeps the metrics of a run by the names of transformers, in a `TrainerState`."""

    def __init__(self) -> None:
        self.state = TrainerState()

    @hookimpl
    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Add the metrics to the history."""
        self.state.global_step = step
        self.state.log_history.append({**named(metrics), "step": step})


def named(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics by the names of transformers; those of evaluations begin with ``eval_``."""
    found = {}
    for name, value in metrics.items():
        held_out = name.startswith("eval/")
        own = name.removeprefix("eval/")
        found[f"{'eval_' * held_out}{NAMES.get(own, own)}"] = value
    return found


class OfflineTrainer:
    """A trainer of transformers in the eyes of a script; ``trainer`` is the trainer of trainkit that computes."""

    method: ClassVar[str]
    section: ClassVar[str]

    def _begin(
        self,
        given: Mapping[str, Any],
        train: Any,
        held_out: Any = None,
        *,
        rows: int | None = None,
        changes: Mapping[str, Any] | None = None,
        reference: Any = None,
    ) -> None:
        """Make the trainer of trainkit, and give it the samples.

        Args:
            given: the arguments of the trainer.
            train: the samples.
            held_out: the held-out samples.
            rows: how many rows the dataset has, if that is known.
            changes: sections of trainkit's configuration that follow from other arguments.
            reference: the reference model of DPO.
        """
        model, tokenizer = given["model"], given["tokenizer"]
        self.train_dataset, self.eval_dataset = given.get("train_dataset"), given.get("eval_dataset")
        self.args: TrainingArguments = given["args"] or TrainingArguments("tmp_trainer")
        self.tokenizer, self._log = tokenizer, Log()
        if given.get("peft_config") is not None and has_adapter(model):
            model, given = self._adapted(model, given)
        settings = {name: value for name, value in given.items() if name not in OBJECTS}
        optimizer, scheduler = given.get("optimizers") or (None, None)
        live = {"optimizer": optimizer, "scheduler": scheduler, "reference": reference}
        live = {name: value for name, value in live.items() if value is not None}
        config = settled(self.section, self.args, settings, type(self).__init__, rows, live)
        config = config.evolve(**(changes or {}))
        if isinstance(model, str):
            config = config.evolve(model={"model_path": model})
        elif tokenizer is None:
            config = config.evolve(tokenizer={"tokenizer_path": model.config._name_or_path})
        self.trainer: Any = get_trainer(self.method)(
            config,
            model=None if isinstance(model, str) else model,
            tokenizer=tokenizer,
            callbacks=[self._log],
            **live,
        )
        self.tokenizer = self.trainer.tokenizer
        if train is not None:
            self.trainer.add_samples(train)
        if held_out is not None:
            self.trainer.add_eval_samples(held_out)

    def _adapted(self, model: Any, given: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return a model that has an adapter already, which is trained on, and the arguments without a further one."""
        log.warning("peft_config has no effect: the model has an adapter already, which is trained")
        return model, {**given, "peft_config": None}

    def samples(self, dataset: Any) -> Any:
        """Return the rows of a dataset as samples of trainkit."""
        raise NotImplementedError

    @property
    def model(self) -> Any:
        """The model, which is trained in place if it was given as an object."""
        return self.trainer.unwrapped.model

    @property
    def state(self) -> TrainerState:
        """The number of steps, and the metrics in ``log_history``."""
        return self._log.state

    @property
    def accelerator(self) -> Any:
        """The accelerator."""
        return self.trainer.accelerator

    @property
    def optimizer(self) -> Any:
        """The optimizer."""
        return self.trainer.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The schedule of the learning rate."""
        return self.trainer.models.scheduler

    def is_world_process_zero(self) -> bool:
        """Return whether this is the main process."""
        return bool(self.accelerator.is_main_process)

    # --------------------------------------------------------------------------------------------------- training

    def _choose_directory(self, resume: bool | str | None = None) -> None:
        """Set the directory of the run, once: that of the run to resume, or one that holds no run."""
        if self.trainer.run_dir is not None:
            return
        config = self.trainer.config
        given = config.train.run_dir or "tmp_trainer"
        alone = int(os.environ.get("WORLD_SIZE", 1)) == 1
        train = {"resume": "auto" if resume is True else resume} if resume else {}
        run_dir = free_directory(given) if alone and not resume else given
        self.trainer.config = config.evolve(train={"run_dir": run_dir, **train})

    def train(
        self,
        resume_from_checkpoint: bool | str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Train to the end, and return the number of steps, the mean loss and the times.

        Args:
            resume_from_checkpoint: whether to go on from the newest checkpoint in ``args.output_dir``, or a checkpoint.
            trial: without effect.
            ignore_keys_for_eval: without effect.
        """
        self._choose_directory(resume_from_checkpoint)
        started = time.perf_counter()
        self.trainer.learn()
        if self.args.load_best_model_at_end:
            self._load_best()
        losses = [each["loss"] for each in self.state.log_history if "loss" in each]
        mean = sum(losses) / len(losses) if losses else 0.0
        metrics = {"train_runtime": time.perf_counter() - started, "train_loss": mean}
        self.state.log_history.append({**metrics, "step": self.state.global_step})
        return TrainOutput(self.state.global_step, mean, metrics)

    def _load_best(self) -> None:
        """Load the weights of the best evaluation, which the run has exported."""
        best = self.trainer.run_dir / "best"
        adapter = best / "adapter_model.safetensors"
        if adapter.exists():
            found = {name.removeprefix("base_model.model."): tensor for name, tensor in load_file(adapter).items()}
            names = {_saved(name): name for name, _ in self.model.named_parameters() if _saved(name) in found}
            self.model.load_state_dict({names[name]: tensor for name, tensor in found.items()}, strict=False)
        else:
            self.model.load_state_dict(type(self.model).from_pretrained(best).state_dict())
        log.info("the weights of the best evaluation are loaded from %s", best)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Return the loss and the metrics over held-out samples: those of the constructor, or of ``eval_dataset``."""
        if eval_dataset is not None:
            self.trainer.add_eval_samples(self.samples(eval_dataset))
        self._choose_directory()
        self.trainer.begin()
        found = named(self.trainer.evaluate())
        return {f"{metric_key_prefix}{name.removeprefix('eval')}": value for name, value in found.items()}

    # ------------------------------------------------------------------------------------------------------ saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write model, tokenizer and model card, by default to ``args.output_dir``."""
        self._choose_directory()
        self.trainer.save_pretrained(output_dir or self.args.output_dir)

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write model, tokenizer and model card."""
        self.save_model(str(save_directory))

    def save_state(self) -> None:
        """Do nothing: checkpoints have the state."""

    def push_to_hub(self, commit_message: str | None = None, blocking: bool = True, **kwargs: Any) -> Any:
        """Publish what `save_model` writes in ``args.hub_model_id``.

        Args:
            commit_message: without effect.
            blocking: without effect: it returns when the upload is complete.
            **kwargs: those of `trainkit.AccelerateRLTrainer.push_to_hub`.
        """
        self._choose_directory()
        return self.trainer.push_to_hub(self.args.hub_model_id, **kwargs)

    def log(self, logs: Mapping[str, float]) -> None:
        """Log further metrics at the present step."""
        hook, step = self.trainer.hooks.hook, self.trainer.progress.step
        if self.is_world_process_zero():
            hook.log_metrics(trainer=self.trainer, step=step, metrics=dict(logs))

    def log_metrics(self, split: str, metrics: Mapping[str, Any]) -> None:
        """Log metrics of a split."""
        if self.is_world_process_zero():
            log.info("%s: %s", split, ", ".join(f"{name} {value}" for name, value in sorted(metrics.items())))

    def save_metrics(self, split: str, metrics: Mapping[str, Any], combined: bool = True) -> None:
        """Write metrics of a split as JSON to ``<split>_results.json`` in ``args.output_dir``.

        Args:
            split: the split.
            metrics: the metrics.
            combined: whether they are added to ``all_results.json``, too.
        """
        if not self.is_world_process_zero():
            return
        folder = Path(self.args.output_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        for name in (f"{split}_results.json", *(["all_results.json"] if combined else [])):
            file = folder / name
            before = json.loads(file.read_text("utf-8")) if file.exists() and name.startswith("all") else {}
            file.write_text(json.dumps({**before, **metrics}, indent=4, sort_keys=True), "utf-8")


def settled(
    section: str,
    args: TrainingArguments,
    given: Mapping[str, Any],
    function: Any,
    rows: int | None,
    live: Iterable[str] = (),
) -> trainkit.TRLConfig[Any]:
    """Return the configuration of trainkit for the arguments of a trainer.

    Args:
        section: the name of the trainer, as the table has it.
        args: the arguments of training.
        given: the arguments of the trainer that are settings.
        function: the constructor, whose defaults are not told of.
        rows: how many rows the dataset has, if that is known.
        live: what is given as an object; sections of that name are left at their defaults.

    Raises:
        ConfigError: a setting has no counterpart in trainkit; says what to write instead.
    """
    defaults = dict(zip(reversed(function.__code__.co_varnames[: function.__code__.co_argcount]),
                        reversed(function.__defaults__), strict=False))  # fmt: skip
    of_trainer = _telling(section, given, {name: defaults.get(name) for name in given})
    table, usual = framework("trl").settings, type(args)(output_dir=args.output_dir)
    known = [name for name in (*(field.name for field in fields(TrainingArguments)), *OLD) if hasattr(args, name)]
    values, unset = ({name: _plain(getattr(each, name)) for name in known} for each in (args, usual))
    sections = {"TrainingArguments": _telling("TrainingArguments", values, unset), section: of_trainer}
    own = [field.name for field in fields(args) if field.name not in known]
    if home := next((cls.__name__ for cls in type(args).__mro__ if f"{cls.__name__}.max_length" in table), None):
        sections[home] = _telling(home, *({name: getattr(each, name) for name in own} for each in (args, usual)))
    processes = int(os.environ.get("WORLD_SIZE", 1))
    found = translate("trl", sections, processes=processes, rows=rows)
    if found.refused:
        raise ConfigError("settings of TRL without counterpart:\n  " + "\n  ".join(map(str, found.refused)))
    for remark in found.remarks:
        log.warning("%s", remark)
    for name in live:
        found.config.pop(name, None)
    method = found.config["method"]["name"]
    return trainkit.default_config(method).evolve(**found.config)


def _telling(section: str, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that have a counterpart, and of the others those that are not the default."""
    table, found = framework("trl").settings, {}
    for name, value in values.items():
        setting = table.get(f"{section}.{name}")
        counts = setting is not None and setting.kind in ("mapped", "equivalent")
        if value != defaults[name] or (counts and value is not None):
            found[name] = value
    return found


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def _saved(name: str) -> str:
    """Return the name that a parameter of an adapter has in a file of peft."""
    return name.replace(".modules_to_save.default", "").replace(".default.", ".")


def single(dataset: Any) -> Any:
    """Return a dataset as it is.

    Raises:
        ConfigError: it is a mapping of several.
    """
    if isinstance(dataset, Mapping):
        raise ConfigError(
            f"eval_dataset is a mapping of {len(dataset)} datasets, {', '.join(map(str, dataset))}; give one of them, "
            "and measure the others with trainer.evaluate(dataset, metric_key_prefix=...)"
        )
    return dataset


def count(dataset: Any) -> int | None:
    """Return the number of rows of a dataset; None of a stream."""
    return len(dataset) if hasattr(dataset, "__len__") else None


def columns(dataset: Any) -> list[str]:
    """Return the columns of a dataset, or of its first row."""
    named = getattr(dataset, "column_names", None)
    if isinstance(named, list):
        return named
    first = next(iter(dataset), None)
    return list(first) if isinstance(first, Mapping) else []


def selected(dataset: Any, names: Iterable[str], needed: Iterable[str] = ()) -> Any:
    """Return the rows of a dataset with some of its columns alone; of a stream, as they are read.

    Raises:
        DataError: it lacks a column that is needed.
    """
    found = columns(dataset)
    if missing := [name for name in needed if name not in found]:
        has = ", ".join(found) or "no columns"
        raise DataError(f"the dataset has no {', '.join(missing)}; it has {has}; name its columns so")
    wanted = [name for name in names if name in found]
    if hasattr(dataset, "select_columns"):
        chosen = dataset.select_columns(wanted)
        return chosen if is_stream(dataset) else [dict(row) for row in chosen]
    return [{name: row[name] for name in wanted} for row in dataset]


def tokenizer_of(model: Any) -> Any:
    """Return the tokenizer of a model, whose name or directory is known."""
    return AutoTokenizer.from_pretrained(model if isinstance(model, str) else model.config._name_or_path)


def longest(model: Any, tokenizer: Any, most: int) -> int:
    """Return the length that TRL takes if none is given: ``most``, or less if tokenizer or model allow less."""
    config = AutoConfig.from_pretrained(model) if isinstance(model, str) else model.config
    context = getattr(config, "max_position_embeddings", None) or most
    return int(min(most, context, getattr(tokenizer, "model_max_length", None) or most))
