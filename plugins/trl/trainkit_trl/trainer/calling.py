"""What of a trainer of TRL a script overrides: which methods trainkit calls, and with what."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from trainkit.data import Sequences
from trainkit.errors import ConfigError, describe
from trainkit.metrics import Mean, Metrics
from trainkit.plugins import get_trainer
from trainkit_trl.overriding import Overridable

BY_LOSS = "override compute_loss, which every micro-batch calls"
BY_EVALUATION = "override prediction_step for a batch, or evaluate for a whole evaluation"
BY_SAVING = "override save_model, which every checkpoint calls"
BY_ROWS = "trainkit makes the batches; give the rows as they should be as train_dataset and eval_dataset"
BY_OPTIMIZER = "override create_optimizer and create_scheduler"
SWEEP = "trainkit sweep makes runs with other settings, each with a model of its own"
OTHERWISE = "it calls compute_loss, prediction_step, evaluate, log, create_optimizer, create_scheduler and save_model"
CALLED = (
    "compute_loss", "prediction_step", "evaluate", "log", "create_optimizer", "create_scheduler", "save_model",
)  # fmt: skip
"""Methods of transformers' Trainer that trainkit calls if they are overridden."""
BY_SCRIPTS = (
    "train", "predict", "push_to_hub", "create_model_card", "save_state", "save_metrics", "log_metrics",
    "metrics_format", "is_local_process_zero", "is_world_process_zero",
)  # fmt: skip
"""Methods that scripts call themselves."""
NOT_CALLED: Mapping[str, str] = {
    **dict.fromkeys(("training_step", "_inner_training_loop", "autocast_smart_context_manager"), BY_LOSS),
    **dict.fromkeys(("compute_loss_context_manager", "_wrap_model"), BY_LOSS),
    **dict.fromkeys(("evaluation_loop", "prediction_loop", "_evaluate"), BY_EVALUATION),
    **dict.fromkeys(("_save_checkpoint", "_save", "_rotate_checkpoints"), BY_SAVING),
    **dict.fromkeys(("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "data_collator"), BY_ROWS),
    **dict.fromkeys(("_get_train_sampler", "_get_eval_sampler", "_prepare_inputs", "_prepare_dataset"), BY_ROWS),
    **dict.fromkeys(("_prepare_non_packed_dataloader", "_prepare_packed_dataloader"), BY_ROWS),
    **dict.fromkeys(("create_optimizer_and_scheduler", "get_decay_parameter_names"), BY_OPTIMIZER),
    **dict.fromkeys(("_trl_activate_neftune", "_activate_neftune"), "set neftune_noise_alpha"),
    "_maybe_log_save_evaluate": "override log, evaluate and save_model",
    "prepare_model_inputs": "give the rows to step() as they should be",
    "visualize_samples": BY_EVALUATION,
}
BY_CALLBACKS = "give callbacks= or add_callback objects with methods that trainkit.hookimpl marks, such as on_step"
BY_METHOD = "the loss and the metrics are those of the method; override compute_loss or prediction_step"
BY_ACCELERATE = "accelerate places the model; read accelerator"
ABSENT: Mapping[str, str] = {
    **dict.fromkeys(("callback_handler", "control"), BY_CALLBACKS),
    **dict.fromkeys(("compute_metrics", "preprocess_logits_for_metrics", "compute_loss_func"), BY_METHOD),
    **dict.fromkeys(("label_names", "label_smoother", "can_return_loss", "model_accepts_loss_kwargs"), BY_METHOD),
    **dict.fromkeys(("gather_function", "metrics_format"), BY_METHOD),
    **dict.fromkeys(
        ("model_init", "call_model_init", "hyperparameter_search", "objective", "compute_objective"), SWEEP
    ),
    **dict.fromkeys(("hp_name", "hp_space", "hp_search_backend"), SWEEP),
    **dict.fromkeys(("is_model_parallel", "place_model_on_device", "deepspeed"), BY_ACCELERATE),
    **dict.fromkeys(("is_fsdp_xla_enabled", "is_fsdp_xla_v1_enabled", "is_fsdp_xla_v2_enabled"), BY_ACCELERATE),
    **dict.fromkeys(("create_accelerator_and_postprocess", "is_distributed_loading_by_transformers"), BY_ACCELERATE),
    **dict.fromkeys(("get_sp_size", "get_cp_size", "get_tp_size"), BY_ACCELERATE),
    **dict.fromkeys(("current_flos", "floating_point_ops", "store_flos"), "floating-point operations are not counted"),
    **dict.fromkeys(("init_hf_repo", "push_in_progress"), "push_to_hub makes the repository and waits for the upload"),
    **dict.fromkeys(("optimizer_cls_and_kwargs", "get_optimizer_cls_and_kwargs"), "read optimizer; " + BY_OPTIMIZER),
    "current_gradient_accumulation_steps": "read args.gradient_accumulation_steps",
    "get_total_train_batch_size": "read trainer.trainer.config.train.batch_size",
    "set_initial_training_values": "read trainer.trainer.total_steps",
    "num_examples": "write len(dataset)",
    "model_wrapped": "read model",
    "processing_class": "read tokenizer",
    "is_in_train": "read state.global_step",
    "neftune_hook_handle": "set neftune_noise_alpha",
    "tr_loss": "read what step() returns",
    "predict": "call evaluate, or trainer.trainer.generate",
    "create_model_card": "save_model writes it",
    "model_preparation_time": "read state.log_history, where train() leaves its times",
}
"""Attributes of TRL's trainers and of transformers' Trainer that there are not, and what to use instead."""
OF_PAIRS: Mapping[str, str] = {
    **dict.fromkeys(("tokenize_row", "build_tokenized_answer", "tokenize_batch_element"), BY_ROWS),
    "get_batch_samples": "call trainer.trainer.generate(prompts)",
    "generate_from_model": "call trainer.trainer.generate(prompts)",
}
"""The same of trainers on pairs."""


OF_ARGUMENTS = (
    "is_encoder_decoder", "is_peft_model", "max_length", "max_prompt_length", "max_target_length", "desirable_weight",
    "max_completion_length", "padding_value", "label_pad_token_id", "truncation_mode", "precompute_ref_log_probs",
    "generate_during_eval", "reference_free", "model_adapter_name", "ref_adapter_name", "label_smoothing", "loss_type",
    "beta", "undesirable_weight", "dataset_num_proc", "neftune_noise_alpha", "optimize_device_cache", "pad_token_id",
    "decoder_start_token_id", "use_dpo_data_collator", "use_reward_data_collator", "max_seq_length",
    "dataset_batch_size",
)  # fmt: skip
"""Attributes that trainers of TRL have of their arguments."""


class Inputs(dict[str, Any]):
    """The inputs of `compute_loss`, which say what they have if something else is read."""

    def __missing__(self, name: str) -> None:
        raise ConfigError(
            f"a batch has no {name!r}; it has {', '.join(self)}, and no further columns of the dataset: decode its "
            "ids, or write a trainer of trainkit, whose attribute columns names what its rows keep"
        )


class Calling(Overridable):
    """A trainer of transformers, whose methods that a script overrides are called, or refused."""

    not_called: ClassVar[Mapping[str, str]] = NOT_CALLED
    absent: ClassVar[Mapping[str, str]] = ABSENT
    kept: ClassVar[tuple[str, ...]] = (*OF_ARGUMENTS, "args", "tokenizer", "train_dataset", "eval_dataset")
    settings: ClassVar[str] = "args"
    followed: ClassVar[tuple[str, ...]] = ("load_best_model_at_end",)
    of_loss: ClassVar[tuple[str, ...]] = ("compute_loss", "prediction_step")
    """Methods that make the loss; if one is overridden, it is that of `compute_loss`."""
    names: ClassVar[Mapping[str, str]] = {}
    """TRL's names for metrics of trainkit."""
    method: ClassVar[str]
    trainer: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.partition(".")[0] == __name__.partition(".")[0]:
            return
        from transformers import Trainer  # it takes a second to import

        known = {*CALLED, *BY_SCRIPTS, *cls.of_loss}
        for name in {*vars(cls)} - known:
            if callable(getattr(Trainer, name, None)) and not hasattr(object, name):
                raise ConfigError(f"{cls.__name__} overrides {name}, which trainkit does not call; {OTHERWISE}")

    def __setattr__(self, name: str, value: Any) -> None:
        read = (*self.of_loss, "evaluate", "create_optimizer", "create_scheduler")
        if name in read and "trainer" in vars(self):
            raise ConfigError(f"{name} is read when {type(self).__name__} is made; override it in a subclass")
        super().__setattr__(name, value)

    # ------------------------------------------------------------------------------------------------------- the loss

    def inputs_of(self, batch: Any) -> dict[str, Tensor]:
        """Return experience of trainkit as TRL's inputs of `compute_loss`."""
        raise NotImplementedError

    def store_metrics(self, metrics: Mapping[str, Any], train_eval: str = "train") -> None:
        """Keep metrics of the present micro-batch, which are logged as means over its rows."""
        self._stored = {**getattr(self, "_stored", {}), **metrics}

    def own_loss(self, batch: Any) -> tuple[Tensor, Metrics]:
        """Return the loss of trainkit, whatever is overridden."""
        self.trainer.models.build()
        found: tuple[Tensor, Metrics] = get_trainer(self.method).loss(self.trainer, batch)
        return found

    def called_loss(self, batch: Any) -> tuple[Tensor, Metrics]:
        """Return the loss of `compute_loss`, in evaluations that of `prediction_step`, with what they store."""
        model, inputs, self._stored = self.trainer.models.unwrapped.model, Inputs(self.inputs_of(batch)), {}
        if torch.is_grad_enabled():
            loss = self.compute_loss(model, inputs)
        else:
            loss = self.prediction_step(model, inputs, prediction_loss_only=False)[0]
        if not isinstance(loss, Tensor) or loss.dim():
            given = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else describe(loss)
            raise ConfigError(
                f"the loss of {type(self).__name__} should be a tensor with one number; it returned {given}"
            )
        found = {name.removeprefix("eval_"): float(value) for name, value in self._stored.items()}
        ours = {theirs: name for name, theirs in self.names.items()}
        rows = loss.new_ones(len(batch)).detach()
        return loss, {ours.get(name, name): Mean.of(value * rows) for name, value in found.items()}

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False) -> Any:
        """Return the loss of a micro-batch []."""
        raise NotImplementedError(self.not_called.get("compute_loss", ""))

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, Any, Any]:
        """Return the loss of a micro-batch of held-out samples [], and None in the place of logits and labels."""
        with torch.no_grad():
            return self.compute_loss(model, inputs), None, None

    def check_called(self, config: Any, model: Any) -> None:
        """Refuse settings with which an overridden loss would not be the one that is trained on.

        Raises:
            ConfigError: there are several processes, or what trainkit's own loss adds is asked for.
        """
        if not (overridden := [name for name in self.of_loss if self.overrides(name)]):
            return
        who = f"{type(self).__name__} overrides {', '.join(overridden)}"
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ConfigError(
                f"{who}, which is called in a single process alone; start one process, or override loss of a trainer "
                "of trainkit"
            )
        for name in ("packing", "neftune_alpha"):
            if getattr(config.method, name, False):
                raise ConfigError(f"{who}, and method.{name} is a part of the loss that it replaces; leave it out")

    def changes(self) -> dict[str, Any]:
        """Return the methods of trainkit's trainer that what is overridden takes the place of."""
        changed: dict[str, Any] = {}
        if self.overrides(*self.of_loss):
            changed["loss"] = lambda _, batch: self.called_loss(batch)
            changed["prepare_step"] = lambda _, batch: batch
        if self.overrides("evaluate"):
            changed["evaluate"] = lambda _: self.called_evaluation()
        return changed

    def called_evaluation(self) -> dict[str, float]:
        """Return the metrics of an overridden `evaluate` by the names of trainkit."""
        raise NotImplementedError

    def trainer_class(self) -> Any:
        """Return the trainer class of trainkit, with these methods."""
        base: Any = get_trainer(self.method)
        changed = self.changes()
        return type(base.__name__, (base,), changed) if changed else base

    # ---------------------------------------------------------------------------------------- optimizer and schedule

    def create_optimizer(self) -> torch.optim.Optimizer:
        """Return a new optimizer of ``args``, for subclasses that change it or return another."""
        self.optimizer = made = self._usual_optimizer()
        return made

    def _usual_optimizer(self) -> torch.optim.Optimizer:
        from transformers import Trainer

        kind, settings = Trainer.get_optimizer_cls_and_kwargs(self.args, self.model)
        decayed = {*Trainer.get_decay_parameter_names(None, self.model)}  # type: ignore[arg-type]
        parts: dict[bool, list[Tensor]] = {True: [], False: []}
        for name, parameter in self.model.named_parameters():
            parts[name in decayed].extend([parameter] if parameter.requires_grad else [])
        groups = [{"params": parts[one], "weight_decay": self.args.weight_decay * one} for one in parts]
        return kind(groups, **settings)  # type: ignore[no-any-return]

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        """Return a new schedule of ``args``, for subclasses that return another."""
        from transformers import get_scheduler

        self.lr_scheduler = get_scheduler(
            self.args.lr_scheduler_type,
            optimizer=optimizer or self.optimizer,
            num_warmup_steps=self.args.get_warmup_steps(num_training_steps),
            num_training_steps=num_training_steps,
            scheduler_specific_kwargs=dict(self.args.lr_scheduler_kwargs or {}),
        )
        return self.lr_scheduler

    def makers(self) -> dict[str, Any]:
        """Return functions that make optimizer and schedule by the methods that are overridden."""
        found: dict[str, Any] = {}
        if self.overrides("create_optimizer"):
            found["optimizer"] = lambda _: self._made("optimizer", self.create_optimizer())
        elif self.args.optim == "adafactor":  # that of torch has other rates
            found["optimizer"] = lambda _: self._usual_optimizer()
        if self.overrides("create_scheduler"):
            found["scheduler"] = lambda optimizer: self._made(
                "lr_scheduler", self.create_scheduler(self.trainer.total_steps, optimizer)
            )
        return found

    def _made(self, name: str, returned: Any) -> Any:
        """Return what a method returned; if it returned nothing, what it set as an attribute."""
        return self._own.get(name) if returned is None else returned


def named_sequences(sequences: Sequences, *, apart: bool = False, ignored: int = -100) -> dict[str, Tensor]:
    """Return ids, attention mask and labels [B, T] of sequences; of an encoder-decoder, ``apart``, labels [B, R]."""
    ids, real, chosen = sequences.input_ids, sequences.attention_mask, sequences.response_mask
    if not apart:
        labels = ids.masked_fill(~chosen, ignored)
        return {"input_ids": ids, "attention_mask": real.long(), "labels": labels}
    prompts, outputs = ([row[mask] for row, mask in zip(ids, masks, strict=True)] for masks in (real & ~chosen, chosen))
    ones = [torch.ones_like(row) for row in prompts]
    padded = [pad_sequence(each, batch_first=True) for each in (prompts, ones)]
    labels = pad_sequence(outputs, batch_first=True, padding_value=ignored)
    return {"input_ids": padded[0], "attention_mask": padded[1], "labels": labels}
