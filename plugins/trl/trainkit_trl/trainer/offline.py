"""What the trainers of TRL that learn from samples have in common: `transformers.Trainer`, as scripts know it."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from enum import Enum
from functools import partial, wraps
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_type_hints

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import TrainOutput
from transformers.utils.quantization_config import QuantizationConfigMixin

import trainkit
from trainkit import get_trainer, hookimpl
from trainkit.data import formatted, is_stream
from trainkit.errors import ConfigError, DataError, describe, suggest
from trainkit.models import arguments_of_today, has_adapter
from trainkit.plugins import add_callback
from trainkit.runs import free_directory
from trainkit_migrate import framework, translate
from trainkit_trl.arguments import fault
from trainkit_trl.overriding import ADAPTER
from trainkit_trl.trainer.adapters import reference_of
from trainkit_trl.trainer.calling import OF_ARGUMENTS, Calling
from trainkit_trl.trainer.reward_config import OLD
from trainkit_trl.trainer.tracking import take_trackers
from trainkit_trl.trainer.truncation import USUAL, truncation
from trainkit_trl.trainer.utils import RichProgressCallback

log = logging.getLogger(__name__)

OBJECTS = (
    "self", "__class__", "model", "ref_model", "args", "train_dataset", "eval_dataset", "tokenizer", "formatting_func",
    "dataset_text_field", "dataset_batch_size", "dataset_kwargs", "ref_model_init_kwargs", "optimizers", "callbacks",
)  # fmt: skip
"""Arguments of trainers that are read as they are; the others are settings."""
MODELS = ((nn.Module, str), "a model of transformers, or its name or directory")
KINDS: dict[str, tuple[Any, str]] = {
    "model": MODELS,
    "ref_model": MODELS,
    "args": (TrainingArguments, "transformers.TrainingArguments, or the configuration of the trainer"),
    "tokenizer": (PreTrainedTokenizerBase, "a tokenizer of transformers"),
}
"""What arguments of trainers should be."""
NAMES = {"loss/total": "loss", "train/lr": "learning_rate", "train/grad_norm": "grad_norm"}
"""The names of transformers for metrics of trainkit."""


class Log:
    """Gives the metrics of a run to `OfflineTrainer.log` by TRL's names, and writes a model with every checkpoint."""

    def __init__(self, owner: OfflineTrainer) -> None:
        self.owner, self.state = owner, TrainerState()
        self.given: Mapping[str, float] | None = None
        """The metrics of the run that are being logged."""
        self.written: list[Path] = []

    @hookimpl
    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Log metrics of the run, unless it is `OfflineTrainer.log` that passes its own on.

        As in transformers, those of training and of each held-out dataset are logged by themselves.
        """
        self.state.global_step = step
        if self.given is None:
            self.given = self.owner.logged(metrics)
            parts = dict[str, dict[str, float]]()
            for name, value in self.given.items():
                parts.setdefault(self.owner.dataset_of(name), {})[name] = value
            try:
                for part in parts.values():
                    self.owner.log(part)
            finally:
                self.given = None
            if self.written and self.written[-1].name == f"checkpoint-{step}":  # its evaluation comes after it
                self.owner.write_state(self.written[-1])

    @hookimpl
    def on_step(self, trainer: Any, step: int) -> None:
        """Write the model to ``checkpoint-<step>``, as transformers names it, at the steps of checkpoints."""
        train, last = trainer.config.train, trainer.total_steps
        if not train.save_interval or (step % train.save_interval and step != last):
            return
        self.written.append(trainer.run_dir / f"checkpoint-{step}")
        self.owner.save_model(str(self.written[-1]), _internal_call=True)
        self.owner.write_state(self.written[-1])
        while len(self.written) > train.keep_checkpoints:
            old = self.written.pop(0)
            if self.owner.is_world_process_zero():
                shutil.rmtree(old, ignore_errors=True)


def of_trackers(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of logs by the names that transformers gives trackers: ``eval/...``, or ``train/...``."""
    numbers = {name: value for name, value in logs.items() if isinstance(value, int | float)}
    return {
        f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}": value
        for name, value in numbers.items()
    }


