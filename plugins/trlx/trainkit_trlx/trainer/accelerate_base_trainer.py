"""The loop of trlX, for trainers of one's own that bring model, loss and data."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from accelerate import Accelerator
from transformers import AutoTokenizer

from trainkit.errors import ConfigError, NonFiniteError
from trainkit_trlx.data.configs import TokenizerConfig, TRLConfig
from trainkit_trlx.pipeline import MiniBatchIterator
from trainkit_trlx.pipeline.offline_pipeline import PromptPipeline, checked_prompts
from trainkit_trlx.trainer import BaseRLTrainer, register_trainer
from trainkit_trlx.trainer.functions import prefixed, taking, taking_one
from trainkit_trlx.utils import get_optimizer_class, get_scheduler_class, infinite_dataloader
from trainkit_trlx.utils.modeling import flatten_dict, freeze_bottom_causal_layers, freeze_bottom_seq2seq_layers

log = logging.getLogger(__name__)


def prepared_tokenizer(tokenizer: Any, config: TokenizerConfig) -> Any:
    """Return a tokenizer with the sides of a configuration, and EOS for padding if it has no padding token."""
    tokenizer.padding_side, tokenizer.truncation_side = config.padding_side, config.truncation_side
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def language_model(model: Any) -> Any:
    """Return the language model below the heads of a model of trlX; one without heads as it is."""
    return model.base_model if hasattr(model, "v_head") or hasattr(model, "ilql_heads") else model


def _sum(values: Any) -> float:
    return float(torch.as_tensor(values, dtype=torch.float64).sum())


@register_trainer
class AccelerateRLTrainer(BaseRLTrainer):
    """Base class of all trainers. A trainer of one's own implements `get_arch` and `loss`, and fills ``store``.

    `learn` calls its methods in the order of trlX, on accelerate. Its checkpoints are those of accelerate: a run that
    is resumed has neither the order of the data nor the rollouts of the first one, as in trlX. Trainers that derive
    from `AcceleratePPOTrainer` and its like are run by trainkit.

    Args:
        config: the configuration; its method may be a registered class of one's own.
        **kwargs: those of `BaseRLTrainer`.
    """

    n_inner_epochs: Any = 1
    """The passes over the store in an epoch."""
    generate_experience_kwargs: dict[str, Any] | None

    def __init__(self, config: TRLConfig, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        train, method = config.train, config.method
        self.max_length, self.mb_size = train.seq_length, train.minibatch_size or train.batch_size
        self.num_mb = train.batch_size // self.mb_size
        if train.batch_size % self.mb_size:
            raise ConfigError(
                f"train.minibatch_size is {self.mb_size}, and train.batch_size {train.batch_size}; give a divisor of it"
            )
        self.iter_count = self.nth_evaluation = self.total_steps = 0
        self.accelerator = Accelerator(log_with=train.tracker, project_dir=train.logging_dir or train.checkpoint_dir)
        launched = int(os.environ.get("WORLD_SIZE", 1))
        if launched != self.accelerator.num_processes:
            raise ConfigError(
                f"{launched} processes were launched, and accelerate treats each as a separate run; launch with "
                "'accelerate launch', or on CPUs set ACCELERATE_USE_CPU=true"
            )
        path, more = config.tokenizer.tokenizer_path, config.tokenizer.tokenizer_extra_configs
        self.tokenizer = prepared_tokenizer(AutoTokenizer.from_pretrained(path, **more), config.tokenizer)
        ends = {"eos_token_id": self.tokenizer.eos_token_id, "pad_token_id": self.tokenizer.pad_token_id}
        self.generate_kwargs: dict[str, Any] = {**ends, **getattr(method, "gen_kwargs", {})}
        apart = getattr(method, "gen_experience_kwargs", None)
        self.generate_experience_kwargs = None if apart is None else {**ends, **apart}
        self.eval_dataloader: Any = None
        self.model: Any = self.setup_model()
        self.opt: Any = self.setup_optimizer()
        self.scheduler: Any = self.setup_scheduler()
        if train.tracker is not None:
            names = {"entity": train.entity_name, "group": train.group_name, "name": train.run_name, "tags": train.tags}
            self.accelerator.init_trackers(
                train.project_name,
                config={k: v for k, v in flatten_dict(config.to_dict()).items() if isinstance(v, int | float | str)},
                init_kwargs={"wandb": {name: value for name, value in names.items() if value}},
            )

    # ------------------------------------------------------------------------------------- what a trainer implements

    def get_arch(self, config: TRLConfig) -> Any:
        """Return the model."""
        raise NotImplementedError(f"{type(self).__name__} has no get_arch(config); write it: it returns the model")

    def loss(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Return the loss [] of a micro-batch, a mean over its rows, and statistics by name."""
        raise NotImplementedError(
            f"{type(self).__name__} has no loss(batch); write it: it returns the loss and a dict of statistics"
        )

    def create_train_dataloader(self) -> Any:
        """Return a loader of batches for one pass; by default of those of the store, shuffled."""
        if self.store is None or not len(self.store):
            raise ConfigError(
                f"{type(self).__name__} has nothing to train on: fill self.store in make_experience, or write "
                "create_train_dataloader"
            )
        return self.accelerator.prepare(self.store.create_loader(self.config.train.batch_size, shuffle=True))

    def prepare_learning(self) -> None:
        """Prepare model, optimizer and prompts of evaluations for accelerate, and set ``total_steps``."""
        self.model, self.opt = self.accelerator.prepare(self.model, self.opt)
        if self.eval_pipeline is not None:
            loader = self.eval_pipeline.create_loader(self.config.train.batch_size)
            self.eval_dataloader = self.accelerator.prepare_data_loader(loader)
        steps = self.config.train.epochs * self.n_inner_epochs * len(self.create_train_dataloader())
        self.total_steps = min(steps, self.config.train.total_steps)

    def post_backward_callback(self) -> None:
        """Do nothing; called after each pass over the store."""

    def post_epoch_callback(self) -> None:
        """Do nothing; called after all passes of an epoch."""

    # -------------------------------------------------------------------------------------------------- construction

    def setup_model(self) -> Any:
        """Return the model of `get_arch`, with the lower layers frozen that the configuration names."""
        model, config = self.get_arch(self.config), self.config.model
        inner = language_model(model)
        if config.peft_config is None:
            seq2seq = config.model_arch_type == "seq2seq"
            freeze = freeze_bottom_seq2seq_layers if seq2seq else freeze_bottom_causal_layers
            freeze(inner, config.num_layers_unfrozen)
        return model

    def setup_optimizer(self) -> Any:
        """Return the optimizer of the configuration."""
        make = get_optimizer_class(self.config.optimizer.name)  # type: ignore[arg-type]
        return make(self.model.parameters(), **self.config.optimizer.kwargs)

    def setup_scheduler(self) -> Any:
        """Return the learning-rate schedule of the configuration."""
        return get_scheduler_class(self.config.scheduler.name)(self.opt, **self.config.scheduler.kwargs)  # type: ignore[arg-type]

    def add_eval_pipeline(self, eval_pipeline: Any) -> None:
        """Set the prompts of evaluations: a pipeline, or the prompts."""
        self.eval_pipeline = self._pipeline(eval_pipeline)

    def add_prompt_pipeline(self, pipeline: Any) -> None:
        """Set the prompts to sample from, of which ``prompt_iterator`` gives batches without end."""
        size = getattr(self.config.method, "chunk_size", self.config.train.batch_size)
        loader = self.accelerator.prepare_data_loader(self._pipeline(pipeline).create_loader(size, shuffle=True))
        self.prompt_iterator = infinite_dataloader(loader)

    def _pipeline(self, given: Any) -> Any:
        if hasattr(given, "create_loader"):
            return given
        room = self.max_length - self.generate_kwargs.get("max_new_tokens", 0)
        return PromptPipeline(checked_prompts(given), room, self.tokenizer)

    # ------------------------------------------------------------------------------------------ sampling and decoding

    def generate(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        """Return prompts and responses as token ids [B, T], by the model's own ``generate``.

        Args:
            input_ids: [B, P].
            attention_mask: [B, P], which of ``input_ids`` are real.
            **kwargs: its arguments, over ``generate_experience_kwargs`` or, without these, ``generate_kwargs``.
        """
        return self._generated(
            input_ids, attention_mask, {**(self.generate_experience_kwargs or self.generate_kwargs), **kwargs}
        )

    def generate_eval(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        """Return what `generate` does, with the arguments of evaluations, ``generate_kwargs``."""
        return self._generated(input_ids, attention_mask, {**self.generate_kwargs, **kwargs})

    @torch.no_grad()
    def _generated(self, input_ids: Any, attention_mask: Any, kwargs: dict[str, Any]) -> Any:
        device, model = self.accelerator.device, self.accelerator.unwrap_model(self.model)
        mask = attention_mask if attention_mask is None else attention_mask.to(device)
        return model.generate(input_ids=input_ids.to(device), attention_mask=mask, **kwargs)

    def decode(
        self, prompts: Any, samples: Any, prompt_sizes: Any = None, append_eos_token: bool = False
    ) -> tuple[list[str], list[str], list[str]]:
        """Decode token ids to (samples, prompts, outputs), with outputs cut at the first stop sequence.

        Args:
            prompts: ids of the prompts [B, P], or a list of them.
            samples: ids of prompt and response, of an encoder-decoder those of the response; [B, T] or a list.
            prompt_sizes: how many ids of each sample are its prompt; the width of the prompts without it.
            append_eos_token: whether EOS stands after outputs that ended with it or were cut at a stop sequence.
        """
        tokenizer, seq2seq = self.tokenizer, self.config.model.model_arch_type == "seq2seq"
        sizes = [len(prompt) for prompt in prompts] if prompt_sizes is None else prompt_sizes
        asked = [
            tokenizer.decode(ids[:size], skip_special_tokens=True) for ids, size in zip(prompts, sizes, strict=True)
        ]
        outputs = []
        for ids, size in zip(samples, sizes, strict=True):
            written = ids if seq2seq else ids[size:]
            text = whole = tokenizer.decode(written, skip_special_tokens=True)
            for stop in self.stop_sequences or ():
                text = text.split(stop)[0].rstrip() if stop in text else text
            ended = len(written) > 0 and int(written[-1]) in (tokenizer.eos_token_id, tokenizer.pad_token_id)
            outputs.append(text + tokenizer.eos_token if append_eos_token and (ended or text != whole) else text)
        between = (tokenizer.sep_token or "<sep>") if seq2seq else ""
        return [prompt + between + text for prompt, text in zip(asked, outputs, strict=True)], asked, outputs

    # ------------------------------------------------------------------------------------------------------ training

    def evaluate(self) -> dict[str, float]:
        """Sample responses to the evaluation prompts, and return means of reward and metric function by name."""
        if self.eval_dataloader is None:
            return {}
        swept = [name for name, value in self.generate_kwargs.items() if isinstance(value, list)][:1]
        stats: dict[str, float] = {}
        for value in self.generate_kwargs[swept[0]] if swept else [None]:
            chosen, suffix = ({swept[0]: value}, f"@{swept[0]}={value}") if swept else ({}, "")
            stats |= self._evaluated(chosen, suffix)
        self.nth_evaluation += 1
        return stats

    def _evaluated(self, chosen: dict[str, Any], suffix: str) -> dict[str, float]:
        started, rows = perf_counter(), list[tuple[list[int], list[int], dict[str, Any]]]()
        for batch in self.eval_dataloader:
            columns = {name: values for name, values in batch.items() if name not in ("input_ids", "attention_mask")}
            samples = self.generate_eval(batch["input_ids"], batch["attention_mask"], **chosen)
            prompts = batch["input_ids"].tolist()
            further = [{name: values[at] for name, values in columns.items()} for at in range(len(prompts))]
            mine = list(zip(prompts, samples.tolist(), further, strict=True))
            rows += self.accelerator.gather_for_metrics(mine, use_gather_object=True)  # each row once
        texts = self.decode([prompt for prompt, *_ in rows], [sample for _, sample, _ in rows])
        given: dict[str, Any] = dict(zip(("samples", "prompts", "outputs"), texts, strict=True))
        given |= {name: [columns[name] for *_, columns in rows] for name in rows[0][2]}
        stats = {f"time/generate{suffix}": perf_counter() - started}
        if (reward_fn := taking(self.reward_fn, "reward_fn")) is not None:
            scores = [_sum(score) for score in reward_fn(**given, tokenizer=self.tokenizer)]
            stats[f"reward/mean{suffix}"] = sum(scores) / len(scores)
        if (metric_fn := prefixed(self.metric_fn)) is not None:
            found = metric_fn(**given, tokenizer=self.tokenizer)
            stats |= {f"{name}{suffix}": _sum(xs) / max(torch.as_tensor(xs).numel(), 1) for name, xs in found.items()}
        return stats

    def learn(
        self,
        log_fn: Callable[[dict[str, float]], Any] | None = None,
        save_fn: Callable[[str], Any] | None = None,
        eval_fn: Callable[[dict[str, float]], Any] | None = None,
    ) -> None:
        """Train for ``config.train.epochs`` epochs, or ``total_steps`` steps if these are fewer.

        Args:
            log_fn: called with the statistics of every step and every evaluation.
            save_fn: called with the directory of every checkpoint.
            eval_fn: called with the statistics of every evaluation.

        Raises:
            ConfigError: one of them takes other arguments, or there is nothing to train on.
            NonFiniteError: a loss is not finite.
        """
        self._log = taking_one(log_fn, "log_fn", "the metrics by their names")
        self._saved = taking_one(save_fn, "save_fn", "the directory of the checkpoint")
        self._evaluated_fn = taking_one(eval_fn, "eval_fn", "the metrics of the evaluation")
        self._best = -math.inf
        self.prepare_learning()
        self.total_steps = self.total_steps or self.config.train.total_steps
        if self.config.train.resume_from_checkpoint is not None:
            self.load(self.config.train.resume_from_checkpoint)
        self._measure()
        for _ in range(self.config.train.epochs):
            for _ in range(int(self.n_inner_epochs)):
                for parts in MiniBatchIterator(self.create_train_dataloader(), self.mb_size, self.num_mb):
                    self._follow(self._step(parts))
                    if self.iter_count >= self.total_steps:
                        return self._close()
                self.post_backward_callback()
            self.post_epoch_callback()
        return self._close()

    def _close(self) -> None:
        """Close the trackers; the processes stay connected."""
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def _follow(self, stats: dict[str, float]) -> None:
        """Save, log and evaluate after a step, where that is due."""
        train, done = self.config.train, self.iter_count >= self.total_steps
        if done or self.iter_count % train.checkpoint_interval == 0:
            self._checkpoint(f"checkpoint_{self.iter_count:0{len(str(self.total_steps))}d}")
        self._tell(stats)
        if done or self.iter_count % train.eval_interval == 0:
            found = self._measure()
            value = found.get("reward/mean", found.get("metrics/reward", -math.inf))
            if train.save_best and value > self._best:
                self._best = value
                self._checkpoint("best_checkpoint")

    def _measure(self) -> dict[str, float]:
        """Evaluate, and tell the result."""
        if found := self.evaluate():
            self._tell(found)
            if self._evaluated_fn is not None:
                self._evaluated_fn(found)
        return found

    def _tell(self, stats: dict[str, float]) -> None:
        self.accelerator.log(stats, step=self.iter_count)
        if self._log is not None:
            self._log(stats)

    def _step(self, parts: list[Any]) -> dict[str, float]:
        """Make an optimizer step, with the gradient of the mean over the rows of all parts; return the statistics."""
        columns = [dict(part) if hasattr(part, "keys") else vars(part) for part in parts]
        sizes = [len(next(iter(each.values()))) for each in columns]
        total, stats = sum(sizes), dict[str, float]()
        for part, size in zip(parts, sizes, strict=True):
            self.model.train()
            loss, found = self.loss(part)
            if not torch.isfinite(loss):
                raise NonFiniteError(f"step {self.iter_count + 1}: the loss of {type(self).__name__} is {float(loss)}")
            self.accelerator.backward(loss * (size / total))
            self.model.eval()
            for name, value in found.items():
                stats[name] = stats.get(name, 0.0) + float(value) * size / total
        self.opt.step()
        self.opt.zero_grad()
        self.scheduler.step()
        self.iter_count += 1
        rates = {f"learning_rate_group_{n}": float(rate) for n, rate in enumerate(self.scheduler.get_last_lr())}
        return {**stats, **rates}

    # -------------------------------------------------------------------------------------------------------- saving

    def _checkpoint(self, name: str) -> None:
        directory = str(Path(self.config.train.checkpoint_dir) / name)
        if self.config.train.save_optimizer:
            self.save(directory)
        self.save_pretrained(str(Path(directory) / "hf_model"))
        if self._saved is not None:
            self._saved(directory)

    def save_pretrained(self, directory: str | None = None, **kwargs: Any) -> None:
        """Write model and tokenizer, by default to ``hf_model`` in the directory of checkpoints.

        Args:
            directory: where they are written.
            **kwargs: arguments of the model's own ``save_pretrained``.
        """
        target = directory or str(Path(self.config.train.checkpoint_dir) / "hf_model")
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            self.accelerator.unwrap_model(self.model).save_pretrained(target, **kwargs)
            self.tokenizer.save_pretrained(target)

    def save(self, directory: str | None = None, **kwargs: Any) -> None:
        """Write the state of accelerate, and the number of steps; ``kwargs`` are those of ``save_state``."""
        target = Path(directory or self.config.train.checkpoint_dir)
        self.accelerator.save_state(str(target), **{"safe_serialization": False, **kwargs})  # weights may be tied
        if self.accelerator.is_main_process:
            (target / "state.json").write_text(json.dumps({"iter_count": self.iter_count}), encoding="utf-8")

    def load(self, directory: str | None = None, **kwargs: Any) -> None:
        """Restore what `save` has written; ``kwargs`` are those of ``load_state``. Call it after `prepare_learning`."""
        source = Path(directory or self.config.train.checkpoint_dir)
        self.accelerator.load_state(str(source), **kwargs)
        self.iter_count = json.loads((source / "state.json").read_text(encoding="utf-8"))["iter_count"]
