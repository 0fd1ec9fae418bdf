"""PPO in a loop of one's own: `generate`, scores, `step`."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import cache, cached_property
from time import perf_counter
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, default_collate
from transformers import DataCollatorForLanguageModeling, PreTrainedModel

import trainkit
from trainkit.errors import ConfigError, DataError, describe
from trainkit.metrics import Std
from trainkit.models import PreTrainedModelWrapper, ValueHead
from trainkit.runs import free_directory
from trainkit_migrate import refusing, translate, translate_sampling
from trainkit_trl.arguments import check_takes, refuse_unknown
from trainkit_trl.core import average_torch_dicts, convert_to_scalar, set_seed, stats_to_np
from trainkit_trl.overriding import overridden
from trainkit_trl.trainer.base import BaseTrainer
from trainkit_trl.trainer.ppo_checks import check_ids, check_lists, check_masks, check_scores
from trainkit_trl.trainer.ppo_config import OF_0_7, PPOConfig
from trainkit_trl.trainer.ppo_formulas import PPO, Controller
from trainkit_trl.trainer.ppo_parts import Parts, described
from trainkit_trl.trainer.tracking import take_trackers
from trainkit_trl.trainer.utils import AdaptiveKLController, FixedKLController

log = logging.getLogger(__name__)
STATISTICS = {
    "objective/kl": "policy/kl",
    "objective/kl_coef": "policy/kl_coef",
    "objective/entropy": "policy/entropy",
    "ppo/mean_scores": "reward/mean",
    "ppo/std_scores": "reward/std",
    "ppo/loss/policy": "loss/policy",
    "ppo/loss/value": "loss/value",
    "ppo/loss/total": "loss/total",
    "ppo/policy/entropy": "policy/entropy",
    "ppo/policy/approxkl": "policy/approx_kl",
    "ppo/policy/clipfrac": "policy/clipfrac",
    "ppo/policy/ratio": "policy/ratio",
    "ppo/returns/mean": "returns/mean",
    "ppo/val/mean": "values/mean",
    "ppo/val/clipfrac": "values/clipfrac",
    "ppo/val/error": "values/error",
    "ppo/val/vpred": "values/predicted",
    "ppo/policy/advantages_mean": "advantages/mean",
    "ppo/mean_non_score_reward": "reward/non_score",
    "ppo/val/var_explained": "values/explained_variance",
    "ppo/learning_rate": "train/lr",
    "tokens/responses_len_mean": "rollout/length",
}
"""The names of TRL for metrics of trainkit."""
VARIANCES = {"ppo/returns/var": "returns/std", "ppo/val/var": "values/std"}
"""The names of TRL for squares of metrics of trainkit."""

FILLED = (
    *("is_encoder_decoder", "is_peft_model", "backward_batch_size", "global_backward_batch_size", "global_batch_size"),
    *("world_size", "exp_name", "steps", "model_name", "query_dataset", "reward_model"),
)
"""Settings that trainers fill in, or that only label a run."""


class PPOTrainer(Parts, BaseTrainer):
    """PPO in a loop of one's own. ``trainer`` is the trainer of trainkit that computes.

    `step` calls methods that a subclass overrides with what TRL gives them: `compute_rewards`, `_kl_penalty`,
    `compute_advantages`, `loss`, `train_minibatch`, `record_step_stats` and `gather_stats`. Those in ``not_called``
    cannot be overridden.

    Args:
        config: the settings.
        model: a model with a value head.
        ref_model: the reference; None: the model as it is now, or without its adapter.
        tokenizer: the tokenizer.
        dataset: rows with ``input_ids``, of which `dataloader` makes batches.
        optimizer: an optimizer over the model's parameters; None: Adam with ``config.learning_rate``.
        data_collator: makes a batch of rows; None: that of torch, which stacks tensors of one length.
        num_shared_layers: the lowest layers that model and reference share; they are not trained. Without effect if
            ``ref_model`` is given.
        lr_scheduler: a learning-rate schedule of the optimizer, which every call of `step` advances once.
        log_names: by which names trackers get statistics: ``"trl"``, those of TRL, from `log_stats` alone; or
            ``"trainkit"``, from `step`, and from `log_stats` what a script adds. The directory of the run has both.
        **unknown: other arguments are errors.

    Raises:
        ValueError: an argument has another type than it should have.
        ConfigError: a setting or argument has no counterpart in trainkit, or a method is overridden that is not called;
            says what to write instead.
    """

    kept: ClassVar[tuple[str, ...]] = (
        "config", "model", "tokenizer", "dataset", "lr_scheduler", "data_collator", "is_peft_model",
        "is_encoder_decoder", "num_shared_layers",
    )  # fmt: skip
    not_called: ClassVar[Mapping[str, str]] = {
        "batched_forward_pass": "override loss or train_minibatch, which get its results",
        "prepare_model_inputs": "override prepare_dataloader, or change queries and responses before step",
        "_early_stop": "set early_stopping and target_kl of PPOConfig",
        "_generate_batched": "override generate",
        "_remove_unused_columns": "override prepare_dataloader, or set remove_unused_columns=False",
        "_set_signature_columns_if_needed": "override prepare_dataloader, or set remove_unused_columns=False",
        "_prepare_deepspeed": "give accelerator_kwargs, or write train.sharding of trainkit",
    }

    def __init__(
        self,
        config: PPOConfig | None = None,
        model: PreTrainedModelWrapper | None = None,
        ref_model: PreTrainedModelWrapper | None = None,
        tokenizer: Any = None,
        dataset: Any = None,
        optimizer: Any = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        num_shared_layers: int | None = None,
        lr_scheduler: Any = None,
        log_names: str = "trl",
        **unknown: Any,
    ) -> None:
        refuse_unknown(PPOTrainer, unknown)
        if not isinstance(config, PPOConfig):
            raise ValueError(f"config should be a PPOConfig; given {type(config).__name__}")
        if not isinstance(model, PreTrainedModelWrapper):
            raise ValueError(
                f"model should be an AutoModelForCausalLMWithValueHead or its kin; given {type(model).__name__}"
            )
        if not callable(getattr(tokenizer, "decode", None)):
            raise ValueError(f"tokenizer should be a tokenizer of transformers; given {type(tokenizer).__name__}")
        if not isinstance(ref_model, PreTrainedModelWrapper | PreTrainedModel | None):
            raise ValueError(f"ref_model should be a model with a value head; given {type(ref_model).__name__}")
        _check_called("model", model)
        _check_called("ref_model", ref_model)
        check_takes("data_collator", data_collator, "rows")
        if not isinstance(lr_scheduler, LRScheduler | None):
            raise ValueError(f"lr_scheduler should be one of torch.optim; given {type(lr_scheduler).__name__}")
        if dataset is None:
            warnings.warn(
                "there is no dataset, and so no dataloader: give step() batch_size queries of your own", stacklevel=2
            )
        if num_shared_layers is not None and ref_model is not None:
            warnings.warn("num_shared_layers has no effect, since ref_model is given", stacklevel=2)
            num_shared_layers = None
        set_seed(config.seed)
        self.config, self.tokenizer, self.dataset, self.lr_scheduler = config, tokenizer, dataset, lr_scheduler
        self.model, self._given_reference, self.num_shared_layers = model, ref_model, num_shared_layers
        self.is_encoder_decoder = config.is_encoder_decoder = bool(model.config.is_encoder_decoder)
        self.is_peft_model = config.is_peft_model = bool(model.is_peft_model)
        settled = _translated(config, model, num_shared_layers, own_optimizer=optimizer is not None)
        schedule = None if lr_scheduler is None else _OfSteps(lr_scheduler)
        given = {"reference": ref_model, "optimizer": optimizer, "scheduler": schedule}
        given = {name: value for name, value in given.items() if value is not None}
        self._trackers, left = take_trackers(settled.train.trackers, log_names)
        self._log_names, settled = log_names, settled.evolve(train={"trackers": left})
        given["callbacks"] = self._trackers
        self.trainer: Any = PPO(settled, owner=self, model=model, tokenizer=tokenizer, **given)
        self._check_overrides()
        self.trainer.models.build()
        inner = getattr(self.trainer.optimizer, "optimizer", self.trainer.optimizer)
        if isinstance(inner, torch.optim.Optimizer):  # not that of DeepSpeed, which keeps gradients itself
            inner.register_step_post_hook(self._keep_gradient)
        self._gradient: list[tuple[Any, Tensor]] = []
        self._logged: Collection[str] = ()  # names of metrics that `log_stats` does not log
        adapted = config.adap_kl_ctrl and config.init_kl_coef and config.target is not None
        beta = config.init_kl_coef or 0.0
        self.kl_ctl = (
            AdaptiveKLController(beta, config.target or 0, config.horizon or 10000)
            if adapted
            else FixedKLController(beta)
        )
        config.world_size = int(self.accelerator.num_processes)
        config.global_batch_size = config.batch_size * config.world_size
        config.global_backward_batch_size = (config.backward_batch_size or 1) * config.world_size
        self.dataloader = None if dataset is None else self.prepare_dataloader(dataset, data_collator)
        self.keep_settings()

    def _check_overrides(self) -> None:
        """Raise a ConfigError if a method is overridden whose arguments there are not."""
        if self.config.kl_penalty == "full" and self.overrides("compute_rewards", "_kl_penalty"):
            raise ConfigError(
                "kl_penalty is 'full', for which TRL gives compute_rewards and _kl_penalty whole distributions, and "
                "trainkit keeps none; set kl_penalty to kl, abs or mse, or do not override them"
            )
        alone = self.accelerator.num_processes == 1 and not self.is_encoder_decoder
        if self.overrides("loss", "train_minibatch") and not alone:
            raise ConfigError(
                "loss and train_minibatch can be overridden in one process, for models that are no encoder-decoders; "
                "override loss of trainkit_ppo.PPOTrainer, and write a run of trainkit"
            )

    def _keep_gradient(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Keep the gradient of an optimizer step, without a copy."""
        trained = [each for group in optimizer.param_groups for each in group["params"]]
        self._gradient = [(each, each.grad) for each in trained if each.grad is not None]

    @property
    def accelerator(self) -> Any:
        """The accelerator."""
        return self.trainer.accelerator

    @property
    def current_device(self) -> torch.device:
        """The device of this process."""
        device: torch.device = self.trainer.accelerator.device
        return device

    @property
    def optimizer(self) -> Any:
        """The optimizer."""
        return self.trainer.optimizer

    @property
    def ref_model(self) -> Any:
        """The reference, without a value head if it was not given; None if it is the model without its adapter."""
        if self._given_reference is not None or self.is_peft_model:
            return self._given_reference
        return self.trainer.reference.policy.model

    @property
    def is_distributed(self) -> bool:
        """Whether there are several processes."""
        return bool(self.accelerator.num_processes > 1)

    @property
    def model_params(self) -> list[torch.nn.Parameter]:
        """The parameters that are trained."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @property
    def running(self) -> Any:
        """Mean and deviation of all scores so far, with ``use_score_scaling``."""
        return self.trainer.moments

    @property
    def optional_peft_ctx(self) -> Callable[[], AbstractContextManager[Any]]:
        """What makes a context in which the model is the reference, if that is the model without its adapter."""
        return self.model.pretrained_model.disable_adapter if self.is_peft_model else nullcontext

    @property
    def kl_ctl(self) -> Any:
        """The controller of the KL penalty, with its present β as ``value``."""
        return self.trainer.kl.given

    @kl_ctl.setter
    def kl_ctl(self, controller: Any) -> None:
        if not (hasattr(controller, "value") and callable(getattr(controller, "update", None))):
            raise ConfigError(
                f"kl_ctl should have value and update(current, n_steps), as FixedKLController; given "
                f"{describe(controller)}"
            )
        self.trainer.kl = Controller(controller)

    @cached_property
    def data_collator(self) -> Any:
        """What pads token ids, as in TRL; the argument ``data_collator`` is that of `dataloader`."""
        return DataCollatorForLanguageModeling(self.tokenizer, mlm=False)

    def prepare_dataloader(self, dataset: Any, data_collator: Callable[[list[Any]], Any] | None = None) -> Any:
        """Return a loader of shuffled batches of ``config.batch_size`` rows; a last, smaller batch is dropped.

        Raises:
            ValueError: the dataset has no length, or none of the columns that are kept.
        """
        if isinstance(dataset, str) or not hasattr(dataset, "__len__"):
            raise ValueError(f"dataset should have a length and rows by their indices; given {describe(dataset)}")
        if self.config.remove_unused_columns and hasattr(dataset, "remove_columns"):
            read = ("input_ids", "attention_mask", "label", "query", "response")
            if not {*read} & {*dataset.column_names}:
                raise ValueError(
                    f"dataset has no input_ids; it has {', '.join(dataset.column_names)}, and PPOConfig keeps "
                    f"{', '.join(read)}: tokenise it into input_ids, or set remove_unused_columns=False"
                )
            dataset = dataset.remove_columns([name for name in dataset.column_names if name not in read])
        loader = DataLoader(
            dataset,
            batch_size=self.config.batch_size,
            collate_fn=data_collator or _stacked,
            shuffle=True,
            drop_last=True,
        )
        if self.accelerator.num_processes > 1:
            return self.accelerator.prepare(loader)
        return loader

    # ------------------------------------------------------------------------------------------------- generating

    def generate(
        self,
        query_tensor: Tensor | list[Tensor],
        length_sampler: Callable[[], int] | None = None,
        batch_size: int = 4,
        return_prompt: bool = True,
        generate_ref_response: bool = False,
        **generation_kwargs: Any,
    ) -> Any:
        """Sample a response to each query.

        Args:
            query_tensor: token ids [P], or a list of them.
            length_sampler: gives the longest response of each batch.
            batch_size: queries of a batch.
            return_prompt: whether the prompt stands before its response.
            generate_ref_response: whether the responses of the reference are returned too.
            **generation_kwargs: arguments of `generate` of transformers.

        Returns:
            A list of token ids, or for a single query [1, T]; two of them with ``generate_ref_response``.

        Raises:
            ValueError: the query is no list and has more than one dimension, or the list holds something else than
                token ids.
            ConfigError: an argument has no counterpart in trainkit.
        """
        check_takes("length_sampler", length_sampler)
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size should be 1 at least; given {batch_size!r}")
        single = isinstance(query_tensor, Tensor)
        if single and query_tensor.dim() != 1:  # type: ignore[union-attr]
            raise ValueError(f"a query is a tensor [P]; given {tuple(query_tensor.shape)}")  # type: ignore[union-attr]
        queries = [query_tensor] if isinstance(query_tensor, Tensor) else query_tensor
        check_lists({"query_tensor": queries}, None)
        check_ids("query_tensor", queries)
        settings = _sampling(generation_kwargs, self.trainer.model_config.get_text_config().vocab_size)
        made = list(self._batches(queries, batch_size, length_sampler, settings, return_prompt))
        found = made[0].unsqueeze(0) if single else made
        if not generate_ref_response:
            return found
        theirs = list(
            self._batches(queries, batch_size, length_sampler, {**settings, "reference": True}, return_prompt)
        )
        return found, theirs[0].unsqueeze(0) if single else theirs

    def _batches(
        self,
        queries: list[Tensor],
        size: int,
        length_sampler: Callable[[], int] | None,
        settings: dict[str, Any],
        with_prompt: bool,
    ) -> Iterator[Tensor]:
        for start in range(0, len(queries), size):
            batch = queries[start : start + size]
            length = {} if length_sampler is None else {"max_new_tokens": length_sampler()}
            rollouts = self.trainer.generate([query.tolist() for query in batch], **{**settings, **length})
            for query, response in zip(batch, rollouts.responses, strict=True):
                ids = torch.as_tensor(response, device=query.device)
                yield torch.cat([query, ids]) if with_prompt else ids

    # --------------------------------------------------------------------------------------------------- training

    def step(
        self,
        queries: list[Tensor],
        responses: list[Tensor],
        scores: list[Tensor],
        response_masks: list[Tensor] | None = None,
    ) -> dict[str, Any]:
        """Train on responses and their scores: ``config.ppo_epochs`` passes. Return the statistics by TRL's names.

        Args:
            queries: token ids [P] of the prompts.
            responses: token ids [R] after them, at least one each.
            scores: a score [] or [1] for each response.
            response_masks: which tokens of the responses are trained on, 1 or 0, [R] each; None: all.

        Raises:
            ValueError: the lists have another length than ``config.batch_size``, or hold something else.
        """
        self.check_settings()
        started, size = perf_counter(), self.config.batch_size
        queries, responses, scores, masks = self._step_safety_checker(size, queries, responses, scores, response_masks)
        coef = self.kl_ctl.value
        metrics = self.trainer.step(queries, responses, [float(score) for score in scores], response_masks=masks)
        for parameter, gradient in self._gradient:
            parameter.grad = gradient  # to be read; the next step begins without it
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        trained = perf_counter()
        stats = self._stats(coef, metrics, queries, responses)
        if self.overrides("gather_stats") and self.accelerator.num_processes > 1:
            stats = self.gather_stats(stats)
        seconds = dict(self.trainer.seconds)
        seconds["time/ppo/optimize_step"] = trained - started - sum(seconds.values())
        ended = perf_counter()
        seconds |= {"time/ppo/calc_stats": ended - trained, "time/ppo/total": ended - started}
        stats = convert_to_scalar(stats_to_np({**stats, **seconds}))
        self._logged = metrics.keys() if self._log_names == "trl" else {*stats, *metrics}
        return stats

    def _stats(
        self, coef: float, metrics: dict[str, float], queries: list[Tensor], responses: list[Tensor]
    ) -> dict[str, Any]:
        """Return the statistics of a step by the names of TRL, with those of methods that are overridden."""
        losses = average_torch_dicts([_means(each) for each in self.trainer.losses]) if self.trainer.losses else {}
        stats = {**self.statistics(metrics), **{f"ppo/{name}": losses[name] for name in losses}, **self.trainer.seen}
        for name, rows in {"queries": queries, "responses": responses}.items():
            stats |= {f"tokens/{name}_{key}": value for key, value in described(rows).items()}
        if not self.overrides("record_step_stats"):
            return stats
        names = [name for name in stats if name.partition("/")[2].startswith(("loss/", "policy/", "val/", "returns/"))]
        train_stats = {name.removeprefix("ppo/"): torch.as_tensor(stats[name])[None] for name in names}
        train_stats = {**{name: value[None] for name, value in losses.items()}, **train_stats}
        told = {name: value for name, value in self.trainer.told.items() if name not in ("rewards", "values")}
        further = {"queries": queries, "responses": responses, "train_stats": train_stats}
        return stats | self.record_step_stats(kl_coef=coef, **told, **further)

    def statistics(self, metrics: dict[str, float]) -> dict[str, Any]:
        """Return metrics of trainkit by the names of TRL, and those that TRL lacks by their own."""
        known = {theirs: metrics[ours] for theirs, ours in STATISTICS.items() if ours in metrics}
        squares = {theirs: metrics[ours] ** 2 for theirs, ours in VARIANCES.items() if ours in metrics}
        if {"policy/approx_kl", "policy/ratio"} <= metrics.keys():  # mean of ρ − 1 − log ρ
            squares["ppo/policy/policykl"] = metrics["policy/approx_kl"] + 1 - metrics["policy/ratio"]
        named = {*STATISTICS.values(), *VARIANCES.values()}
        return {**known, **squares, **{name: value for name, value in metrics.items() if name not in named}}

    def _step_safety_checker(
        self,
        batch_size: int,
        queries: list[Tensor],
        responses: list[Tensor],
        scores: list[Tensor],
        masks: list[Tensor] | None = None,
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor] | None]:
        """Return what was given to `step`, with scores [] and boolean masks, after checking it."""
        named: dict[str, Any] = {"queries": queries, "responses": responses, "scores": scores}
        check_lists({**named, **({} if masks is None else {"response_masks": masks})}, batch_size)
        check_ids("queries", queries)
        check_ids("responses", responses)
        check_scores(scores)
        if masks is not None:
            check_masks(masks, responses)
            masks = [mask.bool() for mask in masks]
        return queries, responses, [score.reshape(()) for score in scores], masks

    def log_stats(
        self,
        stats: dict[str, Any],
        batch: dict[str, Any],
        rewards: list[Tensor],
        columns_to_log: list[str] | tuple[str, ...] = ("query", "response"),
    ) -> None:
        """Log the statistics of `step` that are numbers, by TRL's names, with mean and deviation of the rewards.

        Those that TRL lacks have been logged by `step`. wandb gets columns and rewards as a table, ``game_log``.

        Args:
            stats: what `step` returned, and what a script has added; the numbers of the rewards are added to it.
            batch: the rows of the step.
            rewards: their rewards.
            columns_to_log: columns of ``batch``.

        Raises:
            ValueError: the batch lacks a column, and ``log_with`` is ``"wandb"``.
        """
        if not isinstance(stats, dict) or not isinstance(batch, Mapping) or not len(rewards):
            raise ValueError(
                "log_stats takes what step returned, a dictionary of columns, and a reward at least; given "
                f"{describe(stats)}, {describe(batch)} and {describe(rewards)}"
            )
        check_scores(rewards)
        if missing := [name for name in columns_to_log if name not in batch]:
            told = f"the batch has no {', '.join(map(repr, missing))}; it has {', '.join(map(str, batch)) or 'nothing'}"
            if self.config.log_with == "wandb":
                raise ValueError(f"{told}; add it, or give columns_to_log")
            _say_once(f"log_stats(): {told}")
        given = torch.tensor([float(reward) for reward in rewards], dtype=torch.float32)
        given = self.accelerator.gather(given.to(self.current_device)).cpu()
        stats |= {"env/reward_mean": given.mean().item(), "env/reward_std": Std.of(given).compute()}
        stats |= {"env/reward_dist": given.numpy()}
        numbers = {name: value for name, value in convert_to_scalar(stats).items() if isinstance(value, int | float)}
        if self.accelerator.is_main_process:
            metrics = {name: float(numbers[name]) for name in numbers if name not in self._logged}
            self.trainer.hooks.hook.log_metrics(trainer=self.trainer, step=self.trainer.progress.step, metrics=metrics)
            for each in self._trackers:
                each.log(self.trainer, {name: float(value) for name, value in numbers.items()})
        if self.config.log_with == "wandb":
            columns = (*columns_to_log, "reward")
            texts = zip(*(batch[name] for name in columns_to_log), map(float, rewards), strict=True)
            self._log_table(columns, self.trainer.gather([list(row) for row in texts]))

    def _log_table(self, columns: tuple[str, ...], rows: list[Any]) -> None:
        """Log the rows of a step to the tracker of accelerate, as ``game_log``."""
        for tracker in self.trainer.hooks.get_plugins() if self.accelerator.is_main_process else ():
            if hasattr(tracker, "opened") and hasattr(opened := tracker.opened(self.trainer), "log_table"):
                opened.log_table("game_log", columns=[*columns], data=rows, step=self.trainer.progress.step)

    # ------------------------------------------------------------------------------------------------------ saving

    card: ClassVar[dict[str, str]] = {
        "library_name": "transformers",
        "tag": "ppo",
        "text": "A language model with a value head, fine-tuned by PPO.",
    }


def _check_called(name: str, model: Any) -> None:
    """Raise a ConfigError if a model has methods or a head of a script's, which trainkit does not call."""
    if not isinstance(model, PreTrainedModelWrapper):
        return
    cls, head = type(model).__name__, getattr(model, "v_head", None)
    if found := overridden(model, "forward", "generate", "state_dict", "save_pretrained"):
        raise ConfigError(
            f"{name} is a {cls}, which overrides {', '.join(found)}; trainkit calls its parts, pretrained_model and "
            "v_head, and not these: change pretrained_model, or override loss, generate or _save_pretrained of "
            "PPOTrainer"
        )
    if head is not None and not isinstance(head, ValueHead):
        raise ConfigError(
            f"v_head of {name} is a {type(head).__name__}, and trainkit trains a trainkit.models.ValueHead; make it a "
            "subclass, whose forward is called"
        )


