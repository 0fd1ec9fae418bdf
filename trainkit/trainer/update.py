"""Optimizer steps: micro-batches, exact means over all processes, clipping, and what is skipped or refused."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from trainkit import metrics as m
from trainkit.config import TrainConfig
from trainkit.data import Batch
from trainkit.errors import ConfigError, NonFiniteError, OutOfMemoryError, TrainkitError
from trainkit.functional import to_float64
from trainkit.models.experts import Balance, ExpertBalance, tokens_of
from trainkit.models.fitting import (
    ADVICE,
    STATES,
    RowLimit,
    first_line,
    memory_of,
    no_smaller,
    out_of_memory,
    release,
    tokens_that_fit,
)
from trainkit.plugins.hooks import entry_name
from trainkit.runs.parallel import Parallel
from trainkit.runs.progress import Progress
from trainkit.runs.resharding import local
from trainkit.seeding import global_rng
from trainkit.trainer import optim
from trainkit.trainer.base import BaseRLTrainer, Verdict, overridden
from trainkit.trainer.models import Models
from trainkit.trainer.recording import Recorder
from trainkit.trainer.returns import checked_batch, checked_loss, checked_verdict
from trainkit.trainer.sharding import whole_tensor

log = logging.getLogger(__name__)

B = TypeVar("B", bound=Batch)
T = TypeVar("T")
R = TypeVar("R")

MICROBATCH_TOKENS = {"cpu": 2048}
"""Tokens of a micro-batch where `train.microbatch_size` is not set, by device type. More do not speed up a CPU."""
OTHER_TOKENS = 32_768
"""The same for all other devices. Accelerators are faster with more tokens, up to a limit; memory use grows, too."""


class Updater:
    """Makes optimizer steps. Every algorithm is trained by `update`.

    Args:
        config: the section ``train``.
        algorithm: its `loss`, `prepare_step`, `judge` and `after_step` are called.
        models: the policy and the optimizer.
        parallel: the processes.
        recorder: the metrics that the algorithm records in a step.
        progress: counts steps, tokens and rows.
        inference: returns a context in which the model is run without gradient.

    Raises:
        ConfigError: a step cannot be made again after one process ran out of memory, and `train.microbatch_size` is
            ``auto``.
    """

    def __init__(
        self,
        config: TrainConfig,
        algorithm: BaseRLTrainer[Any],
        models: Models,
        parallel: Parallel,
        recorder: Recorder,
        progress: Progress,
        inference: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.config, self.algorithm, self.models, self.parallel = config, algorithm, models, parallel
        self.recorder, self.progress, self._inference = recorder, progress, inference
        self.row_limit = models.row_limit
        self.changing = False
        """Whether the weights or the experience are being changed, so that the state is that of no step."""
        self.unit = "tokens"
        """The unit that `Progress.tokens` counts: that of the last step's batch."""
        self._warned_past_the_end = False
        self._share_of_balance = 0.0
        """By which the loss that balances the experts is multiplied."""
        if config.microbatch_size == "auto" and not parallel.sharding.repeats:
            raise ConfigError(
                f"train.microbatch_size is 'auto', and with train.sharding {entry_name(config.sharding)!r} processes "
                "wait for each other within a pass, so none can make it again alone; give a number, which trainkit "
                "estimate finds"
            )

    def update(self, batch: Batch) -> m.Metrics:
        """Make one optimizer step on ``batch``, and return its metrics. Every algorithm is trained by this method.

        The gradient is that of the mean over the batches of all processes, however they are split. A step that `judge`
        skips, or whose weight is 0, is skipped on all processes. It is counted, and the schedule advances.

        Raises:
            NonFiniteError: the loss or the gradient is not finite; neither the weights nor the optimizer have changed.
        """
        self.unit = batch.unit
        self.models.build()
        self._warn_past_the_end()
        at, scheduler = self.progress, self.models.scheduler  # it must exist before the optimizer steps
        weight = self.parallel.reduce(batch.weight.to(self.parallel.device))
        metrics, verdict, counted = {}, Verdict.SKIP, float(weight)  # read once: on a GPU each time waits
        if counted > 0:
            metrics = self._gradient(batch, weight)
            verdict = self._judged(metrics)
        metrics |= self._make_step(metrics) if verdict is Verdict.STEP else {"train/skipped": m.Mean.of(torch.ones(()))}
        self.models.optimizer.zero_grad()
        rates = {"train/lr": self.models.learning_rate}  # those of this step; the schedule moves on to the next one's
        rates |= {f"train/lr/{match}": rate for match, rate in self.models.rates_of_groups.items()}
        optim.advance(scheduler)
        self.models.unwrapped.eval()
        at.step, at.tokens, at.stopped = at.step + 1, at.tokens + int(counted), verdict is Verdict.STOP
        if verdict is Verdict.STEP and not self._overflowed:
            at.trained += len(batch) * self.parallel.world
            self._after_step()
        self.changing = False
        return metrics | {name: m.Mean.of(torch.tensor(rate, dtype=torch.float64)) for name, rate in rates.items()}

    def _warn_past_the_end(self) -> None:
        """Log a warning, once, when a loop of the caller's own goes on after the schedule has ended."""
        end, schedule = self.models.total_steps, self.models.config.scheduler.name
        if end and self.progress.step >= end and schedule != "constant" and not self._warned_past_the_end:
            self._warned_past_the_end = True
            log.warning(
                "step %d is past the last step of the run, %d: the schedule %r has ended, and the learning rate is %g. "
                "Raise train.total_steps, or set scheduler.name to 'constant'",
                self.progress.step + 1,
                end,
                schedule,
                self.models.learning_rate,
            )

    def _after_step(self) -> None:
        """Call `after_step`; the model is gathered for it only if it is overridden."""
        if overridden(self.algorithm.after_step, BaseRLTrainer.after_step):
            with self.parallel.sharding.unsharded(write=True):
                self.algorithm.after_step()

    @property
    def _overflowed(self) -> bool:
        """Whether fp16's gradient scaler has skipped the last step, because gradients overflowed."""
        accelerator = self.parallel.accelerator
        return accelerator.scaler is not None and bool(accelerator.optimizer_step_was_skipped)

    def _gradient(self, batch: Batch, weight: Tensor) -> m.Metrics:
        """Compute the gradient of the mean over ``weight`` units, those of all processes, and return the metrics."""
        share = weight / self.parallel.world  # because gradients are averaged over processes
        prepared = self._prepared_for_step(batch)
        if (balance := self._balance) is not None:
            tokens = float(self.parallel.reduce(torch.tensor(tokens_of(prepared)))) / self.parallel.world
            self._share_of_balance = balance.coefficient / tokens
        recorded = self.recorder.pending
        while (metrics := self._attempt(self.micro_batches(prepared), share)) is None:
            self.recorder.pending = recorded
            self.models.optimizer.zero_grad()
            release()
        self.parallel.sharding.exchange()
        return metrics

    def _attempt(self, micros: list[Batch], share: Tensor) -> m.Metrics | None:
        """Make the passes of a step; return None if they are to be made again with the new `row_limit`.

        That is when they did not fit into the memory of some process. Random numbers are drawn anew in each attempt, so
        the gradient is that of a step which was made with this number of rows from the beginning.

        Raises:
            OutOfMemoryError: they did not fit, and there are no smaller micro-batches.
        """
        metrics: m.Metrics = {}
        fault = ""
        try:
            metrics = self._accumulate(micros, share)
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, TrainkitError) or not out_of_memory(error):
                raise
            self.models.optimizer.zero_grad()
            fault = first_line(error)
            if self.row_limit is None:
                raise OutOfMemoryError(
                    f"a micro-batch of {max(map(len, micros))} rows does not fit into memory ({fault}). Set "
                    f"train.microbatch_size to a smaller number, or to 'auto'. {ADVICE}"
                ) from error
        return metrics if self.row_limit is None or self._fits(self.row_limit, max(map(len, micros)), fault) else None

    def _fits(self, limit: RowLimit, rows: int, fault: str) -> bool:
        """Return whether a step with micro-batches of ``rows`` rows has fit on every process; if not, halve the limit.

        All processes then have the same limit.
        """
        most = torch.tensor([rows // 2 if fault else limit.rows or math.inf, -float(bool(fault))])
        least, failed = self.parallel.min(most).tolist()
        if failed and not least:
            error = OutOfMemoryError(no_smaller(fault or "on another process"))
            error.on_all_ranks = True
            raise error
        limit.rows = int(least) if least < math.inf else None
        if failed and self.parallel.is_main:
            log.warning(
                "step %d does not fit into memory; it is made again with micro-batches of %d rows (gradient unchanged)",
                self.progress.step + 1,
                limit.rows,
            )
        return not failed

    def _accumulate(self, micros: list[Batch], share: Tensor) -> m.Metrics:
        """Make the passes of a step: accumulate the gradient, and return the metrics."""
        device, rank = self.parallel.device, self.parallel.rank
        metrics: m.Metrics = {}
        self.models.policy.train()
        with global_rng(self.config.seed, "dropout", self.progress.step, rank, device=device):
            passes = self.parallel.sharding.passes(len(micros))
            for index in range(passes):
                with self.parallel.sharding.synchronised(last=index == passes - 1):
                    if index < len(micros):
                        metrics = m.merge(metrics, self._backward(micros[index].to(device), share))
                    else:  # other processes have more; all make the passes together
                        self._backward(micros[-1].to(device), share, factor=0.0)
        return metrics

    def _prepared_for_step(self, batch: Batch) -> Batch:
        """Return what `prepare_step` makes of the batch; the model is gathered for it only if it is overridden."""
        if not overridden(self.algorithm.prepare_step, BaseRLTrainer.prepare_step):
            return batch
        with self._inference():
            return checked_batch(self.algorithm, "prepare_step", self.algorithm.prepare_step(batch))

    def _judged(self, metrics: m.Metrics) -> Verdict:
        """Return `judge`'s verdict on the metrics of all processes, so that it is the same on each of them.

        The metrics are computed only if the algorithm overrides `judge`.
        """
        if not self.judges:
            return Verdict.STEP
        nothing = dict.fromkeys(metrics, math.nan)  # for metrics of which nothing was counted
        return checked_verdict(self.algorithm, self.algorithm.judge(nothing | m.compute(metrics, self.parallel.reduce)))

    @property
    def judges(self) -> bool:
        """Whether the algorithm can skip steps."""
        return overridden(self.algorithm.judge, BaseRLTrainer.judge)

    def _make_step(self, metrics: m.Metrics) -> m.Metrics:
        """Clip the gradient and step; record ``train/skipped`` if `judge` or fp16's scaler can skip steps."""
        norm = self.parallel.sharding.clip(self.config.max_grad_norm)
        self._refuse_non_finite(metrics, norm)
        self.changing = True
        self.models.optimizer.step()
        step_metrics: m.Metrics = {"train/grad_norm": m.Mean.of(norm)}
        if self.judges or self.parallel.accelerator.scaler is not None:
            skipped = self.parallel.accelerator.optimizer_step_was_skipped  # by the scaler, on overflow
            step_metrics["train/skipped"] = m.Mean.of(torch.tensor(float(skipped)))
        return step_metrics

    @property
    def most(self) -> tuple[int | None, int | None]:
        """The most rows and tokens of a micro-batch."""
        size = self.config.microbatch_size
        if isinstance(size, int):
            return size, None
        return None if self.row_limit is None else self.row_limit.rows, self.tokens_of_a_micro_batch

    def micro_batches(self, batch: B) -> list[B]:
        """Split a batch into the parts that go through the model one at a time."""
        return [batch] if len(groups := self._groups(batch)) == 1 else [batch.select(rows) for rows in groups]

    @property
    def tokens_of_a_micro_batch(self) -> int:
        """About how many tokens a micro-batch has, unless `train.microbatch_size` is a number."""
        usual = MICROBATCH_TOKENS.get(self.parallel.device.type, OTHER_TOKENS)
        return usual if self._tokens_that_fit is None else min(usual, self._tokens_that_fit)

    @cached_property
    def _tokens_that_fit(self) -> int | None:
        """The tokens that a pass has memory for, beside weights, gradients and two moments; None if that is unknown."""
        if (memory := memory_of(self.parallel.device)) is None:
            return None
        model: Any = getattr(self.models.unwrapped, "model", None)
        if not hasattr(getattr(model, "config", None), "get_text_config"):
            return None
        compared = [each.policy for each in (self.models.reference, *self.models.frozen) if hasattr(each, "policy")]
        weights = {id(p): p for each in (self.models.unwrapped, *compared) for p in each.parameters()}
        parts = [(local(p), p.requires_grad) for p in weights.values()]
        each = (part.nbytes + trained * part.numel() * (12 if part.itemsize > 2 else 16) for part, trained in parts)
        used = sum(each)  # gradients and two moments are in float32, and so are copies of weights in 16 bits
        low = self.parallel.accelerator.mixed_precision != "no" or model.dtype != torch.float32
        room, recomputes = STATES * memory - used, self.config.gradient_checkpointing
        return tokens_that_fit(model.config, room, low=low, recomputes=recomputes)

    def _groups(self, batch: Batch) -> list[Tensor]:
        return batch.groups(*self.most, together=self.algorithm.samples_per_prompt, shared=self.progress.shares_prompts)

    def in_micro_batches(self, batch: B, read: Callable[[B], Tensor]) -> Tensor:
        """Apply ``read(micro-batch [b]) -> [b, *]`` to a whole batch [B]; rows keep their order. -> [B, *].

        While the model is divided among the processes, all of them call it together, and make equally many passes.
        """
        if self.row_limit is None:
            return self._read_in_groups(batch, read)
        return self.row_limit.without_gradient(len(batch), lambda: self._read_in_groups(batch, read))

    def _read_in_groups(self, batch: B, read: Callable[[B], Tensor]) -> Tensor:
        groups = self._groups(batch)
        values = torch.cat(self.each_together(groups, lambda rows: read(batch.select(rows))))
        return values[torch.cat(groups).argsort().to(values.device)]

    def each_together(self, items: Sequence[T], call: Callable[[T], R]) -> list[R]:
        """Return what ``call`` returns for each item.

        While the model is divided, processes with fewer items repeat the last one and ignore the result, so that all
        run the model equally often.
        """
        runs_alone = self.parallel.sharding.gathered or not self.parallel.sharding.keeps_sharded
        more = 0 if runs_alone else self.parallel.sharding.passes(len(items)) - len(items)
        results = [call(item) for item in items]
        with self.recorder.discarding():
            for _ in range(more):
                call(items[-1])
        return results

    @torch.no_grad()
    def step_mean(self, batch: B, read: Callable[[B], Tensor]) -> Tensor:
        """Return the mean of ``read(micro-batch [b]) -> [b, *]`` over a step's rows of all processes. [B] -> [*].

        It is computed in float64 where the device has it, and returned in float32 on the CPU.
        """
        device = self.parallel.device
        parts = self.each_together(
            self.micro_batches(batch), lambda micro: to_float64(read(micro.to(device))).sum(0).cpu()
        )
        sums = torch.stack(parts).sum(0)
        counted = self.parallel.reduce(torch.cat([sums.flatten(), sums.new_tensor([len(batch)])]))
        mean: Tensor = counted[:-1] / counted[-1]
        return mean.view(sums.shape).float()

    def measure(self, micro: Batch) -> tuple[Tensor, m.Metrics]:
        """Return the algorithm's loss [] and its metrics, the loss itself among them."""
        with self.parallel.accelerator.autocast():
            loss, metrics = checked_loss(self.algorithm, self.algorithm.loss(micro))
        weight = to_float64(micro.weight.to(loss.device))
        return loss, {**metrics, "loss/total": m.Mean(to_float64(loss.detach()) * weight, weight)}

    def _backward(self, micro: Batch, share: Tensor, factor: float = 1.0) -> m.Metrics:
        balance, terms = self._balance, list[Balance]()
        with nullcontext(terms) if balance is None else balance.collected() as terms:
            loss, metrics = self.measure(micro)
        total = loss * micro.weight.to(share.device) / share
        for each in terms:
            total = total + self._share_of_balance * each.loss.to(total.dtype)
            sums = {"router/balance": each.loss.detach(), "router/entropy": each.entropy}
            metrics = m.merge(metrics, {name: m.Mean(value, each.tokens) for name, value in sums.items()})
        self.parallel.sharding.backward(total * factor)
        return metrics

    @property
    def _balance(self) -> ExpertBalance | None:
        """What adds up the loss that balances the experts of the policy."""
        return getattr(self.models.unwrapped, "balance", None)

    def _refuse_non_finite(self, metrics: m.Metrics, norm: Tensor) -> None:
        loss = self.parallel.reduce(torch.stack(metrics["loss/total"].tensors()))
        overflow = self.parallel.accelerator.scaler is not None  # fp16: the scaler skips the step and lowers its scale
        if bool(loss.isfinite().all() & (norm.isfinite().to(loss.device) | overflow)):
            return
        named = self.models.unwrapped.named_parameters()
        grads = {name: whole_tensor(p.grad) for name, p in named if p.grad is not None}
        names = [name for name, grad in grads.items() if not grad.isfinite().all()]
        self.models.optimizer.zero_grad()
        raise NonFiniteError(
            f"step {self.progress.step + 1}: the loss is {float(loss[0] / loss[1])} and the gradient norm {float(norm)}"
            f"{'; not finite in ' + ', '.join(names[:3]) if names else ''}. The weights have not moved. Look at the "
            "rewards, lower optimizer.lr, or set train.max_grad_norm"
        )
