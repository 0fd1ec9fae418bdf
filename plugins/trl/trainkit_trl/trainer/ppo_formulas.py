"""trainkit's PPO with the formulas of TRL, and with those that a script overrides."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from trainkit import Verdict, get_trainer
from trainkit import functional as F
from trainkit.errors import DataError, describe
from trainkit.metrics import Mean, Metrics, Std, compute, merge

log = logging.getLogger(__name__)
Trainer: Any = get_trainer("ppo")
PENALTIES = {"kl": F.kl_k1, "abs": F.kl_abs, "mse": F.kl_k2}
"""The penalties per token that are functions of the log-probabilities; ``full`` is that of whole distributions."""


class Controller:
    """A controller of TRL in the place of trainkit's: its ``value`` is β."""

    def __init__(self, given: Any) -> None:
        self.given = given

    @property
    def coef(self) -> float:
        """β."""
        return float(self.given.value)

    @coef.setter
    def coef(self, value: float) -> None:
        self.given.value = value

    @property
    def target(self) -> float | None:
        """The KL that β is adapted to."""
        return getattr(self.given, "target", None)

    def update(self, mean_kl: float, episodes: int) -> None:
        """Adapt β, once per collection."""
        self.given.update(mean_kl, episodes)


def after_others(model: Any, inputs: Mapping[str, Tensor], ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities [B, T - 1], logits [B, T - 1, V] and values [B, T - 1] of tokens that follow others.

    Args:
        model: a model with a value head.
        inputs: its arguments.
        ids: the tokens that its logits belong to [B, T].
    """
    logits, _, values = model(**inputs)
    return F.token_logprobs(logits[:, :-1].float(), ids[:, 1:]), logits[:, :-1], values[:, :-1]


class PPO(Trainer):  # type: ignore[misc]
    """trainkit's PPO with the formulas of a `PPOTrainer`: those of its configuration, and what it overrides.

    Methods of TRL have no column for the first token, which no policy chose: their column t belongs to token t + 1.

    Args:
        *args: those of trainkit's trainer.
        owner: the `PPOTrainer`.
        **kwargs: those of trainkit's trainer.
    """

    def __init__(self, *args: Any, owner: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.owner = owner
        self.seen: dict[str, Tensor] = {}
        """What TRL's statistics of a step have of single responses and tokens."""
        self.told: dict[str, Tensor] = {}
        """What `PPOTrainer.record_step_stats` is given."""
        self.losses: list[dict[str, Tensor]] = []
        """The statistics of losses that are overridden, of each pass."""
        self.seconds: dict[str, float] = {}
        """How long the parts of a step took."""
        if owner.config.use_score_norm and not owner.config.use_score_scaling:
            log.warning("use_score_norm has no effect without use_score_scaling, in TRL neither")

    # ------------------------------------------------------------------------------------------- experience

    def experience(self, rollouts: Any, scores: Tensor) -> Any:
        """Return what trainkit's PPO does, and keep the time."""
        started = perf_counter()
        found = super().experience(rollouts, scores)
        self.seconds["time/ppo/forward_pass"] = perf_counter() - started
        return found

    def prepare_experience(self, experience: Any) -> Any:
        """Return what trainkit's PPO does, and keep what TRL's statistics need."""
        started, x, coef = perf_counter(), experience, self.kl.coef
        self.losses, self.told = [], {"kls": x.penalty[:, 1:], "non_score_reward": -coef * x.penalty[:, 1:]}
        batch, mask = super().prepare_experience(experience), experience.sequences.response_mask
        self.record(
            {
                "reward/non_score": Mean.of(self.told["non_score_reward"], mask[:, 1:]),
                "values/std": Std.of(x.values, mask),
                "returns/std": Std.of(batch.returns, mask),
                "advantages/mean": Mean.of(batch.advantages, mask),
            }
        )
        logprobs, theirs = F.zero_masked(x.logprobs, mask), F.zero_masked(x.ref_logprobs, mask)
        self.told |= {"logprobs": logprobs[:, 1:], "ref_logprobs": theirs[:, 1:], "masks": mask[:, 1:].long()}
        self.seen = {
            "objective/kl_dist": F.masked_sum(F.kl_k1(x.logprobs, x.ref_logprobs), mask, dim=1).cpu(),
            "objective/logprobs": logprobs.cpu(),
            "objective/ref_logprobs": theirs.cpu(),
            "ppo/policy/advantages": batch.advantages[mask].cpu(),
        }
        self.seconds["time/ppo/compute_rewards"] = perf_counter() - started
        values = self.told.get("values")
        return batch if values is None else replace(batch, old_values=values)

    @torch.no_grad()
    def penalty(self, sequences: Any, policy: Any, reference: Any) -> Tensor:
        """Return the penalty per token that ``kl_penalty`` names [B, T]."""
        if self.owner.config.kl_penalty == "full":
            divergence: Tensor = self.unwrapped(sequences, reference=self.reference).divergence
            return divergence
        return PENALTIES[self.owner.config.kl_penalty](policy.logprobs, reference.logprobs)

    def rewards(self, experience: Any, scores: Tensor) -> Tensor:
        """Return the rewards per token [B, T], of the owner if it has its own."""
        x, mask = experience, experience.sequences.response_mask
        self.told["scores"] = scores.sum(1)
        if self.owner.overrides("compute_rewards", "_kl_penalty"):
            found = self.owner.compute_rewards(
                self.told["scores"], x.logprobs[:, 1:], x.ref_logprobs[:, 1:], mask[:, 1:].long()
            )
            names = ("rewards", "non_score_reward", "kls")
            self.told |= dict(zip(names, _tensors("compute_rewards", found, (2, 3)), strict=False))
            rewards = _aligned("compute_rewards", self.told["rewards"], mask)
        else:
            rewards = super().rewards(experience, scores)
        if not self.owner.config.whiten_rewards or self.owner.overrides("compute_advantages"):  # where TRL whitens them
            return rewards
        return F.whiten(rewards, mask, shift_mean=False, reduce=self.reduce)

    def advantages(self, experience: Any, rewards: Tensor) -> tuple[Tensor, Tensor]:
        """Return advantages and returns [B, T], of the owner if it has its own."""
        if not self.owner.overrides("compute_advantages"):
            found: tuple[Tensor, Tensor] = super().advantages(experience, rewards)
            return found
        mask = experience.sequences.response_mask
        given = (experience.values[:, 1:], rewards[:, 1:], mask[:, 1:].long())
        parts = _tensors("compute_advantages", self.owner.compute_advantages(*given), (3,))
        self.told["values"], advantages, returns = (_aligned("compute_advantages", part, mask) for part in parts)
        return advantages, returns

    def normalised(self, scores: Tensor, mask: Tensor, std: float) -> Tensor:
        """Return scores [B, T] divided by ``std``, with ``use_score_norm`` less their mean."""
        mean = self.moments.mean if self.owner.config.use_score_norm else 0.0
        return F.normalise_scores(scores, mask, mean=mean, std=std)

    # ------------------------------------------------------------------------------------------------- updates

    def loss(self, batch: Any) -> tuple[Tensor, Metrics]:
        """Return the loss and metrics, of the owner if it has its own."""
        if not self.owner.overrides("loss"):
            found: tuple[Tensor, Metrics] = super().loss(batch)
            return found
        old, values, logprobs, logits, predicted, *rest = self._columns(batch)
        returned = self.owner.loss(old, values, logits, predicted, logprobs, *rest)
        if not isinstance(returned, tuple) or [isinstance(each, Tensor) for each in returned[:2]] != [True, True]:
            raise DataError(
                f"loss should return two tensors and statistics, as TRL's; it returned {describe(returned)}"
            )
        policy, value, *stats = returned
        self._keep("loss", *stats)
        coef = self.owner.config.vf_coef or 1.0
        return policy + value, self._metrics(batch, logprobs, predicted, policy, value / coef)

    def _keep(self, name: str, stats: Any = None, *_: Any) -> None:
        """Keep the statistics that a method of the owner has returned."""
        if not isinstance(stats, dict):
            raise DataError(f"{name} should return a dictionary of statistics, as TRL's does; given {describe(stats)}")
        self.losses.append(stats)

    def update(self, batch: Any) -> Metrics:
        """Make an optimizer step, by the owner if it has its own `train_minibatch`."""
        self.optimizer.zero_grad()  # of the gradient that the last step has left to be read
        if self.owner.overrides("train_minibatch"):
            return self._trained_by_owner(batch)
        metrics: Metrics = super().update(batch)
        return metrics

    def _trained_by_owner(self, batch: Any) -> Metrics:
        """Let `train_minibatch` make the step, in passes of ``mini_batch_size`` rows."""
        at, micros = self.progress, batch.split(self.owner.config.mini_batch_size)
        self.policy.train()
        self.accelerator.gradient_accumulation_steps = self.owner.config.gradient_accumulation_steps
        metrics: Metrics = {"train/lr": Mean.of(torch.tensor(self.models.learning_rate))}
        for micro in micros:
            given = micro.to(self.accelerator.device)
            with self.accelerator.accumulate(self.policy):
                columns = self._columns(given)
                self._keep("train_minibatch", self.owner.train_minibatch(*columns))
            losses = (self.losses[-1].get(f"loss/{name}", torch.zeros(())) for name in ("policy", "value"))
            metrics = merge(metrics, self._metrics(given, columns[2], columns[4], *losses))
        self.unwrapped.eval()
        at.step, at.tokens, at.trained = at.step + 1, at.tokens + int(batch.weight), at.trained + len(batch)
        at.stopped = self.judge(compute(metrics, self.reduce)) is Verdict.STOP
        return metrics

    def _columns(self, batch: Any) -> tuple[Tensor, ...]:
        """Return the arguments of `train_minibatch`; [B, T - 1] each, logits [B, T - 1, V]."""
        sequences, mask = batch.sequences, batch.sequences.response_mask[:, 1:].long()
        inputs = {"input_ids": sequences.input_ids, "attention_mask": sequences.attention_mask.long()}
        logprobs, logits, values = after_others(self.owner.model, inputs, sequences.input_ids)
        given = batch.old_logprobs[:, 1:], batch.old_values[:, 1:]
        return *given, logprobs, logits, values, mask, batch.advantages[:, 1:], batch.returns[:, 1:]

    def _metrics(self, batch: Any, logprobs: Tensor, values: Tensor, policy: Tensor, value: Tensor) -> Metrics:
        """Return what trainkit's PPO measures of a loss, of that of the owner."""
        mask = batch.sequences.response_mask[:, 1:]
        count = int(mask.sum())
        log_ratio = F.zero_masked(logprobs - batch.old_logprobs[:, 1:], mask).detach()
        return {
            "loss/policy": Mean.of(policy.expand(count)),
            "loss/value": Mean.of(value.expand(count)),
            "policy/ratio": Mean.of(log_ratio.exp(), mask),
            "policy/approx_kl": Mean.of(log_ratio.exp() - 1 - log_ratio, mask),
            "values/predicted": Mean.of(values, mask),
            "values/error": Mean.of((values - batch.returns[:, 1:]) ** 2, mask),
        }


def _tensors(name: str, found: Any, counts: tuple[int, ...]) -> tuple[Tensor, ...]:
    if isinstance(found, tuple) and len(found) in counts and all(isinstance(each, Tensor) for each in found):
        return found
    wanted = " or ".join(map(str, counts))
    raise DataError(f"{name} should return {wanted} tensors, as TRL's does; it returned {describe(found)}")


def _aligned(name: str, values: Tensor, mask: Tensor) -> Tensor:
    """Return values of the tokens after the first [B, T - 1] as [B, T], 0 outside of responses."""
    if values.shape != mask[:, 1:].shape:
        raise DataError(
            f"{name} should return tensors of the shape {tuple(mask[:, 1:].shape)}, a number for each token that "
            f"it was given; it returned one of {tuple(values.shape)}"
        )
    return F.zero_masked(torch.nn.functional.pad(values, (1, 0)), mask)