def _stacked(rows: list[Any]) -> Any:
    try:
        return default_collate(rows)
    except RuntimeError as error:
        raise DataError(
            f"rows cannot be stacked ({error}); give a data_collator, such as lambda rows: {{name: [row[name] for row "
            "in rows] for name in rows[0]}}"
        ) from error


def _sampling(given: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """Return the sampling settings of trainkit. An EOS outside the vocabulary, as -1, meant responses without end."""
    if isinstance(given.get("eos_token_id"), int) and given["eos_token_id"] >= vocabulary:
        given = {**given, "eos_token_id": -1}
    found = translate_sampling({"do_sample": True, **given})
    settings = found.accepted("arguments", lambda remark: _say_once(f"generate(): {remark}"))
    usual = {"top_k": 50, "max_new_tokens": 20, **settings}  # as in transformers
    return {**usual, **{name: int(usual[name]) for name in ("top_k", "max_new_tokens")}}


def _means(stats: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: torch.as_tensor(value).detach().float().mean().cpu() for name, value in stats.items()}


class _OfSteps(LRScheduler):
    """A schedule that `PPOTrainer.step` advances, and not every optimizer step of it."""

    def __init__(self, given: LRScheduler) -> None:
        self.given, self.optimizer = given, given.optimizer

    def step(self, epoch: int | None = None) -> None:
        """Do nothing."""

    def get_last_lr(self) -> list[Any]:
        """Return the present learning rates."""
        return self.given.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule."""
        return self.given.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the schedule."""
        self.given.load_state_dict(state_dict)


@cache
def _say_once(text: str) -> None:
    log.warning("%s", text)


def _translated(config: PPOConfig, model: Any, shared: int | None, *, own_optimizer: bool) -> trainkit.TRLConfig[Any]:
    processes = int(os.environ.get("WORLD_SIZE", 1))
    given = {name: value for name, value in asdict(config).items() if name not in FILLED}
    settings = translate("trl", {"PPOConfig": given}, processes=processes).accepted("settings of TRL", log.warning)
    if usual := [name for name in OF_0_7 if getattr(config, name) == getattr(PPOConfig, name)]:
        told = ", ".join(f"{name}={getattr(config, name)}, which was {OF_0_7[name]} in 0.7" for name in usual)
        _say_once(f"PPOConfig has defaults of TRL 0.8: {told}; write the values that you need")
    if own_optimizer:
        del settings["optimizer"]
    if processes == 1 and (run_dir := settings["train"].get("run_dir")):
        settings["train"]["run_dir"] = free_directory(run_dir)
    settled = trainkit.default_config("ppo").evolve(**settings)
    if shared is None:
        return settled
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    if not isinstance(shared, int) or not 0 <= shared <= layers:
        raise ValueError(f"num_shared_layers should be from 0 to {layers}, the layers of the model; given {shared!r}")
    return settled.evolve(model={"num_layers_unfrozen": layers - shared})


__getattr__ = refusing(__name__)
