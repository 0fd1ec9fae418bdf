"""Trainers of trlX whose algorithm is trainkit's."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig

from trainkit.errors import ConfigError, DataError, describe, suggest
from trainkit.models import has_adapter
from trainkit.runs import free_directory
from trainkit_migrate import translate_sampling
from trainkit_migrate.shared import renaming_trackers
from trainkit_trlx.data.configs import TRLConfig, of_this_run, say_once
from trainkit_trlx.models.modeling_base import base_from, checked_model, checkpoint
from trainkit_trlx.overrides import own_class, replaced
from trainkit_trlx.pipeline.offline_pipeline import PromptPipeline, lacking, prompts_of
from trainkit_trlx.trainer import BaseRLTrainer
from trainkit_trlx.trainer.accelerate_base_trainer import AccelerateRLTrainer, language_model, prepared_tokenizer
from trainkit_trlx.trainer.bridge import Observer
from trainkit_trlx.trainer.functions import forbidding, known_arguments, prefixed, taking, taking_one
from trainkit_trlx.trainer.names import as_trlx

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)
LOOP = "trainkit's loop computes it; derive from AccelerateRLTrainer to have trlX's loop"
NOT_CALLED = {
    "create_train_dataloader": f"override make_experience or loss ({LOOP})",
    "setup_model": "override get_arch",
    "setup_optimizer": "give optimizer=, a function of the parameters, in train.trainer_kwargs",
    "setup_scheduler": "give scheduler=, a function of the optimizer, in train.trainer_kwargs",
    "decode": "change the text in reward_fn and metric_fn",
    "generate": f"change method.gen_kwargs, or register a hook make_sampler of trainkit ({LOOP})",
    "generate_eval": "change method.gen_kwargs",
    "save": "give save_fn to learn(), which gets the directory of each checkpoint; or override save_pretrained",
    "load": "name the checkpoint in config.train.resume_from_checkpoint, from which learn() goes on",
    "repeat_interleave": "change reward_fn and metric_fn",
    "_accumulate": f"trainkit accumulates exactly; set config.train.minibatch_size ({LOOP})",
}
"""Methods of trlX that a trainer of one's own cannot override, because trainkit does not call them, and what to do."""
SETTINGS = {
    "total_steps": "set config.train.total_steps",
    "n_inner_epochs": "set config.method.ppo_epochs",
    "kl_ctl": "set kl_ctl.value, and method.target of the configuration",
    "opt": "give optimizer= in train.trainer_kwargs",
    "scheduler": "give scheduler= in train.trainer_kwargs",
    "model": "override get_arch",
    "max_length": "set config.train.seq_length",
    "mb_size": "set config.train.minibatch_size",
    "num_mb": "set config.train.minibatch_size",
    "ref_model": "give reference= in train.trainer_kwargs",
    "tokenizer": "give tokenizer= in train.trainer_kwargs",
    "n_updates_per_batch": "set config.method.ppo_epochs",
    "ilql": "set config.method",
    **dict.fromkeys(("accelerator", "iter_count", "running_moments"), LOOP),
}
"""Properties that cannot be set, and what to do."""
TAKEN = "the adapter has this name; write another one"
NAMES = (
    *("trainer", "trainer_class", "algorithm", "fields", "heads", "of_method", "refused", "overrides", "own_of_method"),
    *("has_own_loss", "unused", "refresh", "take_store", "named", "generation", "from_checkpoint", "wrapped_model"),
    *("set_samples", "new_store"),
)
"""Public names that trainers of trlX do not have."""
NOT_SET = {
    "ref_mean": "no mean is subtracted, in trlX neither; remove it",
    "ref_std": "set config.method.ref_std",
    "generate_sweep_kwarg": "give config.method.gen_kwargs a list of values",
    "eval_dataloader": "call add_eval_pipeline",
    "prompt_iterator": "call add_prompt_pipeline",
    "prompt_dataloader": "call add_prompt_pipeline",
    "train_dataloader": f"fill store in make_experience ({LOOP})",
    "log_rollouts": "set config.train.rollout_logging_dir",
}
"""Attributes of trlX that trainkit does not read, and what to do."""

