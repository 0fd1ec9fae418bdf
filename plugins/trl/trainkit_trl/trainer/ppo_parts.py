"""The parts of a step of PPO as methods, for loops that call them one by one, and for subclasses to override.

`PPOTrainer.step` calls those that are overridden; otherwise trainkit's trainer computes a step.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trainkit import Sequences
from trainkit import functional as F
from trainkit.metrics import Mean, Std
from trainkit_trl.core import flatten_dict
from trainkit_trl.trainer.ppo_formulas import PENALTIES, after_others

if TYPE_CHECKING:
    from trainkit_trl.trainer.ppo_config import PPOConfig


class Parts:
    """Forward pass, rewards, advantages, loss and statistics of PPO."""

    if TYPE_CHECKING:
        config: PPOConfig
        model: Any
        trainer: Any

    def prepare_model_inputs(self, queries: list[Tensor], responses: list[Tensor]) -> dict[str, Tensor]:
        """Return queries and responses together as padded inputs of a model: ids and mask [B, T].

        An encoder-decoder gets ids and masks of the queries [B, P], and those of the responses after the token that its
        decoder starts with [B, R + 1].
        """
        if self.model.config.is_encoder_decoder:
            started = self._decoded(responses, None)
            device = started.input_ids.device
            asked = Sequences.from_lists([query.tolist() for query in queries], [[]] * len(queries)).to(device)
            return {
                "input_ids": asked.input_ids,
                "attention_mask": asked.attention_mask.long(),
                "decoder_input_ids": started.input_ids,
                "decoder_attention_mask": started.attention_mask.long(),
            }
        sequences = self._sequences(queries, responses, None)
        return {"input_ids": sequences.input_ids, "attention_mask": sequences.attention_mask.long()}

    def batched_forward_pass(
        self,
        model: Any,
        queries: list[Tensor],
        responses: list[Tensor],
        model_inputs: dict[str, Tensor],
        return_logits: bool = False,
        response_masks: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """Return what a model computes for each token that follows another, with dropout off.

        Args:
            model: the trained model, or another with a value head.
            queries: prompts.
            responses: responses.
            model_inputs: what `prepare_model_inputs` returned.
            return_logits: whether logits are returned.
            response_masks: which tokens of the responses count.

        Returns:
            Log-probabilities [B, T − 1], logits [B, T − 1, V] or None, values [B, T − 1], and a mask [B, T − 1], 1 for
            tokens that are trained on and 0 for others. T is the length of the decoder's input.
        """
        apart = model.config.is_encoder_decoder
        sequences = (
            self._decoded(responses, response_masks) if apart else self._sequences(queries, responses, response_masks)
        )
        model.eval()
        logprobs, logits, values = after_others(model, model_inputs, sequences.input_ids)
        return logprobs, logits if return_logits else None, values, sequences.response_mask[:, 1:].long()

    def compute_rewards(
        self, scores: Any, logprobs: Tensor, ref_logprobs: Tensor, masks: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rewards per token, their part without the scores, and the penalties; [B, T] each.

        ``kl_penalty="full"`` needs log-probabilities [B, T, V].

        Raises:
            ValueError: the number of scores is not that of the rows.
        """
        if len(scores) != len(masks):
            raise ValueError(f"there are {len(scores)} scores for {len(masks)} responses; give one for each")
        mask, scores = masks.bool(), torch.stack([torch.as_tensor(score).reshape(()) for score in scores])
        penalties = [self._kl_penalty(mine, theirs) for mine, theirs in zip(logprobs, ref_logprobs, strict=True)]
        kls = F.zero_masked(torch.stack(penalties), mask)
        without = -self.trainer.kl.coef * kls
        return without + F.place_scores(scores.to(without), mask), without, kls

    def _kl_penalty(self, logprob: Tensor, ref_logprob: Tensor) -> Tensor:
        """Return the penalty per token of a row [T], for ``kl_penalty="full"`` of log-probabilities [T, V]."""
        penalty = F.kl_exact if self.config.kl_penalty == "full" else PENALTIES[self.config.kl_penalty]
        return penalty(logprob, ref_logprob)

    def compute_advantages(self, values: Tensor, rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return masked values, whitened advantages and returns; [B, T] each."""
        mask = mask.bool()
        if self.config.whiten_rewards:
            rewards = F.whiten(rewards, mask, shift_mean=False)
        advantages, returns = F.gae(values, rewards, mask, gamma=self.config.gamma, lam=self.config.lam)
        return F.zero_masked(values, mask), F.whiten(advantages, mask).detach(), returns

    def loss(
        self,
        old_logprobs: Tensor,
        values: Tensor,
        logits: Tensor,
        vpreds: Tensor,
        logprobs: Tensor,
        mask: Tensor,
        advantages: Tensor,
        returns: Tensor,
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return the loss of the policy, that of the values times ``vf_coef``, and statistics. All but logits [B, T].

        A loss whose mean ratio exceeds ``ratio_threshold`` is 0, as in TRL, and a warning says so; `step` skips it.
        """
        mask, config = mask.bool(), self.config
        ratio = F.zero_masked(logprobs - old_logprobs, mask).exp()
        policy = F.clipped_surrogate(ratio, advantages, cliprange=config.cliprange)
        value = F.clipped_value_loss(vpreds, values, returns, cliprange=config.cliprange_value)
        policy_loss, value_loss = F.masked_mean(policy, mask), F.masked_mean(value, mask)
        mean_ratio = F.masked_mean(ratio, mask).item()
        if mean_ratio > config.ratio_threshold:
            warnings.warn(
                f"the mean ratio of a batch is {mean_ratio:.2f}, above ratio_threshold ({config.ratio_threshold:g}); "
                "its loss is 0",
                stacklevel=2,
            )
            policy_loss, value_loss = policy_loss * 0.0, value_loss * 0.0
        stats = {
            "loss": {
                "policy": policy_loss.detach(),
                "value": value_loss.detach(),
                "total": (policy_loss + config.vf_coef * value_loss).detach(),
            },
            "policy": {
                "entropy": F.masked_mean(F.entropy_from_logits(logits), mask).detach(),
                "approxkl": F.masked_mean(F.kl_k2(logprobs, old_logprobs), mask).detach(),
                "policykl": F.masked_mean(old_logprobs - logprobs, mask).detach(),
                "clipfrac": F.masked_mean((policy > -advantages * ratio).float(), mask).detach(),
                "advantages": advantages.detach(),
                "advantages_mean": F.masked_mean(advantages, mask).detach(),
                "ratio": ratio.detach(),
            },
            "returns": {"mean": F.masked_mean(returns, mask).detach(), "var": _variance(returns, mask)},
            "val": {
                "vpred": F.masked_mean(vpreds, mask).detach(),
                "error": F.masked_mean((vpreds - returns) ** 2, mask).detach(),
                "clipfrac": F.masked_mean((value > 0.5 * (vpreds - returns) ** 2).float(), mask).detach(),
                "mean": F.masked_mean(values, mask).detach(),
                "var": _variance(values, mask),
            },
        }
        return policy_loss, config.vf_coef * value_loss, flatten_dict(stats)

    def train_minibatch(
        self,
        old_logprobs: Tensor,
        values: Tensor,
        logprobs: Tensor,
        logits: Tensor,
        vpreds: Tensor,
        mask: Tensor,
        advantages: Tensor,
        returns: Tensor,
    ) -> dict[str, Any]:
        """Make an optimizer step with `loss`, and return its statistics.

        Under accelerate's ``accumulate``, the step is made when the last gradient is there.
        """
        self.model.train()
        policy, value, stats = self.loss(old_logprobs, values, logits, vpreds, logprobs, mask, advantages, returns)
        self.trainer.accelerator.backward(policy + value)
        if self.config.max_grad_norm is not None and self.trainer.accelerator.sync_gradients:
            self.trainer.accelerator.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        self.trainer.optimizer.step()
        self.trainer.optimizer.zero_grad()
        return stats

    def gather_stats(self, stats: dict[str, Any]) -> dict[str, Any]:
        """Return the means of tensors with one number over all processes; other entries unchanged.

        Others are of single responses and tokens, of which processes have different numbers.
        """
        reduced = {name: value for name, value in stats.items() if isinstance(value, Tensor) and value.numel() == 1}
        return {**stats, **{name: self.trainer.accelerator.reduce(value, "mean") for name, value in reduced.items()}}

    def record_step_stats(self, kl_coef: float, **data: Any) -> dict[str, Any]:
        """Return statistics of a step by TRL's names.

        Args:
            kl_coef: β.
            **data: ``masks``, ``logprobs``, ``ref_logprobs``, ``non_score_reward`` [B, T], ``scores`` [B];
                ``train_stats``, statistics of `train_minibatch` whose means are added under ``ppo/``; ``kls`` [B, T],
                the penalties; ``queries`` and ``responses``.

        Raises:
            ValueError: some of the first five are missing.
        """
        needed = ("masks", "logprobs", "ref_logprobs", "non_score_reward", "scores")
        if missing := [name for name in needed if name not in data]:
            raise ValueError(f"record_step_stats lacks {', '.join(missing)}; it takes {', '.join(needed)}")
        mask = data["masks"].bool()
        logprobs, scores = data["logprobs"], torch.as_tensor(data["scores"], dtype=torch.float32)
        kl = F.masked_sum(data["kls"] if "kls" in data else F.kl_k1(logprobs, data["ref_logprobs"]), mask, dim=1)
        stats = {
            "objective/kl": kl.mean(),
            "objective/kl_dist": kl,
            "objective/logprobs": logprobs,
            "objective/ref_logprobs": data["ref_logprobs"],
            "objective/kl_coef": kl_coef,
            "objective/entropy": F.masked_sum(-logprobs, mask, dim=1).mean(),
            "ppo/mean_non_score_reward": F.masked_mean(data["non_score_reward"], mask),
            "ppo/mean_scores": scores.mean(),
            "ppo/std_scores": scores.std() if len(scores) > 1 else torch.zeros(()),
        }
        for name, value in data.get("train_stats", {}).items():
            stats[f"ppo/{name}"] = value.float().mean(0) if value.dim() else value
        for name in ("queries", "responses"):
            stats |= {f"tokens/{name}_{key}": value for key, value in described(data.get(name, ())).items()}
        return stats

    def _decoded(self, responses: list[Tensor], masks: list[Tensor] | None) -> Sequences:
        """Return responses after the token that the decoder starts with, and what is trained on."""
        start = torch.tensor([self.model.config.decoder_start_token_id])
        return self._sequences([start] * len(responses), responses, masks)

    def _sequences(self, queries: list[Tensor], responses: list[Tensor], masks: list[Tensor] | None) -> Sequences:
        """Return queries and responses together, with the tokens that are trained on."""
        found = Sequences.from_lists([query.tolist() for query in queries], [each.tolist() for each in responses])
        if masks is None:
            return found.to(self.trainer.accelerator.device)
        counts = found.response_mask.clone()
        counts[found.response_mask] = torch.cat([mask.bool().cpu() for mask in masks])
        return replace(found, response_mask=counts).to(self.trainer.accelerator.device)


def _variance(values: Tensor, mask: Tensor) -> Tensor:
    return torch.tensor(Std.of(values, mask).compute() ** 2)


def described(rows: Sequence[Tensor]) -> dict[str, Any]:
    """Return mean, deviation and values of the lengths of rows."""
    found = torch.tensor([len(row) for row in rows], dtype=torch.float32)
    return {"len_mean": Mean.of(found).compute(), "len_std": Std.of(found).compute(), "dist": found.numpy()}
