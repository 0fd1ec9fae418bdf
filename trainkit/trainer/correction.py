"""Corrections for rollouts that other weights, or another implementation of the model, have sampled."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from trainkit import metrics as m
from trainkit.config import TRLConfig
from trainkit.data import Rollouts
from trainkit.errors import ConfigError
from trainkit.functional import (
    effective_sample_size,
    importance_ratios,
    masked_ratios,
    masked_sum,
    to_float64,
    truncated_ratios,
)
from trainkit.models import TokenOutputs
from trainkit.plugins.hooks import entry_name
from trainkit.rollouts import EngineSampler
from trainkit.runs.parallel import Parallel
from trainkit.runs.progress import Progress
from trainkit.trainer.models import Models
from trainkit.trainer.recording import Recorder
from trainkit.trainer.sampling import Sampling
from trainkit.trainer.settings import changed_settings

log = logging.getLogger(__name__)

SAMPLER_TOLERANCE = 1e-4
"""Largest difference between log-probabilities of sampler and policy that counts as rounding in float32."""


class Correction:
    """The log-probabilities that sampled rollouts are compared with, and the weights that correct for a difference.

    Args:
        config: the run's configuration.
        supported: the values of `rollout.correction`, besides ``"none"``, that the algorithm supports.
        level: returns whether importance weights are those of a ``token`` or a ``sequence``.
        models: the policy.
        sampling: the sampler and its engine.
        parallel: the processes.
        recorder: gets the metrics of corrections.
        progress: keeps whether the sampler computes what the policy does.
        keeps_sharded: returns whether the model stays divided while responses are sampled.
    """

    def __init__(
        self,
        config: TRLConfig[Any],
        supported: tuple[str, ...],
        level: Callable[[], str],
        models: Models,
        sampling: Sampling,
        parallel: Parallel,
        recorder: Recorder,
        progress: Progress,
        keeps_sharded: Callable[[], bool],
    ) -> None:
        self.config, self.supported, self._level, self.models, self.sampling = (
            config,
            supported,
            level,
            models,
            sampling,
        )
        self.parallel, self.recorder, self.progress, self._keeps_sharded = parallel, recorder, progress, keeps_sharded

    @cached_property
    def kind(self) -> str:
        """The correction of this run: `rollout.correction`, or what ``auto`` stands for."""
        rollout = self.config.rollout
        if rollout.correction != "auto":
            return rollout.correction
        exact = rollout.staleness == 0 and self.sampling.engine_class.exact
        return "decoupled" if not exact and "decoupled" in self.supported else "none"

    @property
    def starts_on_policy(self) -> bool:
        """Whether a first pass over rollouts is made with the log-probabilities of the policy itself."""
        uncorrected = self.config.rollout.staleness > 0 and not self.supported
        return (self.kind != "sampler" or self._samples_newest) and not uncorrected

    @property
    def _samples_newest(self) -> bool:
        """Whether trainkit's sampler samples with the newest weights, in this process."""
        return not self.config.rollout.staleness and self.sampling.engine_class.exact and not self._keeps_sharded()

    @property
    def _weighs(self) -> bool:
        return self.kind in ("decoupled", "masked")

    @property
    def _sampler_name(self) -> str:
        sampler = self.sampling.sampler
        return (
            entry_name(self.config.rollout.engine) if isinstance(sampler, EngineSampler) else type(sampler).__qualname__
        )

    def check(self, *, online: bool) -> None:
        """Check that the settings of corrections suit the algorithm; log if it corrects for no difference.

        Raises:
            ConfigError: they do not.
        """
        rollout, name = self.config.rollout, self.config.method.name
        if rollout.correction not in ("auto", "none", *self.supported):
            raise ConfigError(
                f"rollout.correction is {rollout.correction!r}, and {name!r} supports "
                f"{' and '.join(self.supported) or 'none'}; choose one of them, or 'auto'"
            )
        weighing = [key for key in changed_settings(self.config) if key.startswith("rollout.correction_")]
        if weighing and not self._weighs:
            raise ConfigError(
                f"{' and '.join(weighing)} cannot be set with the correction {self.kind!r}, which has no importance "
                "weights; set rollout.correction to 'decoupled' or 'masked', or remove it"
            )
        uncorrected = online and self.kind == "none" and rollout.correction == "auto"
        if uncorrected and (rollout.staleness or not self.sampling.engine_class.exact) and self.parallel.is_main:
            log.warning(
                "%s corrects for no difference between the weights that sample and those that are trained; its "
                "rollouts are trained on as if they were sampled with the newest weights",
                name,
            )

    @torch.no_grad()
    def behaviour(self, rollouts: Rollouts) -> TokenOutputs:
        """Return what the policy that sampled ``rollouts`` computes; see `AccelerateRLTrainer.behaviour`."""
        self.models.build()
        ahead, policy, at = self.config.rollout.staleness > 0, self.models.unwrapped, self.progress
        if ahead and not self.supported and rollouts.logprobs is not None and rollouts.entropy is not None:
            return TokenOutputs(rollouts.logprobs, entropy=rollouts.entropy)
        if self.kind != "none" or ahead or self._keeps_sharded():
            trusted = self.kind == "sampler" and self._samples_newest and at.step > 0
            sampled = _as_sampled(rollouts, policy) if trusted else None
            return self._proximal(rollouts) if sampled is None else sampled
        sampled, sampler = _as_sampled(rollouts, policy), self._sampler_name
        if at.sampler != sampler:
            at.sampler, at.sampler_exact = sampler, None
        if at.sampler_exact and at.step > 0 and sampled is not None:
            return sampled
        outputs: TokenOutputs = policy(rollouts.sequences, entropy=True)
        if at.sampler_exact is not False and sampled is not None:
            differs = (sampled.logprobs - outputs.logprobs).abs().max() > SAMPLER_TOLERANCE
            at.sampler_exact = not bool(self.parallel.reduce(differs.float()))
            if not at.sampler_exact:
                log.info("the sampler's log-probabilities differ from the policy's; the policy is run to compute them")
        return outputs

    def _proximal(self, rollouts: Rollouts) -> TokenOutputs:
        """Return what the policy computes for ``rollouts`` now, and record how far the sampler is from it."""
        outputs: TokenOutputs = self.models.unwrapped(rollouts.sequences, entropy=True)
        if rollouts.logprobs is None and self.config.rollout.correction == "auto" and self.kind != "none":
            self.kind = "none"
            if self.parallel.is_main:
                log.warning(
                    "the engine %r gives no log-probabilities, so rollouts are trained on as if they were sampled with "
                    "the newest weights",
                    self._sampler_name,
                )
        if rollouts.logprobs is not None:
            gap = rollouts.logprobs - outputs.logprobs
            self.recorder.record({"policy/sampler_kl": m.Mean.of(gap, rollouts.sequences.response_mask)})
        if self.kind == "sampler":
            return outputs._replace(logprobs=self._sampler_logprobs(rollouts))
        return outputs

    def _sampler_logprobs(self, rollouts: Rollouts) -> Tensor:
        if rollouts.logprobs is None:
            raise ConfigError(
                f"rollout.correction {self.kind!r} needs the log-probabilities with which responses were sampled, and "
                f"{self._sampler_name!r} gives none; set rollout.correction to 'none'"
            )
        return rollouts.logprobs

    @torch.no_grad()
    def importance_weights(self, rollouts: Rollouts, policy: TokenOutputs) -> Tensor:
        """Return the weights of response tokens in the loss [B, T]; see `AccelerateRLTrainer.importance_weights`."""
        if not self._weighs:
            return torch.ones_like(policy.logprobs)
        mask = rollouts.sequences.response_mask
        ratios = importance_ratios(policy.logprobs, self._sampler_logprobs(rollouts), mask, level=self._level())
        correct = truncated_ratios if self.kind == "decoupled" else masked_ratios
        weights = correct(ratios, self.config.rollout.correction_cap)
        size = effective_sample_size(weights, mask)
        self.recorder.record(
            {
                "rollout/kept_mass": m.Mean(
                    to_float64(masked_sum(weights, mask)), to_float64(masked_sum(ratios, mask))
                ),
                "rollout/effective_sample_size": m.Mean(to_float64(size), to_float64(mask.sum())),
            }
        )
        return weights


def _as_sampled(rollouts: Rollouts, policy: Any) -> TokenOutputs | None:
    """Return the policy's outputs as the sampler computed them; None if it did not compute all of them."""
    head, sequences = getattr(policy, "value_head", None), rollouts.sequences
    if rollouts.logprobs is None or rollouts.entropy is None:
        return None
    if head is None:
        return TokenOutputs(rollouts.logprobs, entropy=rollouts.entropy)
    if rollouts.hidden is None or getattr(policy, "critic", None) is not None:
        return None
    return TokenOutputs(
        rollouts.logprobs, sequences.place(head(rollouts.hidden[sequences.response_mask])), rollouts.entropy
    )