ABSENT = {
    "mb_count": "iter_count has the number of steps",
    "nth_evaluation": "learn(eval_fn=...) calls a function of yours at each evaluation",
    "generate_sweep_kwarg": "config.method.gen_kwargs has the list of values",
    "eval_dataloader": "eval_pipeline has the prompts of evaluations",
    "train_dataloader": "store.create_loader() gives batches",
    "prompt_iterator": "trainer.pipeline.take(start, count) gives the prompts in their order",
    "prompt_dataloader": "trainer.pipeline.take(start, count) gives the prompts in their order",
    "repeat_interleave": "write tensor.repeat_interleave(n, dim=0)",
    "log_rollouts": "rollout_logging_dir is None if rollouts are not written",
    "run_id": "it is the name of rollout_logging_dir",
    "ref_mean": "running_moments.mean is that of all scores; none is subtracted",
    "mean_kl": "history['policy/kl'] has the KL of each collection",
    "epoch_count": "progress has the place in the run",
    "generations_per_prompt": "pools has the scores of the responses to each prompt, by token ids",
}
"""Attributes of trlX's trainers that there are none of, and what to read instead."""
OF_WRITING = ("safe_serialization", "max_shard_size", "is_main_process", "save_function")
"""Arguments of `save_pretrained` that say how files are written, which trainkit does in its own way."""
GENERATION = {"generate_kwargs": "gen_kwargs", "generate_experience_kwargs": "gen_experience_kwargs"}
"""Attributes with arguments of `generate`, and the settings that they are made of."""


