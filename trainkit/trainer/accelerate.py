"""The loop, on accelerate: written once, for every algorithm."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainkit import metrics as m
from trainkit.backend import use_fast_exact_matmul
from trainkit.config import MethodConfig, SamplingConfig, TRLConfig
from trainkit.data import Batch, Rollouts, Row, Sequences
from trainkit.errors import ConfigError, DataError, NonFiniteError
from trainkit.functional import exact
from trainkit.models.loading import check_trainable, context_length, load_model_config, load_tokenizer, pad_id
from trainkit.models.policy import CausalPolicy, TokenOutputs
from trainkit.models.reference import Reference
from trainkit.pipeline import Pipeline, PromptEncoder, Prompts, encode_sample, prompt_rows, sample_rows
from trainkit.plugins import discover, hook_manager
from trainkit.registry import get_trainer
from trainkit.rewards import check_scores, score
from trainkit.sampling import CausalSampler, Sampler
from trainkit.seeding import Seen, generator, global_rng, row_seeds
from trainkit.trainer import generation, optim, run
from trainkit.trainer.base import BaseRLTrainer, Verdict
from trainkit.trainer.evaluation import evaluate, sweep
from trainkit.trainer.launch import make_accelerator
from trainkit.trainer.lock import RunLock
from trainkit.trainer.stopping import Stop

log = logging.getLogger(__name__)

M = TypeVar("M", bound=MethodConfig)

MICROBATCH_TOKENS = {"cpu": 2048}
"""Tokens of a micro-batch where its rows are not set, by kind of device: more keep no core busier ..."""
OTHER_TOKENS = 32_768
"""... but do keep an accelerator so, within limits; memory grows with them."""
SAMPLER_TOLERANCE = 1e-4
"""How far a sampler's log-probabilities may be from the policy's to be used in their place: float32's rounding."""


@dataclass
class Progress:
    """Where a run stands: all of the loop's own state, in plain numbers."""

    step: int = 0
    """Optimizer steps made, or left out by `judge`."""
    collection: int = 0
    """Collections finished."""
    cursor: int = 0
    """Rows of the stream used up by finished collections."""
    epoch: int = 0
    """Passes made over the present collection."""
    position: int = 0
    """Minibatches made in the present pass."""
    stopped: bool = False
    """`judge` has left out what remains of the present collection."""
    sampled: int = 0
    """Calls of the sampler for training, which key its randomness."""
    generated: int = 0
    """Calls of `generate`, which key theirs."""
    samples: int = 0
    """Rows of experience made so far, all processes."""
    tokens: int = 0
    """Units (tokens or rows) in the steps so far, all processes."""
    seconds: float = 0.0
    """Wall time spent, over all resumed parts of the run."""
    best: float = -math.inf
    """Highest mean reward of an evaluation."""
    sampler: str = ""
    """The class of the sampler that ..."""
    sampler_exact: bool | None = None
    """... gives the policy's own numbers, or not, as its first collection showed; None before that."""