def named(metrics: Mapping[str, float], names: Mapping[str, str]) -> dict[str, float]:
    """Return metrics by the names of transformers and of TRL; those of evaluations begin with ``eval_``."""
    found, known = {}, {**NAMES, **names}
    for name, value in metrics.items():
        if name.startswith("train/lr/"):  # of the parameters without decay, whose rate is the same
            continue
        held_out = name.startswith("eval/")
        own = name.removeprefix("eval/")
        found[f"{'eval_' * held_out}{known.get(own, own)}"] = value
    return found


class OfflineTrainer(Calling):
    """A trainer of transformers in the eyes of a script; ``trainer`` is the trainer of trainkit that computes."""

    method: ClassVar[str]
    section: ClassVar[str]
    truncated: ClassVar[str] = ""
    """``"within"``: samples are truncated by `Truncation`; ``"outside"``: with that field; else as trainkit does."""

    def _begin(
        self, given: Mapping[str, Any], *, changes: Mapping[str, Any] | None = None, reference: Any = None
    ) -> None:
        """Make the trainer of trainkit, and give it the samples.

        Args:
            given: the arguments of the trainer.
            changes: sections of trainkit's configuration that follow from other arguments.
            reference: the reference model of DPO.
        """
        train, held_out = self.read(given)
        rows = self.count(given.get("train_dataset"), train)
        model, tokenizer = given["model"], given["tokenizer"]
        self._callbacks = observing(given.get("callbacks") or ())
        given = {**given, **loading(model, given)}
        self.train_dataset, self.eval_dataset = given.get("train_dataset"), given.get("eval_dataset")
        self.args: TrainingArguments = given["args"] or TrainingArguments("tmp_trainer")
        if found := loading(model, vars(self.args)):
            self.args = copy.copy(self.args)
            vars(self.args).update(found)
        if is_stream(train) and self.args.max_steps <= 0:
            raise ConfigError("train_dataset is a stream, whose length is not known; set max_steps in args")
        self.tokenizer, self._log, self._own = tokenizer, Log(self), dict[str, Any]()
        if given.get("peft_config") is not None and has_adapter(model):
            model, given = self._adapted(model, given)
        reference = self._compared(model, given, reference)
        optimizer, scheduler = given.get("optimizers") or (None, None)
        objects = {"optimizer": optimizer, "scheduler": scheduler, "reference": reference}
        live = {**self.makers(), **{name: value for name, value in objects.items() if value is not None}}
        config = self._translated(given, rows, live).evolve(**(changes or {}))
        if isinstance(model, str):
            config = config.evolve(model={"model_path": model})
        elif tokenizer is None:
            tokenizer = tokenizer_of(model)
        self.check_called(config, model)
        self._trackers, left = take_trackers(config.train.trackers, self._log_names)
        config = config.evolve(train={"trackers": left})
        self.trainer = self.trainer_class()(
            config,
            model=None if isinstance(model, str) else model,
            tokenizer=tokenizer,
            callbacks=[self._log, *self._callbacks, *self._trackers],
            **live,
        )
        vars(self)["tokenizer"] = self.trainer.tokenizer
        self.keep_settings()
        if self.truncated:
            self.trainer.text.shape = truncation(
                {**vars(self.args), **given},
                self.tokenizer,
                self.trainer.config.train.seq_length,
                outside=self.truncated == "outside",
                apart=self.trainer.text.is_encoder_decoder,
            )
        if train is not None:
            self.trainer.add_samples(train)
        self._keep_arguments(given)
        self._sets = dict[str, tuple[Any, Any]]()
        if isinstance(held_out, Several):
            self._measure_each(held_out)
        elif held_out is not None:
            self.trainer.add_eval_samples(held_out)
        self._sample_in_evaluations(given, held_out)

    def _translated(self, given: Mapping[str, Any], rows: int | None, live: Iterable[str]) -> trainkit.TRLConfig[Any]:
        """Return the configuration of trainkit for the arguments of the trainer; see `settled`."""
        settings = {name: value for name, value in given.items() if name not in OBJECTS}
        usual = {name: each.default for name, each in parameters(type(self)).items()}
        config = settled(self.section, self.args, settings, usual, rows, live)
        whole, divided = not self._trains_adapter(given), "zero" in str(config.train.sharding)
        if config.optimizer.groups and whole and divided:
            log.warning("weight_decay acts on biases and norms too, because DeepSpeed has one rate for all parameters")
        if config.optimizer.groups and (divided or not whole):
            config = config.evolve(optimizer={"groups": []})
        ours = {theirs: name for name, theirs in self.names.items()}
        best = config.train.save_best
        if not isinstance(best, bool) and (own := ours.get(best.metric.removeprefix("eval/"))):
            config = config.evolve(train={"save_best": {"metric": f"eval/{own}", "mode": best.mode}})
        return config

    def _keep_arguments(self, given: Mapping[str, Any]) -> None:
        """Set the attributes that TRL's trainers have of their arguments, with what trainkit makes of them."""
        config, apart = self.trainer.model_config, bool(self.trainer.model_config.is_encoder_decoder)
        usual = {name: each.default for name, each in parameters(type(self)).items()}
        found = {**usual, **vars(self.args), **given}
        pad = self.tokenizer.pad_token_id
        of_pairs = {"use_dpo_data_collator": True, "pad_token_id": pad, "decoder_start_token_id": None}
        found |= of_pairs if "padding_value" in found or hasattr(self.args, "padding_value") else {}
        for name in ("max_prompt_length", *(("max_target_length", "max_completion_length") if apart else ())):
            found |= {name: found[name] or USUAL} if name in found else {}
        found |= {"padding_value": pad} if found.get("padding_value", 0) is None else {}
        found |= {"max_length": self.trainer.config.train.seq_length} if "max_length" in found else {}
        found |= {"decoder_start_token_id": config.decoder_start_token_id} if apart else {}
        found |= {"beta": self.trainer.method.beta} if hasattr(self.trainer.method, "beta") else {}
        found |= {"is_encoder_decoder": apart, "is_peft_model": self._trains_adapter(given)}
        vars(self).update({name: found[name] for name in OF_ARGUMENTS if name in found})

    def _trains_adapter(self, given: Mapping[str, Any]) -> bool:
        """Return whether an adapter is trained, and not the weights of the model."""
        return given.get("peft_config") is not None or has_adapter(given["model"])

    def _sample_in_evaluations(self, given: Mapping[str, Any], held_out: Any) -> None:
        """With ``generate_during_eval``, make evaluations sample responses to prompts of a batch of held-out rows."""
        if held_out is None or not {**vars(self.args), **given}.get("generate_during_eval"):
            return
        rows = next(iter(held_out.values())) if isinstance(held_out, Several) else held_out
        prompts: list[Any] = []  # texts or messages
        bos = self.trainer.tokenizer.bos_token or ""
        for row in rows:
            if len(prompts) == self.args.per_device_eval_batch_size:
                break
            prompt = row["prompt"]
            if isinstance(prompt, str) and not prompt.startswith(bos):  # as in what is trained on
                prompt = bos + prompt
            if prompt not in prompts:
                prompts.append(prompt)
        self.trainer.add_eval_pipeline(prompts)

    def _adapted(self, model: Any, given: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return a model that has an adapter already, which is trained on, and the arguments without a further one."""
        log.warning("peft_config has no effect: the model has an adapter already, which is trained")
        return model, {**given, "peft_config": None}

    def _compared(self, model: Any, given: Mapping[str, Any], reference: Any) -> Any:
        """Return the reference, if it is another model; that of a model with adapters depends on their names."""
        if "ref_model" not in parameters(type(self)):
            return reference
        trained, compared = given.get("model_adapter_name"), given.get("ref_adapter_name")
        if compared is not None and reference is not None:
            log.warning("ref_adapter_name has no effect: ref_model is the reference")
        if given.get("peft_config") is not None and trained == "default":  # the name of a new adapter
            trained = None
        needed = reference is None and not given.get("reference_free")
        found = reference_of(model, trained, compared, needed=needed)
        return found if reference is None else reference

    def renamed(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return metrics of trainkit by the names of `evaluate`."""
        return named(metrics, self.names)

    def logged(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return metrics of trainkit by the names of ``state.log_history``."""
        return self.renamed(metrics)

    def dataset_of(self, name: str) -> str:
        """Return which data a metric of ``state.log_history`` is of: ``"train"``, ``"eval"``, or several by name."""
        if not name.startswith(("eval_", "eval/")):
            return "train"
        return max((each for each in self._sets if name.startswith(f"eval_{each}_")), key=len, default="eval")

    def samples(self, dataset: Any) -> Any:
        """Return the rows of a dataset as samples of trainkit."""
        raise NotImplementedError

    def held_out(self, dataset: Any) -> Any:
        """Return the rows of a dataset as held-out samples of trainkit."""
        return self.samples(dataset)

    def count(self, dataset: Any, samples: Any) -> int | None:
        """Return how many rows are trained on, of a dataset and its samples; None if that is not known."""
        return count(dataset)

    def read(self, given: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return both datasets of the constructor as samples of trainkit; None stays None."""
        train, held_out = given.get("train_dataset"), given.get("eval_dataset")
        if train is None and "train_dataset" in parameters(type(self)):
            log.warning("there is no train_dataset, so train() cannot be called; evaluate() can")
        rows = None if train is None else self.samples(in_order(train))
        if isinstance(held_out, Mapping):
            return rows, Several({name: self.held_out(in_order(each)) for name, each in held_out.items()})
        return rows, None if held_out is None else self.held_out(in_order(held_out))

    @property
    def model(self) -> Any:
        """The model, which is trained in place if it was given as an object."""
        return self.trainer.models.load_policy().model

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
        """The optimizer; one that is set is that of `create_optimizer`."""
        return self._own["optimizer"] if "optimizer" in self._own else self._built().optimizer

    @optimizer.setter
    def optimizer(self, value: Any) -> None:
        self._set_own("optimizer", "create_optimizer", value)

    @property
    def lr_scheduler(self) -> Any:
        """The schedule of the learning rate; one that is set is that of `create_scheduler`."""
        return self._own["lr_scheduler"] if "lr_scheduler" in self._own else self._built().scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, value: Any) -> None:
        self._set_own("lr_scheduler", "create_scheduler", value)

    def _set_own(self, name: str, method: str, value: Any) -> None:
        if not self.overrides(method):
            raise ConfigError(
                f"{name} of {type(self).__name__} would not be used; give optimizers, or override {method}"
            )
        self._own[name] = value

    @property
    def data_collator(self) -> Any:
        """The collator that was given; trainkit makes the batches by itself."""
        return getattr(self, "_data_collator", None)

    def add_callback(self, callback: Any) -> None:
        """Add an object with hooks of trainkit, or a class of such, as the argument ``callbacks`` does."""
        for each in observing([callback]):
            add_callback(self.trainer.hooks, each)
            self._callbacks.append(each)

    def pop_callback(self, callback: Any) -> Any:
        """Remove a callback, or the first of a class, and return it; None if there is none."""
        found = next((each for each in self._callbacks if callback in (each, type(each))), None)
        if found is not None:
            self._callbacks.remove(found)
            self.trainer.hooks.unregister(found)
        return found

    def remove_callback(self, callback: Any) -> None:
        """Do what `pop_callback` does, and return nothing."""
        self.pop_callback(callback)

    @property
    def hub_model_id(self) -> str | None:
        """The repository that the model is published in."""
        return self.args.hub_model_id

    @property
    def is_deepspeed_enabled(self) -> bool:
        """Whether DeepSpeed divides the model."""
        return getattr(self.accelerator.state, "deepspeed_plugin", None) is not None

    @property
    def is_fsdp_enabled(self) -> bool:
        """Whether FSDP divides the model."""
        return getattr(self.accelerator.state, "fsdp_plugin", None) is not None

    def _built(self) -> Any:
        self.trainer.models.build()
        return self.trainer.models

    def is_world_process_zero(self) -> bool:
        """Return whether this is the main process."""
        return bool(self.accelerator.is_main_process)

    def is_local_process_zero(self) -> bool:
        """Return whether this is the main process of its machine."""
        return bool(self.accelerator.is_local_main_process)

    # --------------------------------------------------------------------------------------------------- training

    def _choose_directory(self, resume: bool | str | None = None) -> None:
        """Set the directory of the run, once: that of the run to resume, or one that holds no run."""
        if self.trainer.run_dir is not None:
            return
        config = self.trainer.config
        given = config.train.run_dir or "tmp_trainer"
        alone = int(os.environ.get("WORLD_SIZE", 1)) == 1
        if resume and (found := re.search(r"checkpoint-(\d+)/?$", str(resume))):  # whose state trainkit keeps apart
            resume = str(Path(str(resume)).parent / "checkpoints" / f"step_{int(found[1]):08d}")
        if resume is True and not [*Path(given).glob("checkpoints/step_*")]:
            raise ConfigError(f"{given} has no checkpoint to resume from; leave resume_from_checkpoint out")
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
            resume_from_checkpoint: whether to go on from the newest checkpoint in ``args.output_dir``, or a checkpoint,
                such as ``args.output_dir/checkpoint-<step>``.
            trial: without effect.
            ignore_keys_for_eval: without effect.
        """
        self.check_settings()
        self._choose_directory(resume_from_checkpoint)
        started, steps = time.perf_counter(), self.trainer.total_steps
        self.trainer.begin()
        before = Path(self.trainer.run_dir) / f"checkpoint-{self.trainer.progress.step}" / "trainer_state.json"
        if resume_from_checkpoint and before.exists():
            self._log.state = TrainerState.load_from_json(str(before))
        state = self.state
        epochs = self.args.num_train_epochs
        if self.args.max_steps > 0 and (rows := getattr(self.trainer.pipeline, "rows", None)):
            epochs = steps * self.trainer.config.train.batch_size / len(rows)
        state.max_steps, state.num_train_epochs = steps, math.ceil(epochs)
        self.trainer.learn()
        self._keep_best()
        if self.args.load_best_model_at_end:
            self._load_best()
        losses = [each["loss"] for each in self.state.log_history if "loss" in each]
        mean = sum(losses) / len(losses) if losses else 0.0
        seconds, at = time.perf_counter() - started, self.trainer.progress
        metrics = {
            "train_runtime": seconds,
            "train_samples_per_second": at.samples / seconds,
            "train_steps_per_second": at.step / seconds,
            "train_loss": mean,
        }
        self.state.log_history.append({**metrics, "step": self.state.global_step})
        return TrainOutput(self.state.global_step, mean, metrics)

    def _keep_best(self) -> None:
        """Set what ``state`` has of the best evaluation, if the run has compared any."""
        best, value = self.trainer.config.train.save_best, self.trainer.progress.best
        if best and math.isfinite(value):
            self.state.best_metric = value if best is True or best.mode == "max" else -value
            self.state.best_model_checkpoint = str(self.trainer.run_dir / "best")

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
        """Return the loss and the metrics over held-out samples: those of the constructor, or of ``eval_dataset``.

        Args:
            eval_dataset: held-out rows, or several datasets by name, whose metrics are ``eval_<name>_loss`` and others.
            ignore_keys: without effect.
            metric_key_prefix: what the names of metrics begin with.

        Raises:
            ConfigError: there are none.
        """
        if isinstance(eval_dataset, Mapping):
            return {
                name: value
                for each, dataset in eval_dataset.items()
                for name, value in self.evaluate(dataset, ignore_keys, f"{metric_key_prefix}_{each}").items()
            }
        if eval_dataset is None and self.eval_dataset is None:
            raise ConfigError("there is nothing to evaluate on; give eval_dataset, here or to the constructor")
        self._choose_directory()
        self.trainer.begin()
        measure = partial(get_trainer(self.method).evaluate, self.trainer)
        found = measure() if eval_dataset is None else self._on(eval_dataset, measure)
        values = self.renamed(found).items()
        return {f"{metric_key_prefix}{name.removeprefix('eval')}": value for name, value in values}

    def _on(self, eval_dataset: Any, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
        """Return what ``measure`` does with other held-out samples."""
        evaluator = self.trainer.evaluator
        before, sets = (self.trainer.eval_samples, evaluator.held_out), self._sets
        try:
            self.trainer.add_eval_samples(self.held_out(in_order(eval_dataset)))
            self._sets = {}
            return measure()
        finally:
            (self.trainer.eval_samples, evaluator.held_out), self._sets = before, sets

    def called_evaluation(self) -> dict[str, float]:
        """Return the metrics of an overridden `evaluate` by the names of trainkit."""
        ours = {theirs: name for name, theirs in {**NAMES, **self.names}.items()}
        plain = {name.removeprefix("eval_"): float(value) for name, value in self.evaluate().items()}
        return {f"eval/{ours.get(name, name)}": value for name, value in plain.items()}

    def _measure_each(self, several: Several) -> None:
        """Make evaluations measure several sets of held-out samples, each by its name."""
        evaluator = self.trainer.evaluator
        for name, rows in several.items():
            self.trainer.add_eval_samples(rows)
            self._sets[name] = self.trainer.eval_samples, None
        measure: Callable[[], dict[str, float]] = evaluator.on_held_out

        def on_each() -> dict[str, float]:
            if not self._sets:
                return measure()
            found = {}
            for name, (rows, experience) in self._sets.items():
                self.trainer.eval_samples, evaluator.held_out = rows, experience
                for key, value in self.renamed(measure()).items():
                    found[f"eval/{name}_{key.removeprefix('eval_')}"] = value
                self._sets[name] = rows, evaluator.held_out
            return found

        evaluator.on_held_out = on_each

    # ------------------------------------------------------------------------------------------------------ saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write model, tokenizer and model card, by default to ``args.output_dir``."""
        self._choose_directory()
        self.trainer.save_pretrained(output_dir or self.args.output_dir)

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Write model, tokenizer and model card."""
        self.save_model(str(save_directory))

    def save_state(self) -> None:
        """Write ``state`` to ``trainer_state.json`` in ``args.output_dir``, as it is in every checkpoint."""
        self.write_state(Path(self.args.output_dir or "."))

    def write_state(self, directory: Path) -> None:
        """Write ``state`` to a directory."""
        if self.is_world_process_zero():
            directory.mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(str(directory / "trainer_state.json"))

    def push_to_hub(self, commit_message: str | None = "End of training", blocking: bool = True, **kwargs: Any) -> Any:
        """Publish what `save_model` writes in ``args.hub_model_id``.

        Args:
            commit_message: without effect.
            blocking: without effect: it returns when the upload is complete.
            **kwargs: those of `trainkit.AccelerateRLTrainer.push_to_hub`.
        """
        self._choose_directory()
        return self.trainer.push_to_hub(self.args.hub_model_id, **kwargs)

    def log(self, logs: Mapping[str, float]) -> None:
        """Log metrics at the present step: keep them in ``state``, and pass those on that are not of the run itself."""
        if not self.is_world_process_zero():
            return
        step, given = self.trainer.progress.step, self._log.given
        if (rows := getattr(self.trainer.pipeline, "rows", None)) and self.trainer.progress.trained:
            self.state.epoch = round(self.trainer.progress.trained / len(rows), 2)
            logs = {**logs, "epoch": self.state.epoch}
        self.state.log_history.append({**logs, "step": step})
        for each in self._trackers:
            each.log(self.trainer, of_trackers(logs))
        if added := {name: value for name, value in logs.items() if name not in {*(given or ()), "epoch"}}:
            self._log.given = given or {}
            self.trainer.hooks.hook.log_metrics(trainer=self.trainer, step=step, metrics=added)
            self._log.given = given

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
    usual: Mapping[str, Any],
    rows: int | None,
    live: Iterable[str] = (),
) -> trainkit.TRLConfig[Any]:
    """Return the configuration of trainkit for the arguments of a trainer.

    Args:
        section: the name of the trainer, as the table has it.
        args: the arguments of training.
        given: the arguments of the trainer that are settings.
        usual: the defaults of these, which are not told of.
        rows: how many rows the dataset has, if that is known.
        live: what is given as an object; sections of that name are left at their defaults.

    Raises:
        ConfigError: a setting has no counterpart in trainkit; says what to write instead.
    """
    of_trainer = _telling(section, given, {name: usual.get(name) for name in given})
    table, plain = framework("trl").settings, type(args)(output_dir=args.output_dir)
    known = [name for name in (*(field.name for field in fields(TrainingArguments)), *OLD) if hasattr(args, name)]
    read = [name for name in known if name != "optim" or "optimizer" not in live]
    values, unset = ({name: _plain(getattr(each, name)) for name in read} for each in (args, plain))
    sections = {"TrainingArguments": _telling("TrainingArguments", values, unset), section: of_trainer}
    own = [field.name for field in fields(args) if field.name not in known]
    if home := next((cls.__name__ for cls in type(args).__mro__ if f"{cls.__name__}.max_length" in table), None):
        sections[home] = _telling(home, *({name: getattr(each, name) for name in own} for each in (args, plain)))
    processes = int(os.environ.get("WORLD_SIZE", 1))
    found = translate("trl", sections, processes=processes, rows=rows)
    settings = found.accepted("settings of TRL", log.warning)
    kept = {name: section for name, section in settings.items() if name not in live}
    return trainkit.default_config(kept["method"]["name"]).evolve(**kept)


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


class Several(dict[str, Any]):
    """Held-out samples of several datasets, by name."""


def in_order(dataset: Any) -> Any:
    """Return a dataset as something to iterate over: those of torch may have rows by their indices alone."""
    return dataset if hasattr(dataset, "__iter__") else [dataset[index] for index in range(len(dataset))]


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
        dataset = dataset.select_columns(wanted)
    return formatted(dataset, lambda row: {name: row[name] for name in wanted})


def collated(dataset: Any, collator: Callable[[list[Any]], Any], names: Iterable[str], needed: Iterable[str]) -> Any:
    """Return the rows of a dataset as a collator of a script makes them, which is called with each by itself.

    Args:
        dataset: the rows.
        collator: returns a batch.
        names: what is read of a batch.
        needed: what has to be in it.

    Raises:
        DataError: it returns no batch of one row with what is needed.
    """

    def alone(row: Any) -> dict[str, Any]:
        try:
            batch = collator([row])
        except Exception as error:
            raise DataError(f"data_collator raised {type(error).__name__} for [{describe(row)}]: {error}") from error
        has = [name for name, value in batch.items() if value is not None] if isinstance(batch, Mapping) else []
        if not {*needed} <= {*has}:
            held = f"one with {', '.join(has)}" if has else describe(batch)
            raise DataError(f"data_collator should return a dictionary with {', '.join(needed)}; it returned {held}")
        found = {name: torch.as_tensor(batch[name]) for name in names if name in has}
        if odd := [name for name, value in found.items() if not value.dim() or len(value) != 1]:
            raise DataError(
                f"data_collator should return one row for one; {odd[0]} has the shape {tuple(found[odd[0]].shape)}"
            )
        return {name: value[0].tolist() for name, value in found.items()}

    return formatted(dataset, alone) if is_stream(dataset) else [alone(row) for row in dataset]


def loading(model: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``model_init_kwargs`` of arguments, if they are given, with the type of the saved weights for ``"auto"``.

    Raises:
        ConfigError: the model is loaded already.
    """
    if not (found := given.get("model_init_kwargs")):
        return {}
    if not isinstance(model, str):
        raise ConfigError(
            "model_init_kwargs is how a model is loaded, and model is one that is loaded already; leave it out, or "
            "give the name of the model"
        )
    names = [name for name in ("dtype", "torch_dtype") if found.get(name) == "auto"]
    saved = AutoConfig.from_pretrained(model).dtype or torch.float32 if names else None
    kept = {name: value for name, value in found.items() if value is not None}
    settled = arguments_of_today({**kept, **dict.fromkeys(names, saved)})
    if isinstance(quantised := settled.get("quantization_config"), QuantizationConfigMixin):
        settled["quantization_config"] = quantised.to_dict()
    return {"model_init_kwargs": settled}


def load_reference(model: Any, arguments: Mapping[str, Any] | None, *, apart: bool) -> Any:
    """Return the reference that ``ref_model`` is, or names.

    Args:
        model: ``ref_model``.
        arguments: ``ref_model_init_kwargs``.
        apart: whether it is an encoder-decoder.

    Raises:
        ConfigError: it is a model already, or does not take the arguments.
    """
    if not isinstance(model, str):
        if arguments:
            raise ConfigError("ref_model_init_kwargs is given, and ref_model is no name to load; leave one of them out")
        return model
    auto = AutoModelForSeq2SeqLM if apart else AutoModelForCausalLM
    try:
        return auto.from_pretrained(model, **arguments_of_today(arguments or {}))
    except TypeError as error:
        raise ConfigError(f"ref_model_init_kwargs does not fit {model!r}: {error}; leave the argument out") from error


def tokenizer_of(model: Any) -> Any:
    """Return the tokenizer of a model.

    Raises:
        ConfigError: the model has no name or directory with one.
    """
    if not (name := model if isinstance(model, str) else model.config._name_or_path):
        raise ConfigError("tokenizer is not given, and the model has no name or directory with one; give tokenizer")
    return AutoTokenizer.from_pretrained(name)


def longest(model: Any, tokenizer: Any, most: int) -> int:
    """Return the length that TRL takes if none is given: ``most``, or less if tokenizer or model allow less."""
    config = AutoConfig.from_pretrained(model) if isinstance(model, str) else model.config
    context = getattr(config, "max_position_embeddings", None) or most
    return int(min(most, context, getattr(tokenizer, "model_max_length", None) or most))


def observing(callbacks: Iterable[Any]) -> list[Any]:
    """Return callbacks as objects with hooks of trainkit; classes are made.

    Raises:
        ConfigError: one is of transformers, or has no hook.
    """
    made = [each() if isinstance(each, type) else each for each in callbacks]
    made = [each for each in made if not isinstance(each, RichProgressCallback)]
    for each in made:
        if isinstance(each, TrainerCallback):
            raise ConfigError(
                f"callbacks of transformers are not called; give objects with methods that trainkit.hookimpl "
                f"marks, such as on_step, in the place of {type(each).__name__}"
            )
    return made


def parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the constructor that the adapter gives a class, also one of a script below it."""
    own = next(each for each in cls.__mro__ if each.__module__.startswith(ADAPTER) and "__init__" in vars(each))
    return inspect.signature(own).parameters


def _check_kinds(home: str, given: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Raise a ConfigError if an argument of a constructor is of another type than its annotation, or than `KINDS`."""
    for name, value in given.items():
        kinds, wanted = KINDS.get(name, (object, ""))
        if not isinstance(value, kinds) and (name == "model" or value is not None):
            raise ConfigError(f"{name} of {home} should be {wanted}; given {describe(value)}")
        if wanted := fault(value, hints.get(name, Any)):
            raise ConfigError(f"{name} of {home} should be {wanted}; given {describe(value)}")
    pair = given.get("optimizers")
    if pair is not None and not (isinstance(pair, tuple | list) and len(pair) == 2):
        raise ConfigError(f"optimizers of {home} should be an optimizer and its schedule; given {describe(pair)}")
    for name in ("train_dataset", "eval_dataset"):
        value = given.get(name)
        several = isinstance(value, Mapping) and name == "train_dataset"
        rows = hasattr(value, "__iter__") or {"__getitem__", "__len__"} <= {*dir(value)}
        if value is not None and (isinstance(value, str | bytes) or several or not rows):
            raise ConfigError(
                f"{name} of {home} should be a dataset, such as a split of load_dataset(...), or a list of rows; "
                f"given {describe(value)}"
            )


F = TypeVar("F", bound=Callable[..., None])


def checking(init: F) -> F:
    """Make a constructor check the names and kinds of its arguments; those that are wrong are ConfigErrors."""
    signature = inspect.signature(init)
    known = [name for name in signature.parameters if name != "self"]
    hints = get_type_hints(init)

    @wraps(init)
    def checked(self: Any, *args: Any, log_names: str = "trl", **kwargs: Any) -> None:
        self._log_names = log_names
        home = next(each.__name__ for each in type(self).__mro__ if each.__module__.startswith(ADAPTER))
        for name in kwargs:
            if name not in known:
                raise ConfigError(f"{home} takes no {name}{suggest(name, known)}; it takes {', '.join(known)}")
        try:
            given = {"model": None, **signature.bind(self, *args, **kwargs).arguments}
        except TypeError as error:
            raise ConfigError(f"the arguments of {home} do not fit: {error}; name them") from error
        _check_kinds(home, given, hints)
        init(self, *args, **kwargs)

    return checked  # type: ignore[return-value]