class Computed(AccelerateRLTrainer):
    """A trainer whose algorithm is trainkit's. ``trainer`` is the trainer of trainkit that computes.

    Attributes that this class does not have are those of ``trainer``, such as ``history`` and ``run_dir``.

    Args:
        config: the configuration of trlX. Until training begins, it may be changed.
        reward_fn: scores samples.
        metric_fn: measures samples at evaluations.
        logit_mask: bool [V, V] (row: the previous token), True = forbidden, unlike in trainkit.
        stop_sequences: strings that end a response.
        train_mode: without effect.
        sharding: how the model is divided among processes, ``train.sharding`` of trainkit; trlX left it to accelerate.
        log_names: the names by which trackers and the functions of `learn` get metrics, ``trlx`` or ``trainkit``. In
            the directory of the run, they are those of trainkit.
        **kwargs: arguments of trainkit's trainer, such as ``tokenizer``.
    """

    trainer_class: ClassVar[Any]
    """The class of ``trainer``."""
    algorithm: ClassVar[str]
    """Its method."""
    fields: ClassVar[tuple[str, ...]] = ("input_ids", "attention_mask")
    """What a batch has that `loss` takes."""
    heads: ClassVar[Mapping[str, type[Any]]] = {}
    """The modules that a model has besides the language model, which are trained."""
    of_method: ClassVar[tuple[str, ...]] = ()
    """The functions of the settings of the method that `loss` calls."""
    refused: ClassVar[Mapping[str, str]] = {}
    """Further methods that cannot be overridden, and what to do."""

    def __init__(
        self,
        config: TRLConfig,
        reward_fn: Callable[..., Any] | None = None,
        metric_fn: Callable[..., Any] | None = None,
        logit_mask: Any = None,
        stop_sequences: list[str] | None = None,
        train_mode: bool = False,
        sharding: Any = None,
        log_names: str = "trlx",
        **kwargs: Any,
    ) -> None:
        BaseRLTrainer.__init__(self, config, reward_fn, metric_fn, logit_mask, stop_sequences, train_mode)
        if log_names not in ("trlx", "trainkit"):
            raise ConfigError(f"log_names should be 'trlx' or 'trainkit'; given {log_names!r}")
        self._sharding, self._log_names = sharding, log_names
        self._further = known_arguments(type(self), kwargs, type(self).__name__)
        self._observer, self._replayed = Observer(self), dict[str, Callable[[], None]]()
        self.rollout_logging_dir: Path | None = None
        self._generation: dict[str, Any] = {}
        self._engine = self._make()
        prepared_tokenizer(self.tokenizer, config.tokenizer)
        self.generate_kwargs = self.generation(self.config.method.gen_kwargs)  # type: ignore[attr-defined]
        self.generate_experience_kwargs = None
        if (apart := getattr(config.method, "gen_experience_kwargs", None)) is not None:
            self.generate_experience_kwargs = self.generation(apart)
        self._generation = {name: dict(getattr(self, name) or {}) for name in GENERATION}
        found = "seq2seq" if self.trainer.model_config.is_encoder_decoder else "causal"
        if config.model.model_arch_type != found:
            log.warning(
                "model.model_arch_type is %r, and the model is trained as %r, which its own configuration says",
                config.model.model_arch_type,
                found,
            )
        if config.train.rollout_logging_dir is not None and int(os.environ.get("RANK", 0)) == 0:
            self.setup_rollout_logging(config)
        refuse_replaced(self, self.unused())
        self._made_of: Any = self._settings()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse methods of a trainer of one's own that would not be called.

        Raises:
            ConfigError: there is one; says what to do instead.
        """
        super().__init_subclass__(**kwargs)
        if own_class(cls) is not cls:
            known = {name: instead for name, instead in SETTINGS.items() if hasattr(own_class(cls), name)}
            refuse_replaced(cls, {**cls.unused(), **known})

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(None if name.startswith("_") else vars(self).get("_engine"), name)
        except AttributeError as error:
            known = [each for each in dir(type(self)) if not each.startswith("_")]
            said = f": {ABSENT[name]}" if name in ABSENT else suggest(name, known)
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{said}") from error

    @classmethod
    def unused(cls) -> dict[str, str]:
        """Return what a trainer of one's own cannot have, and what to do instead."""
        return {**dict.fromkeys(NAMES, TAKEN), **NOT_CALLED, **cls.refused}

    def overrides(self, name: str) -> bool:
        """Return whether the user has replaced a method of this name."""
        return bool(replaced(self, (name,)))

    @property
    def own_of_method(self) -> list[str]:
        """The functions of the settings of the method that the user has replaced, of those that `loss` calls."""
        return replaced(self.config.method, self.of_method)

    @property
    def has_own_loss(self) -> bool:
        """Whether the loss is the user's, of the trainer or of the settings of the method."""
        return self.overrides("loss") or "loss" in self.own_of_method

    # ------------------------------------------------------------------------------------------------- construction

    @property
    def trainer(self) -> Any:
        """The trainer of trainkit, of the configuration as it is when the model is loaded."""
        if "_made_of" in vars(self) and not self._engine.models.built:
            self.refresh()
        return self._engine

    def refresh(self) -> None:
        """Make the trainer of trainkit anew if what it was made of has changed since.

        Raises:
            ConfigError: its model is loaded already.
        """
        now, before, built = self._settings(), self._made_of, self._engine.models.built
        if now == before or (built and {**now, "fields": None} == {**before, "fields": None}):  # loading changes them
            return
        if built:
            raise ConfigError(
                "the configuration was changed after the model was loaded, and training would not follow it; change it "
                "before reading model or opt and before generate, or make a new trainer"
            )
        self._made_of, tokenizer = now, self._engine.tokenizer
        try:
            self._engine = self._make(**({"tokenizer": tokenizer} if before["tokenizer"] == now["tokenizer"] else {}))
            prepared_tokenizer(self.tokenizer, self.config.tokenizer)
            for again in self._replayed.values():
                again()
        except Exception:
            self._made_of = before
            raise

    def _settings(self) -> dict[str, Any]:
        """Return what the trainer of trainkit is made of, to compare."""
        found = self.config.to_dict()
        for name in ("pipeline", "trainer_kwargs", "rollout_logging_dir"):  # read by `train`, or at construction
            del found["train"][name]
        method = own_class(type(self.config.method))  # settings of one's own may change at any time
        found["method"] = {each.name: found["method"].get(each.name) for each in dataclasses.fields(method)}
        model = found["model"]["model_path"]
        found["fields"] = model.to_dict() if isinstance(model, PreTrainedConfig) else {}
        found |= {"name": method, "own": [self.has_own_loss, *self.own_of_method]}
        return found | {name: dict(getattr(self, name) or {}) for name in self._generation}

    def _translated(self) -> Any:
        """Return the configuration of trainkit, without the model and the directory."""
        config = copy.copy(self.config)
        config.method = copy.copy(config.method)
        for name, first in self._generation.items():
            left, now = getattr(config.method, GENERATION[name], None), getattr(self, name) or {}
            if first != now:
                kept = {key: value for key, value in (left or {}).items() if key in now}
                setattr(config.method, GENERATION[name], {**kept, **self._changed(name)})
        found = config.translated(self.metric_fn is not None, trainer=own_class(type(self)).__name__)
        changed = {} if self._sharding is None else {"sharding": self._sharding}
        if self.has_own_loss or self.own_of_method:  # called for as many rows as in trlX
            changed["microbatch_size"] = self.mb_size
        return found.evolve(train=changed)

    def _make(self, **given: Any) -> Any:
        """Return trainkit's trainer, with arguments besides those that this one was given."""
        given = {**self._further, **given}
        translated = self._with_model(self._translated(), given)
        alone = int(os.environ.get("WORLD_SIZE", 1)) == 1
        if translated.train.resume is None and alone:
            translated = translated.evolve(train={"run_dir": free_directory(self.config.train.checkpoint_dir)})
        callbacks = [self._observer, *given.pop("callbacks", ())]
        if self._log_names == "trlx":
            entries, translated = translated.train.trackers, translated.evolve(train={"trackers": []})
            if int(os.environ.get("RANK", 0)) == 0:
                callbacks += renaming_trackers(entries, self.named)
        if "tokenizer" in given:
            translated = translated.evolve(tokenizer={"tokenizer_path": None})
        made = self.trainer_class(
            translated,
            outer=self,
            reward_fn=taking(self.reward_fn, "reward_fn", self._separator),
            metric_fn=prefixed(self.metric_fn, self._separator),
            logit_mask=forbidding(self.logit_mask),
            stop_sequences=self.stop_sequences or None,
            callbacks=callbacks,
            **given,
        )
        if self.has_own_loss and hasattr(made.parallel.sharding, "averages_manually"):
            made.parallel.sharding.averages_manually = True  # such a loss may run the model around DDP
        return made

    def _with_model(self, translated: Any, given: dict[str, Any]) -> Any:
        """Return the configuration with the model: a path, the fields of a config, or none if ``given`` gets one."""
        config, model = self.config, given.pop("model", None)
        if self.overrides("get_arch"):
            model = self.get_arch(config)
            if has_adapter(language_model(model)):
                translated = translated.evolve(model={"peft_config": None})
        model = config.model.model_path if model is None else model
        if hasattr(model, "model_type") and hasattr(model, "to_dict"):  # a transformers config: random weights
            return translated.evolve(model={"model_path": {**model.to_diff_dict(), "model_type": model.model_type}})
        if isinstance(model, str):
            seq2seq = config.model.model_arch_type == "seq2seq"
            model = self.from_checkpoint(model, seq2seq) if checkpoint(model) else None
            if model is None:
                return translated
            if (frozen := getattr(model, "frozen_head", None)) is not None:
                given.setdefault("reference", frozen)
        given["model"] = checked_model(model, self.heads)
        return translated.evolve(model={"model_path": None})

    def _separator(self) -> str:
        """Return what stands between prompt and output in the samples of an encoder-decoder, as in trlX."""
        return (self.tokenizer.sep_token or "<sep>") if self.trainer.model_config.is_encoder_decoder else ""

    def setup_rollout_logging(self, config: TRLConfig) -> None:
        """Make the directory of this run's rollouts below ``train.rollout_logging_dir``, with the configuration."""
        directory = Path(str(config.train.rollout_logging_dir)) / f"run-{uuid.uuid4()}"
        directory.mkdir(parents=True)
        text = json.dumps(config.to_dict(), indent=2, default=str)
        (directory / "config.json").write_text(text, encoding="utf-8")
        self.rollout_logging_dir = directory

    @staticmethod
    def from_checkpoint(path: str, seq2seq: bool) -> Any:
        """Return the model that trlX has saved in a directory, as the argument ``model`` of trainkit's trainer.

        None: trainkit can load it from the directory.
        """
        base = base_from(path, checkpoint(path), AutoModelForSeq2SeqLM if seq2seq else AutoModelForCausalLM)
        return None if base is path else base

    def get_arch(self, config: TRLConfig) -> Any:
        """Return a new language model of the configuration, whose weights trainkit trains if this is overridden."""
        auto: Any = AutoModelForSeq2SeqLM if config.model.model_arch_type == "seq2seq" else AutoModelForCausalLM
        path, kwargs = config.model.model_path, config.model.model_extra_configs
        return auto.from_pretrained(path, **kwargs) if isinstance(path, str) else auto.from_config(path)

    # ---------------------------------------------------------------------------------------------------- attributes

    @property
    def tokenizer(self) -> Any:
        """The tokenizer."""
        return self.trainer.tokenizer

    @property
    def max_length(self) -> int:  # type: ignore[override]
        """The most tokens of prompt and response."""
        return self.config.train.seq_length

    @property
    def mb_size(self) -> int:  # type: ignore[override]
        """The rows of a micro-batch."""
        return self.config.train.minibatch_size or self.config.train.batch_size

    @property
    def num_mb(self) -> int:  # type: ignore[override]
        """The micro-batches of a step."""
        return self.config.train.batch_size // self.mb_size

    @property
    def accelerator(self) -> Any:
        """The accelerator."""
        return self.trainer.accelerator

    @property
    def model(self) -> Any:
        """The model that is trained, as trlX has it: with a value head or heads of ILQL around a language model.

        Raises:
            ConfigError: it is divided among processes.
        """
        self.trainer.models.build()
        sharding = self.trainer.parallel.sharding
        if sharding.keeps_sharded and not sharding.gathered:
            raise ConfigError(
                f"model of {type(self).__name__} is divided among processes; read it within "
                "'with trainer.sharding.unsharded():', or to run it in a loss remove sharding from train.trainer_kwargs"
            )
        if getattr(self, "_model_of", None) is not self.trainer:
            self._model_of, self._model = self.trainer, self.wrapped_model(self.trainer.unwrapped)
        return self._model

    def wrapped_model(self, policy: Any) -> Any:
        """Return the model of trlX around a policy of trainkit, whose weights it shares."""
        return policy.model

    @property
    def opt(self) -> Any:
        """The optimizer."""
        self.trainer.models.build()
        return self.trainer.models.optimizer

    @property
    def scheduler(self) -> Any:
        """The schedule of the learning rate."""
        self.trainer.models.build()
        return self.trainer.models.scheduler

    @property
    def iter_count(self) -> int:  # type: ignore[override]
        """The number of optimizer steps so far."""
        return int(self.trainer.progress.step)

    @property
    def n_inner_epochs(self) -> int:
        """The passes over a collection; 1 of samples, of which an epoch is one pass."""
        return int(self.trainer.passes) if self.trainer.online else 1

    n_updates_per_batch = n_inner_epochs

    @property
    def total_steps(self) -> int:  # type: ignore[override]
        """The number of optimizer steps of the run."""
        return int(self.trainer.total_steps)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. Functions take effect at once; a mask and stop sequences until the model is loaded.

        Raises:
            ConfigError: it is one of trainkit, which cannot be set.
        """
        where = f"{name} of {type(self).__name__}"
        if isinstance(getattr(type(self), name, None), property) and getattr(type(self), name).fset is None:
            raise ConfigError(
                f"{where} is trainkit's and cannot be set: {SETTINGS.get(name, 'the adapter has this name')}"
            )
        made = "_made_of" in vars(self)
        if made and name in (unused := {**NOT_SET, **self.unused()}):
            raise ConfigError(f"{where} would not be used: {unused[name]}")
        super().__setattr__(name, value)
        if made and name == "reward_fn":
            self._engine.reward_fn = taking(value, name, self._separator)
        elif made and name == "metric_fn":
            self._engine.metric_fn = prefixed(value, self._separator)
        elif made and name == "eval_pipeline":
            self._replayed["eval"] = partial(self._set_eval, value)
            self._set_eval(value)
        elif made and name in ("logit_mask", "stop_sequences", "get_arch"):
            self._made_of = {**self._made_of, name: value}

    # ---------------------------------------------------------------------------------------------------------- data

    def add_prompt_pipeline(self, pipeline: Any) -> None:
        """Set the prompts to train on: a pipeline, or the prompts. Those that are too long are cut as trlX does."""
        self._replayed["prompts"] = partial(self._set_prompts, pipeline)
        self._set_prompts(pipeline)

    def _set_prompts(self, pipeline: Any) -> None:
        self.trainer.add_prompt_pipeline(self._cut(pipeline, self.trainer.text.encode.budget))

    def add_eval_pipeline(self, eval_pipeline: Any) -> None:
        """Set the prompts of evaluations: a pipeline, or the prompts. Those that are too long are cut."""
        self.eval_pipeline = eval_pipeline

    def _set_eval(self, pipeline: Any) -> None:
        text, rollout = self.trainer.text, self.trainer.config.rollout
        room = text.encode.budget
        if room is not None and not text.is_encoder_decoder:
            asked = rollout.eval_kwargs.get("max_new_tokens", rollout.max_new_tokens)
            room = min(room, text.limit - (max(asked) if isinstance(asked, list) else asked))
        self.trainer.add_eval_pipeline(self._cut(pipeline, room))

    def _cut(self, pipeline: Any, room: int | None) -> list[Any]:
        """Return prompts as text of at most ``room`` tokens, those that the tokenizer adds included."""
        tokenizer = self.tokenizer
        given = prompts_of(pipeline, tokenizer, getattr(self.config.method, "chunk_size", self.config.train.batch_size))
        if room is None or room < 1:  # trainkit says that there is no room
            return given
        seq2seq = self.trainer.model_config.is_encoder_decoder
        added = 0 if seq2seq else len(tokenizer("")["input_ids"])
        return PromptPipeline(given, max(room - added, 1), tokenizer, add_special_tokens=seq2seq).given

    # ------------------------------------------------------------------------------------------ sampling and decoding

    def generate(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        """Return prompts and responses as token ids [B, T], padded with the padding id as `generate` of transformers.

        Of an encoder-decoder, they are the token that its decoder starts with, and the response.

        Args:
            input_ids: [B, P].
            attention_mask: [B, P], which of ``input_ids`` are real.
            **kwargs: arguments of `generate` of transformers, over ``generate_experience_kwargs`` or, without these,
                ``generate_kwargs``.

        Raises:
            ConfigError: an argument has no counterpart in trainkit.
        """
        name = "generate_kwargs" if self.generate_experience_kwargs is None else "generate_experience_kwargs"
        return self._generated(input_ids, attention_mask, {**self._changed(name), **kwargs})

    def generate_eval(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        """Return what `generate` does, with the arguments of evaluations, ``generate_kwargs``."""
        settings = self.trainer.config.rollout.eval_kwargs.items()
        swept = {name: value[0] for name, value in settings if isinstance(value, list) and name[:5] != "stop_"}
        evaluated = {**dict(settings), **swept}
        return self._generated(input_ids, attention_mask, {**self._changed("generate_kwargs"), **kwargs}, evaluated)

    def _generated(
        self,
        input_ids: Any,
        attention_mask: Any,
        kwargs: dict[str, Any],
        settings: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        """Generate with arguments of transformers over ``settings`` of trainkit."""
        input_ids, copies = _ids(input_ids), kwargs.pop("num_return_sequences", 1)
        found = translate_sampling(kwargs).accepted("arguments", lambda remark: say_once(f"generate(): {remark}"))
        input_ids = input_ids.repeat_interleave(copies, dim=0)
        if attention_mask is not None:
            attention_mask = _ids(attention_mask).repeat_interleave(copies, dim=0)
        chosen, text = {**settings, **found}, self.trainer.text
        with self._whole_prompts():
            if text.limit is not None and not text.is_encoder_decoder:
                real = input_ids.shape[1] if attention_mask is None else int(attention_mask.sum(1).max())
                room = text.limit - real
                if room < 1:
                    raise DataError(
                        f"a prompt has {real} tokens, and at most {text.limit - 1} leave room for a response"
                    )
                chosen["max_new_tokens"] = min(self.trainer.settings(**chosen).max_new_tokens, room)
            rollouts = self.trainer.generate(input_ids=input_ids, attention_mask=attention_mask, **chosen)
        pad = self.tokenizer.pad_token_id
        if text.is_encoder_decoder:
            start = self.trainer.model_config.decoder_start_token_id
            rows = [torch.cat([ids.new_tensor([start]), ids]) for ids in rollouts.responses]
            return pad_sequence(rows, batch_first=True, padding_value=pad)
        return rollouts.sequences.input_ids.masked_fill(~rollouts.sequences.attention_mask, pad)

    @contextmanager
    def _whole_prompts(self) -> Iterator[None]:
        """Leave prompts within the block as they are, also if they leave less room than ``max_new_tokens``."""
        encode, limit = self.trainer.text.encode, self.trainer.text.limit
        budget, encode.budget = encode.budget, limit
        try:
            yield
        finally:
            encode.budget = budget

    def generation(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments of `generate` as trlX keeps them."""
        return {"eos_token_id": self.tokenizer.eos_token_id, "pad_token_id": self.tokenizer.pad_token_id, **given}

    def _changed(self, name: str) -> dict[str, Any]:
        """Return what was changed in ``generate_kwargs`` or ``generate_experience_kwargs`` since construction."""
        first = self._generation.get(name, {})
        return {key: value for key, value in (getattr(self, name, None) or {}).items() if first.get(key) != value}

    def decode(
        self, prompts: Any, samples: Any, prompt_sizes: Any = None, append_eos_token: bool = False
    ) -> tuple[list[str], list[str], list[str]]:
        """Decode token ids to (samples, prompts, outputs), as `AccelerateRLTrainer.decode` does."""
        prompts, samples = ([_ids(ids, 1) for ids in each] for each in (prompts, samples))
        sizes = [len(ids) for ids in prompts] if prompt_sizes is None else [int(size) for size in prompt_sizes]
        if not self.trainer.model_config.is_encoder_decoder:
            return self.trainer.decode(prompts, samples, sizes, append_eos_token)  # type: ignore[no-any-return]
        _, texts, outputs = self.trainer.decode(prompts, samples, [0] * len(sizes), append_eos_token)
        return [text + self._separator() + output for text, output in zip(texts, outputs, strict=True)], texts, outputs

    # ---------------------------------------------------------------------------------------------------- experience

    def loss(self, batch: Any) -> tuple[Any, dict[str, float]]:
        """Return the loss [] of a batch, and its statistics by the names of trlX.

        A batch that the loop gives has what belongs to its whole collection, such as whitened advantages; they are
        those of the batch alone if it was changed, or comes from elsewhere.
        """
        if missing := lacking(batch, self.fields):
            raise ConfigError(
                f"loss() takes a batch with {', '.join(self.fields)}, and {', '.join(missing)} is missing; given "
                f"{describe(batch)}"
            )
        self.refresh()
        self.trainer.models.build()
        experience = self.trainer.experience_of(batch).to(self.accelerator.device)
        experience = self.trainer.of_method(experience)
        if "loss" in self.own_of_method:
            return self.trainer.loss_of_method(experience)  # type: ignore[no-any-return]
        loss, metrics = self.trainer.measured_loss(experience)
        found = {"loss/total": float(loss.detach()), **{name: metric.compute() for name, metric in metrics.items()}}
        return loss, as_trlx(found, self.algorithm)

    def prepare_learning(self) -> None:
        """Do nothing; called before the first step."""

    def post_backward_callback(self) -> None:
        """Do nothing; called after each pass over the store."""

    def post_epoch_callback(self) -> None:
        """Do nothing; called after all passes over a collection. trainkit makes the next one."""

    # ------------------------------------------------------------------------------------------------------ training

    def named(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return metrics of trainkit by the names that are logged."""
        return as_trlx(metrics, self.algorithm) if self._log_names == "trlx" else dict(metrics)

    def evaluate(self) -> dict[str, float]:
        """Evaluate on the evaluation prompts. Return means by the names of trainkit, and by those that are logged."""
        self.refresh()
        found = self.trainer.measured()
        return {**found, **self.named(found)}

    def learn(
        self,
        log_fn: Callable[[dict[str, float]], Any] | None = None,
        save_fn: Callable[[str], Any] | None = None,
        eval_fn: Callable[[dict[str, float]], Any] | None = None,
    ) -> None:
        """Train to the end, and call the functions as `AccelerateRLTrainer.learn` does.

        Raises:
            ConfigError: one of them takes other arguments.
        """
        self._observer.log_fn = taking_one(log_fn, "log_fn", "the metrics by their names")
        self._observer.save_fn = taking_one(save_fn, "save_fn", "the directory of the checkpoint")
        self._observer.eval_fn = taking_one(eval_fn, "eval_fn", "the metrics of the evaluation")
        self.refresh()
        self.prepare_learning()
        self.take_store()
        self.trainer.learn()

    def take_store(self) -> None:
        """Let trainkit train on what is in ``store``, where it does not make that itself."""

    # -------------------------------------------------------------------------------------------------------- saving

    def save_pretrained(self, directory: str | None = None, **kwargs: Any) -> Any:
        """Export the model for transformers, by default to ``hf_model`` in the directory of the run.

        Raises:
            ConfigError: there are arguments that change what is written; those of how it is written have no effect.
        """
        refuse_arguments("save_pretrained", {name: v for name, v in kwargs.items() if name not in OF_WRITING})
        if without_effect := [name for name in kwargs if (name, kwargs[name]) != ("safe_serialization", True)]:
            say_once(
                f"{', '.join(without_effect)} of save_pretrained has no effect: weights are written as safetensors"
            )
        self.trainer.begin()
        return self.trainer.save_pretrained(directory or self.trainer.run_dir / "hf_model")

    def save(self, directory: str | None = None, **kwargs: Any) -> Any:
        """Write a checkpoint of the run, by default to its directory.

        Raises:
            ConfigError: there are further arguments.
        """
        refuse_arguments("save", kwargs)
        return self.trainer.save(directory)

    def load(self, directory: str | Path | None = None, allow_drift: bool = False, **kwargs: Any) -> None:
        """Restore a checkpoint, or the newest one under a directory, by default that of the run.

        Args:
            directory: where the checkpoint is; ``checkpoint_<step>`` as in trlX stands for that of the step.
            allow_drift: whether settings that affect training may differ from those of the checkpoint.
            **kwargs: those of accelerate are refused.

        Raises:
            ConfigError: there are further arguments.
        """
        refuse_arguments("load", kwargs)
        trainer = self.trainer
        trainer.run.allow_drift |= allow_drift
        trainer.load(of_this_run(str(directory or trainer.config.train.run_dir)))


def refuse_replaced(owner: Any, instead: Mapping[str, str]) -> None:
    """Raise a `ConfigError` if a user has replaced one of the functions of a class or an object; says what to do."""
    for name in replaced(owner, instead):
        cls = owner if isinstance(owner, type) else type(owner)
        raise ConfigError(f"{cls.__name__}.{name} would not be used: {instead[name]}")


def _ids(given: Any, dimensions: int = 2) -> Tensor:
    """Return token ids as a tensor of so many dimensions.

    Raises:
        DataError: they are something else.
    """
    try:
        found = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        found = torch.empty(0)
    if found.dim() != dimensions or found.is_floating_point():
        shape = (
            "[B, T], as tokenizer(texts, padding=True, return_tensors='pt') returns them" if dimensions > 1 else "[T]"
        )
        raise DataError(f"token ids should be integers {shape}; given {describe(given)}")
    return found


def refuse_arguments(method: str, given: Mapping[str, Any]) -> None:
    """Raise a `ConfigError` if a method is given arguments that trlX passed on."""
    if given:
        raise ConfigError(
            f"{method}() takes the directory alone, and is given {', '.join(given)}, which trlX passed on to "
            "transformers or accelerate; remove it, or call a method of model.base_model or accelerator yourself"
        )