class AccelerateRLTrainer(BaseRLTrainer[M]):
    """Everything about training that is not the algorithm.

    Nothing heavy happens at construction: model and optimizer are made on first use, after the data were checked.

    Args:
        config: the run's configuration.
        model: a live model, instead of ``config.model.model_path``; it is trained in place.
        tokenizer: a live tokenizer, instead of the one that the config names.
        reward_fn: scores samples; see `trainkit.rewards.score`.
        metric_fn: measures samples at evaluation; see `trainkit.rewards.metrics`.
        logit_mask: bool [V] or [V, V] (row: the previous token), True = allowed; holds in sampling, and in
            training where the algorithm learns from what it sampled.
        stop_sequences: strings that end a response, over those of the config.
        callbacks: objects with ``@hookimpl`` methods.
        allow_drift: resume also where settings differ on which the course of training depends.

    Raises:
        ConfigError, DataError, PluginError: at the door, before a model is loaded.
    """

    needs_reference: ClassVar[bool] = False
    """Whether the algorithm compares with a frozen copy of the model as it was before the first update."""

    def __init__(
        self,
        config: TRLConfig[M],
        *,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        callbacks: Iterable[object] = (),
        allow_drift: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, **kwargs)
        config = self.config
        self.accelerator: Accelerator = make_accelerator(config.train.mixed_precision)
        use_fast_exact_matmul(self.accelerator.device)
        self._check_split()
        if config.train.save_best and not self.online:
            raise ConfigError(
                f"train.save_best goes by the reward of evaluations, and {config.method.name!r} has none; leave it out"
            )
        if tokenizer is not None and config.tokenizer.tokenizer_path is not None:
            raise ConfigError(
                f"a tokenizer is given, and tokenizer.tokenizer_path is {config.tokenizer.tokenizer_path!r}; "
                "give one of the two"
            )
        optim.check(config)
        self.live_model = model
        self.tokenizer = load_tokenizer(config, tokenizer)
        self.model_config = model.config if model is not None else load_model_config(config.model)
        check_trainable(config.model, self.model_config, live=model is not None)
        self.limit = self._length_limit()
        self.encode = PromptEncoder(
            self.tokenizer,
            None if self.limit is None else self.limit - config.rollout.max_new_tokens,
            config.rollout.overlong_prompts,
        )
        self.hooks = hook_manager(self._plugin_names(), [*callbacks, *run.trackers(config, self.accelerator)])
        self.progress = Progress()
        self.pipeline: Pipeline | None = None
        self.eval_rows: list[Row] = []
        self.run_dir: Path | None = None
        self.allow_drift = allow_drift
        self.resumed: list[str] = []
        """What to tell people about the checkpoint that the run goes on from."""
        self._lock: RunLock | None = None
        self._stop = Stop()
        self._pending: m.Metrics = {}
        self._rollouts: list[Rollouts] = []
        self._seen: Seen = Counter()
        self._clock = time.perf_counter()

    # ------------------------------------------------------------------------------------------------ construction

    def _check_split(self) -> None:
        world, config = self.accelerator.num_processes, self.config
        if config.train.batch_size % world:
            raise ConfigError(
                f"train.batch_size is {config.train.batch_size}, which {world} processes cannot share equally; "
                "give a multiple"
            )
        k = self.samples_per_prompt
        if config.rollout.num_rollouts % (world * k):
            raise ConfigError(
                f"rollout.num_rollouts is {config.rollout.num_rollouts}, which is not {k} per prompt for as many "
                f"prompts in each of {world} processes; give a multiple of {world * k}"
            )
        if self.online and config.rollout.temperature == 0:
            raise ConfigError(
                "rollout.temperature is 0: greedy responses have no distribution to learn on. Give a temperature > 0; "
                "for greedy evaluation set rollout.eval_kwargs.temperature to 0"
            )

    def _length_limit(self) -> int | None:
        """The most tokens of prompt and response together: the smaller of train.seq_length and the model's context."""
        context, asked = context_length(self.model_config), self.config.train.seq_length
        if context and asked and asked > context:
            raise ConfigError(f"train.seq_length is {asked}; the model attends to at most {context} tokens")
        vocabulary = self.model_config.get_text_config().vocab_size
        if len(self.tokenizer) > vocabulary:
            raise ConfigError(
                f"the tokenizer has {len(self.tokenizer)} tokens and the model {vocabulary}; give the tokenizer that "
                "belongs to the model, or a model with vocab_size to match"
            )
        limit, room = asked or context, self.config.rollout.max_new_tokens
        if limit and self.online and room >= limit:
            raise ConfigError(
                f"rollout.max_new_tokens is {room}, which leaves no room for a prompt within {limit} tokens; lower it"
            )
        return limit

    def _plugin_names(self) -> list[str]:
        name = self.config.method.name
        own = [name] if get_trainer(name) is type(self) and _is_installed(name) else []
        return [*own, *self.config.plugins]

    @cached_property
    def unwrapped(self) -> Any:
        """The trainable model itself, outside whatever accelerate wraps it in."""
        with global_rng(self.config.train.seed, "model", device=self.accelerator.device):
            return self.get_arch(self.config)

    @cached_property
    def _prepared(self) -> tuple[nn.Module, torch.optim.Optimizer, Reference | None]:
        model = self.unwrapped.to(self.accelerator.device)
        if self.accelerator.num_processes > 1:  # as DDP will do, but before the reference is made
            broadcast([tensor.data for tensor in (*model.parameters(), *model.buffers())])
        reference = Reference(model) if self.needs_reference else None  # before anything can move the weights
        optimizer = optim.make_optimizer(self.config.optimizer, model, scaled=self.accelerator.scaler is not None)
        return (*self.accelerator.prepare(model, optimizer), reference)

    @property
    def policy(self) -> nn.Module:
        """The trainable model as `loss` must call it, so that gradients are synchronised."""
        return self._prepared[0]

    @property
    def optimizer(self) -> Any:
        """The prepared optimizer."""
        return self._prepared[1]

    @property
    def reference(self) -> Reference:
        """The model as it was before the first update, frozen; for algorithms with ``needs_reference``."""
        reference = self._prepared[2]
        if reference is None:
            raise AttributeError(f"{type(self).__name__} keeps no reference; set needs_reference = True in the class")
        return reference

    @cached_property
    def start(self) -> str | None:
        """What identifies the weights that the run started from, which checkpoints do not hold; it never changes."""
        return run.fingerprint_start(self)

    @cached_property
    def scheduler(self) -> LRScheduler:
        """The learning-rate schedule, over the run's steps."""
        if not self.total_steps and self.config.scheduler.name != "constant":
            raise ConfigError(
                f"the schedule {self.config.scheduler.name!r} ends at the run's last step, which is not known; "
                "set train.total_steps"
            )
        inner = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate's wrapper is no torch optimizer
        return optim.make_scheduler(self.config.scheduler, inner, self.total_steps)

    @cached_property
    def sampler(self) -> Sampler:
        """What turns prompts into rollouts: a plugin's ``make_sampler``, or the core's."""
        self._prepared  # noqa: B018  (the sampler reads the model where accelerate has put it)
        made: Any = self.hooks.hook.make_sampler(trainer=self)
        if made is not None:
            return generation.checked_sampler(made)
        return CausalSampler(
            self.unwrapped.model,
            self.tokenizer,
            logit_mask=self.logit_mask,
            skip_special_tokens=self.config.rollout.skip_special_tokens,
            head_alone=getattr(self.unwrapped, "head_alone", False),
            hidden=getattr(self.unwrapped, "value_head", None) is not None,
        )

    # -------------------------------------------------------------------------------------------------------- data

    def add_prompt_pipeline(self, prompts: Pipeline | Prompts) -> None:
        """Take the prompts to train on: a pipeline, or whatever `trainkit.train` takes. All are checked now."""
        if not isinstance(prompts, Pipeline):
            prompts = Pipeline(self.encode.fit(prompt_rows(prompts)), seed=self.config.train.seed)
        self.pipeline = prompts

    def add_samples(self, samples: Iterable[Any], rewards: Iterable[Any] | None = None) -> None:
        """Take the samples to train on offline. All are checked now."""
        rows = sample_rows(samples, rewards)
        cut = 0
        for index, row in enumerate(rows):
            ids, _ = encode_sample(self.tokenizer, row, self.limit, f"sample {index}")
            cut += self.limit is not None and len(ids) == self.limit and ids[-1] != self.tokenizer.eos_token_id
        if cut:
            log.warning("%d of %d samples were cut at %s tokens and do not end in EOS", cut, len(rows), self.limit)
        self.pipeline = Pipeline(rows, seed=self.config.train.seed)

    def add_eval_pipeline(self, prompts: Prompts) -> None:
        """Take the prompts of evaluations."""
        self.eval_rows = self.encode.fit(prompt_rows(prompts))
        longest = max(len(self.encode(row["prompt"])) for row in self.eval_rows)
        for _, overrides in sweep(self.config.rollout.eval_kwargs):
            room = self.settings(**overrides).max_new_tokens
            if self.limit is not None and longest + room > self.limit:
                raise DataError(
                    f"the longest evaluation prompt has {longest} tokens, and rollout.eval_kwargs asks for {room} new "
                    f"ones; together at most {self.limit} fit. Lower max_new_tokens there"
                )

    # -------------------------------------------------------------------------------------------- the loop: learn

    @cached_property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run, if none are left out by `Verdict.STOP`."""
        train, collections = self.config.train, self.collections
        if collections is None or self.passes is None:
            return train.total_steps or 0
        steps = collections * self.passes * math.ceil(self.collection_rows * self.samples_per_prompt / train.batch_size)
        return steps if train.total_steps is None else min(steps, train.total_steps)

    @property
    def collections(self) -> int | None:
        """Collections that the run's epochs are worth; None: as many as `total_steps` needs."""
        if self.pipeline is None:
            return None
        if not self.online:
            return 1
        return None if self.epochs is None else math.ceil(self.epochs * len(self.pipeline) / self.collection_rows)

    @property
    def done(self) -> bool:
        """Whether the run's steps are made, or its epochs are used up: with early stopping they are in fewer steps."""
        at, collections = self.progress, self.collections
        used_up = collections is not None and at.collection + self._collection_used >= collections
        return used_up or at.step >= self.total_steps

    @property
    def _collection_used(self) -> bool:
        return self.progress.stopped or (self.passes is not None and self.progress.epoch >= self.passes)

    def learn(self) -> None:
        """Train until `done`, from a checkpoint if the config says so.

        Raises:
            DataError: there is nothing to learn from.
            NonFiniteError: a loss or gradient is not finite; the weights have not moved.
            RewardError: the reward function failed.
            CheckpointError: a checkpoint cannot be written, or resumed from with this config.
            SystemExit: 143, after SIGTERM and a checkpoint.
        """
        missing = [] if self.pipeline is not None else [self.inputs[-1]]
        missing += ["reward_fn"] if self.online and self.reward_fn is None else []
        if missing:
            raise DataError(
                f"{type(self).__name__} learns from {' and '.join(self.inputs)}; give {' and '.join(missing)}"
            )
        with run.running(self):
            if run.finished(self):
                return
            if self.progress.step == 0:
                self._evaluate_if(self.total_steps > 0)
            for batch in self._minibatches():
                self._train_on(batch)
                self._evaluate_if(self.done or _due(self.progress.step, self.config.train.eval_interval))
                run.save_if_due(self, self.done)
                if self.done:
                    break
                if run.asked_to_stop(self):
                    run.stop(self)
            run.export(self)

    def _minibatches(self) -> Iterator[Batch]:
        """The minibatches of the run from where it stands; `progress` counts one as made when it is handed out."""
        at = self.progress
        while not self.done:
            if not len(self.store):
                self.collect()
            while not self._collection_used:
                yield from self._one_pass()
            at.cursor += self.collection_rows
            self._next_collection()

    def _next_collection(self) -> None:
        at = self.progress
        self.store.clear()
        at.collection, at.epoch, at.position, at.stopped = at.collection + 1, 0, 0, False

    def _one_pass(self) -> Iterator[Batch]:
        at, seed = self.progress, self.config.train.seed
        size = self.config.train.batch_size // self.accelerator.num_processes
        order = generator(seed, "order", at.collection, at.epoch)
        for batch in self.store.batches(size, order, start=at.position):
            if at.stopped:
                return
            at.position += 1
            if at.position * size >= len(self.store):
                at.epoch, at.position = at.epoch + 1, 0
            yield batch

    @property
    def collection_rows(self) -> int:
        """Rows of the stream that one collection uses, all processes together."""
        assert self.pipeline is not None
        if self.online:
            return self.config.rollout.num_rollouts // self.samples_per_prompt
        world = int(self.accelerator.num_processes)
        return math.ceil(len(self.pipeline) / world) * world  # as many for each, the first ones once more if need be

    def collect(self) -> None:
        """Fill the store with one collection of experience, and tell the hooks."""
        started = time.perf_counter()
        self.fill_store()
        self._time("time/collect", started)
        self.hooks.hook.on_experience(trainer=self, experience=self.store.experience, rollouts=self._rollouts)

    def fill_store(self) -> None:
        """Fill the store with one collection of experience."""
        assert self.pipeline is not None
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        taken = self.pipeline.take(self.progress.cursor, self.collection_rows, rank=rank, world=world)
        rows = [row for row in taken for _ in range(self.samples_per_prompt)]
        self._rollouts, self._seen = [], Counter()
        size, sampled = self.config.rollout.batch_size, self.progress.sampled
        self.unwrapped.eval()
        with torch.no_grad(), self.accelerator.autocast():  # policy, sampler and reference at the loss's precision
            for start in range(0, len(rows), size):
                if run.asked_to_stop(self):  # the collection is made again when the run is resumed
                    self.store.clear()
                    self.progress.sampled = sampled
                    run.stop(self)
                self.store.push(self.make_experience(rows[start : start + size]))
            self.store.experience = self.prepare_experience(self.store.experience)
        self.progress.samples += len(self.store) * world

    def _train_on(self, batch: Batch) -> None:
        started = time.perf_counter()
        self.record(self.update(batch))
        self._time("time/update", started)
        self._log()
        self.hooks.hook.on_step(trainer=self, step=self.progress.step)

    def update(self, batch: Batch) -> m.Metrics:
        """One optimizer step on ``batch``: the whole of it, for every algorithm.

        The gradient is that of the mean over the batches of all processes, however they are split (law 3). A step that
        `judge` leaves out is left out on all of them; it counts, and the schedule moves on.

        Raises:
            NonFiniteError: the loss or the gradient is not finite; neither weights nor optimizer have moved.
        """
        at, scheduler = self.progress, self.scheduler  # the schedule must exist before the optimizer steps
        self.policy.train()
        device = self.accelerator.device
        weight = self.reduce(batch.weight.to(device))
        share = weight / self.accelerator.num_processes  # because gradients are averaged over processes
        found: m.Metrics = {}
        rank = self.accelerator.process_index
        micros = batch.split(self.config.train.microbatch_size, MICROBATCH_TOKENS.get(device.type, OTHER_TOKENS))
        with global_rng(self.config.train.seed, "dropout", at.step, rank, device=device):
            for index, micro in enumerate(micros):
                with self._synchronised(last=index == len(micros) - 1):
                    found = m.merge(found, self._backward(micro.to(device), share))
        verdict = self._judged(found)
        found |= self._make_step(found) if verdict is Verdict.STEP else {"train/skipped": m.Mean.of(torch.ones(()))}
        self.optimizer.zero_grad()
        optim.advance(scheduler)
        self.unwrapped.eval()
        at.step, at.tokens, at.stopped = at.step + 1, at.tokens + int(weight), verdict is Verdict.STOP
        self.after_step()
        return {**found, "train/lr": m.Mean.of(torch.tensor(self._lr, dtype=torch.float64))}

    def _judged(self, found: m.Metrics) -> Verdict:
        """`judge`'s verdict on metrics of all processes, so that all hear the same; who does not judge pays nothing."""
        if not self._judges:
            return Verdict.STEP
        return self.judge(m.compute(found, self.reduce))

    @property
    def _judges(self) -> bool:
        return getattr(self.judge, "__func__", None) is not BaseRLTrainer.judge

    def _make_step(self, found: m.Metrics) -> m.Metrics:
        """Clip the gradient and step; ``train/skipped`` where a step can be left out, by `judge` or fp16's scaler."""
        norm = self._clip(self.policy)
        self._refuse_non_finite(found, norm)
        self.optimizer.step()
        made: m.Metrics = {"train/grad_norm": m.Mean.of(norm)}
        if self._judges or self.accelerator.scaler is not None:
            skipped = self.accelerator.optimizer_step_was_skipped  # by the scaler, on overflow
            made["train/skipped"] = m.Mean.of(torch.tensor(float(skipped)))
        return made

    def _backward(self, micro: Batch, share: Tensor) -> m.Metrics:
        weight = micro.weight.to(share.device)
        with self.accelerator.autocast():
            loss, found = self.loss(micro)
        self.accelerator.backward(loss * weight / share)
        return {**found, "loss/total": m.Mean(exact(loss.detach() * weight), exact(weight))}

    def _synchronised(self, last: bool) -> Any:
        """Gradients are exchanged between processes with the last micro-batch only."""
        return torch.enable_grad() if last else self.accelerator.no_sync(self.policy)

    def _clip(self, policy: nn.Module) -> Tensor:
        limit = self.config.train.max_grad_norm
        norm = self.accelerator.clip_grad_norm_(policy.parameters(), math.inf if limit is None else limit)
        return torch.as_tensor(norm).detach()

    def _refuse_non_finite(self, found: m.Metrics, norm: Tensor) -> None:
        loss = self.reduce(torch.stack(found["loss/total"].tensors()))
        overflow = self.accelerator.scaler is not None  # fp16: the scaler skips the step and lowers its scale
        if bool(loss.isfinite().all()) and (bool(norm.isfinite()) or overflow):
            return
        named = [
            name for name, p in self.unwrapped.named_parameters() if p.grad is not None and not p.grad.isfinite().all()
        ]
        self.optimizer.zero_grad()
        raise NonFiniteError(
            f"step {self.progress.step + 1}: the loss is {float(loss[0] / loss[1])} and the gradient norm {float(norm)}"
            f"{'; not finite in ' + ', '.join(named[:3]) if named else ''}. The weights have not moved. Look at the "
            "rewards, lower optimizer.lr, or set train.max_grad_norm"
        )

    @property
    def _lr(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    # ----------------------------------------------------------------------------------------- for the algorithm

    def sample(self, rows: list[Row]) -> Rollouts:
        """One sampled response per row, at the rollout's settings; the randomness is the training's own."""
        key = self.progress.sampled
        self.progress.sampled += 1
        queries, rank = [self.encode(row["prompt"]) for row in rows], self.accelerator.process_index
        seeds = row_seeds(rows, queries, "sample", self.progress.collection, rank, seen=self._seen)
        rollouts = self._sample(rows, queries, self.settings(), "sample", key, seeds)
        self._rollouts.append(replace(rollouts, hidden=None))  # for the hooks, which outlive the experience
        return rollouts

    def score(self, rollouts: Rollouts) -> Tensor:
        """The reward function's scores [B], or [B, T] where it gives rewards per token."""
        assert self.reward_fn is not None, "train() and learn() see to it that an online trainer has a reward_fn"
        return score(self.reward_fn, rollouts, self.tokenizer).to(self.accelerator.device)

    def make_experience(self, rows: list[Row]) -> Batch:
        """Sample, score, and make experience of it: what an online algorithm does. Offline ones override this."""
        rollouts = self.sample(rows)
        return self._experience(rollouts, self.score(rollouts))

    def _experience(self, rollouts: Rollouts, scores: Tensor) -> Batch:
        whole = scores if scores.dim() == 1 else scores.sum(1)
        self.record(
            {
                "reward/mean": m.Mean.of(whole),
                "reward/std": m.Std.of(whole),
                "rollout/length": m.Mean.of(rollouts.sequences.response_mask.sum(1)),
                "rollout/terminated": m.Mean.of(rollouts.terminated),
            }
        )
        if isinstance(self.unwrapped, CausalPolicy):  # the frozen layers run here, and not again
            rollouts = replace(rollouts, sequences=self.unwrapped.through_trunk(rollouts.sequences))
        return self.experience(rollouts, scores)

    def encode_samples(self, rows: list[Row]) -> Sequences:
        """Sample rows as sequences on the device, outputs and their EOS marked as responses."""
        encoded = [encode_sample(self.tokenizer, row, self.limit) for row in rows]
        sequences = Sequences.from_rows(
            [ids for ids, _ in encoded], [chosen for _, chosen in encoded], pad_id(self.tokenizer)
        )
        return sequences.to(self.accelerator.device)

    @torch.no_grad()
    def behaviour(self, rollouts: Rollouts) -> TokenOutputs:
        """What the policy that sampled ``rollouts`` says about them: log-probabilities, entropies, values.

        The sampler has seen it all, so nothing is run again where its numbers are the policy's. Whether they are,
        the first collection shows, for which the policy is run: cached keys and values may round differently, by a
        little in float32 and by too much below.
        """
        at, seen, sampler = self.progress, _as_sampled(rollouts, self.unwrapped), type(self.sampler).__qualname__
        if at.sampler != sampler:
            at.sampler, at.sampler_exact = sampler, None
        if at.sampler_exact and at.step > 0 and seen is not None:
            return seen
        outputs: TokenOutputs = self.unwrapped(rollouts.sequences, entropy=True)
        if at.sampler_exact is not False and seen is not None:
            off = (seen.logprobs - outputs.logprobs).abs().max() > SAMPLER_TOLERANCE
            at.sampler_exact = not bool(self.reduce(off.float()))
            if not at.sampler_exact:
                log.info("the sampler's log-probabilities are not quite the policy's, which is therefore run again")
        return outputs

    def record(self, metrics: m.Metrics) -> None:
        """Add metrics to those that are logged with the next step."""
        self._pending = m.merge(self._pending, metrics)

    def reduce(self, x: Tensor) -> Tensor:
        """``x`` summed over all processes, on the device it came from."""
        if self.accelerator.num_processes == 1:
            return x
        total: Tensor = self.accelerator.reduce(x.to(self.accelerator.device), "sum")
        return total.to(x.device)

    # -------------------------------------------------------------------------------------- generating, by the user

    def settings(self, **overrides: Any) -> SamplingConfig:
        """The rollout's sampling settings, some of them overridden.

        Raises:
            ConfigError: no such setting, or not such a value.
        """
        return generation.settings(self.config.rollout, overrides)

    def generate(
        self,
        prompts: Any = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **overrides: Any,
    ) -> Rollouts:
        """Responses to ``prompts``: strings, dicts with a ``prompt``, or token ids; to one prompt or to several.

        What a tokenizer returns works too: ``trainer.generate(**tokenizer(texts, return_tensors="pt",
        padding=True))``. Every call draws anew; training is not disturbed.

        Args:
            prompts: the prompts.
            input_ids: [B, P] instead of prompts.
            attention_mask: [B, P], which of ``input_ids`` are real.
            **overrides: sampling settings over those of ``config.rollout``.
        """
        rows = generation.prompts_as_rows(prompts, input_ids, attention_mask)
        if self.config.train.resume:
            run.begin(self)  # what is drawn follows from where the resumed run stands
        queries, settings = [self.encode(row["prompt"]) for row in rows], self.settings(**overrides)
        key = self.progress.generated
        self.progress.generated += 1
        return self._sample(rows, queries, settings, "generate", key, row_seeds(rows, queries, "generate"))

    def generate_eval(self, prompts: Any = None, **overrides: Any) -> Rollouts:
        """As `generate`, with the settings of evaluations (the first value of a swept one)."""
        (_, first), *_ = sweep(self.config.rollout.eval_kwargs)
        return self.generate(prompts, **{**first, **overrides})

    def _sample(
        self,
        rows: list[Row],
        queries: list[list[int]],
        settings: SamplingConfig,
        purpose: str,
        key: int,
        seeds: list[int | None],
    ) -> Rollouts:
        """Rollouts drawn for one purpose at one place; ``seeds`` are those of the rows that have one."""
        longest = max(len(query) for query in queries)
        if self.limit is not None and longest + settings.max_new_tokens > self.limit:
            raise DataError(
                f"a prompt of {longest} tokens and max_new_tokens {settings.max_new_tokens} do not fit into "
                f"{self.limit} tokens, the model's context or train.seq_length; lower max_new_tokens or "
                "shorten the prompt"
            )
        sampler, rank = self.sampler, self.accelerator.process_index
        draws = generator(self.config.train.seed, purpose, rank, key, device=self.accelerator.device)
        seeded = [row if seed is None else {**row, "seed": seed} for row, seed in zip(rows, seeds, strict=True)]
        self.unwrapped.eval()
        with self.accelerator.autocast():
            rollouts = sampler(seeded, queries, settings, draws).to(self.accelerator.device)
        return replace(rollouts, rows=rows)

    def decode(
        self,
        prompts: Sequence[Tensor],
        samples: Sequence[Tensor],
        prompt_sizes: Sequence[int] | None = None,
        append_eos_token: bool = False,
    ) -> tuple[list[str], list[str], list[str]]:
        """Token ids to text: (samples, prompts, outputs), outputs cut at the first stop string.

        Args:
            prompts: prompt ids, one 1-D tensor each.
            samples: prompt and response ids, one 1-D tensor each.
            prompt_sizes: how many ids of each sample are its prompt; the prompts' lengths without it.
            append_eos_token: end those outputs with EOS's text that were cut, or ended by EOS.
        """
        sizes = [len(p) for p in prompts] if prompt_sizes is None else prompt_sizes
        return generation.decode_samples(self.tokenizer, self.config.rollout, prompts, samples, sizes, append_eos_token)

    # ------------------------------------------------------------------------------------- the loop, by the user

    def step(self, queries: Sequence[Any], responses: Sequence[Any], scores: Any) -> dict[str, float]:
        """Learn from responses that you scored yourself: one collection, all its passes and optimizer steps.

        Args:
            queries: prompts, as text or token ids, one per response.
            responses: the sampled token ids, 1-D tensors, as `generate` gave them; never text, which need not
                encode to the ids that were sampled (S-09).
            scores: a number per response, or a list of numbers per response for rewards per token.

        Returns:
            The metrics of this step, averaged over its optimizer steps.

        Raises:
            DataError, RewardError: the three do not fit together.
        """
        rollouts = generation.given_rollouts(self, queries, responses)
        checked = check_scores(scores, rollouts, "step(scores=...)").to(self.accelerator.device)
        run.begin(self)
        self.store.clear()
        self._rollouts = [rollouts]
        self.progress.epoch, self.progress.position, self.progress.stopped = 0, 0, False
        self.unwrapped.eval()
        with torch.no_grad(), self.accelerator.autocast():
            self.store.push(self._experience(rollouts, checked))
            self.store.experience = self.prepare_experience(self.store.experience)
        self.progress.samples += len(rollouts) * self.accelerator.num_processes
        self.hooks.hook.on_experience(trainer=self, experience=self.store.experience, rollouts=self._rollouts)
        for _ in range(self.passes or 1):
            for batch in self._one_pass():
                self.record(self.update(batch))
                self.hooks.hook.on_step(trainer=self, step=self.progress.step)
        self._next_collection()
        return self._log()

    # ------------------------------------------------------------------------------------- evaluating and logging

    def evaluate(self) -> dict[str, float]:
        """Sample responses to the evaluation prompts, score and measure them; training is not disturbed.

        Returns:
            Means by name: ``eval/reward``, ``eval/<metric>``, ``eval/length``; with a swept setting each name ends in
            ``@setting=value``.

        Raises:
            DataError: there are no evaluation prompts.
        """
        if not self.eval_rows:
            raise DataError("there are no evaluation prompts; give eval_prompts, or call add_eval_pipeline(prompts)")
        found, samples = evaluate(self)
        if self.accelerator.is_main_process:
            self.hooks.hook.log_metrics(trainer=self, step=self.progress.step, metrics=found)
        self.hooks.hook.on_evaluate(trainer=self, step=self.progress.step, metrics=found, samples=samples)
        return found

    def _evaluate_if(self, due: bool) -> None:
        if due and self.eval_rows and self.config.train.eval_interval:
            run.keep_best(self, self.evaluate())

    def _log(self) -> dict[str, float]:
        now = time.perf_counter()
        self.progress.seconds, self._clock = self.progress.seconds + now - self._clock, now
        found = m.compute(self._pending, self.reduce)
        self._pending = {}
        if self.accelerator.is_main_process:
            self.hooks.hook.log_metrics(trainer=self, step=self.progress.step, metrics=found)
        return found

    def _time(self, name: str, started: float) -> None:
        self.record({name: m.Mean.of(torch.tensor(time.perf_counter() - started, device=self.accelerator.device))})

    # ------------------------------------------------------------------------------------------------------ saving

    def save_pretrained(self, directory: str | Path | None = None) -> Path:
        """Export for transformers: base-model weights, config and tokenizer; the heads in a file beside them (S-19).

        ``AutoModelForCausalLM.from_pretrained(directory)`` gives a model with equal logits.
        """
        return run.export(self, directory)

    def save(self, directory: str | Path | None = None) -> Path:
        """Write a checkpoint now; to the run directory without an argument."""
        return run.save(self, None if directory is None else Path(directory))

    def load(self, directory: str | Path) -> None:
        """Take over everything from a checkpoint directory, or from the newest whole one under a directory."""
        run.load(self, Path(directory))

    def loop_state(self) -> dict[str, Any]:
        """Everything that training on depends on beside the model's weights and the store."""
        return {
            "progress": asdict(self.progress),
            "method": self.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": None if self.accelerator.scaler is None else self.accelerator.scaler.state_dict(),
        }

    def load_loop_state(self, state: dict[str, Any]) -> None:
        """Take over what `loop_state` gave."""
        optim.load(self.optimizer, self.scheduler, state)
        if self.accelerator.scaler is not None and state["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        self.load_state_dict(state["method"])
        self.progress = Progress(**state["progress"])


def _as_sampled(rollouts: Rollouts, policy: Any) -> TokenOutputs | None:
    """What the sampler saw of the policy; None if it did not see everything that the policy says."""
    head, sequences = getattr(policy, "value_head", None), rollouts.sequences
    if rollouts.logprobs is None or rollouts.entropy is None:
        return None
    if head is None:
        return TokenOutputs(rollouts.logprobs, entropy=rollouts.entropy)
    if rollouts.hidden is None:
        return None
    return TokenOutputs(
        rollouts.logprobs, sequences.place(head(rollouts.hidden[sequences.response_mask])), rollouts.entropy
    )


def _is_installed(name: str) -> bool:
    return any(plugin.name == name for plugin in discover())


def _due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
