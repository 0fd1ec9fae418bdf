"""Implicit Q-learning over tokens, with one Q and the expectile of its target (Kostrikov et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.func import functional_call

from trainkit import AccelerateRLTrainer, MethodConfig, Row, TokenBatch, TRLConfig, register_trainer
from trainkit.functional import masked_mean, place_scores, zero_masked
from trainkit.metrics import Mean, Metrics
from trainkit.models import Policy, ValueHead, load_heads, load_model, make_policy, state_width
from trainkit.testing import Declaration, Effect, Structure


class ExpectileConfig(MethodConfig):
    """Settings of implicit Q-learning."""

    section_defaults: ClassVar[dict[str, Any]] = {"train": {"total_steps": 1000}}
    name: str = "_sound_expectile"
    """The registered name."""
    tau: float = Field(0.8, gt=0, lt=1)
    """τ: the expectile."""
    gamma: float = Field(0.9, ge=0, le=1)
    """Discount per token."""
    beta: float = Field(3.0, ge=0)
    """Weights of the likelihood are exp(β (Q̂ − V)), at most 100."""
    polyak: float = Field(0.1, gt=0, le=1)
    """Share of Q in its target after a step."""


@dataclass(frozen=True)
class ExpectileBatch(TokenBatch):
    """Samples with rewards [B, T]: that of a sample is on its last token."""

    rewards: Tensor


class Heads(nn.Module):
    """V, Q, and the target Q̂, whose weights are buffers: ``heads(states, tokens) -> {name: [N]}``."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.v = ValueHead(width)
        self.q = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, vocabulary))
        for name, parameter in self.q.named_parameters():
            self.register_buffer(f"target_{name.replace('.', '_')}", parameter.detach().clone())

    @property
    def target(self) -> dict[str, Tensor]:
        """The weights of Q̂ by the names of those of Q."""
        return {name: getattr(self, f"target_{name.replace('.', '_')}") for name, _ in self.q.named_parameters()}

    def forward(self, states: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """Return V of the states [N, D], and Q and Q̂ of the tokens [N]."""
        with torch.autocast(states.device.type, enabled=False):
            wide = states.to(self.q[0].weight.dtype)
            answers = (self.q(wide), functional_call(self.q, self.target, (wide.detach(),)).detach())
            q, target = (each.gather(-1, tokens.unsqueeze(-1)).squeeze(-1).float() for each in answers)
        return {"values": self.v(states), "q": q, "target_q": target}

    @torch.no_grad()
    def follow(self, share: float) -> None:
        """Move the target towards Q."""
        for name, parameter in self.q.named_parameters():
            self.target[name].lerp_(parameter, share)


@register_trainer("_sound_expectile")
class ExpectileTrainer(AccelerateRLTrainer[ExpectileConfig]):
    """Trainer of implicit Q-learning: (Q − r − γV')² + |τ − 1(Q̂ < V)| (Q̂ − V)² − exp(β (Q̂ − V)) log π."""

    inputs: ClassVar[tuple[str, ...]] = ("samples", "rewards")

    def get_arch(self, config: TRLConfig[ExpectileConfig]) -> Policy:
        """Return the language model with the heads."""
        model = load_model(config.model, self.live_model)
        head = Heads(state_width(model.config), model.config.get_text_config().vocab_size)
        return load_heads(make_policy(model, head=head), config.model.model_path, config.model.kwargs)

    def make_experience(self, rows: list[Row]) -> ExpectileBatch:
        """Return the samples [B, T] with their rewards [B, T]."""
        sequences = self.encode_samples(rows)
        rewards = torch.tensor([float(row["reward"]) for row in rows], device=sequences.input_ids.device)
        return ExpectileBatch(sequences, place_scores(rewards, sequences.response_mask))

    def loss(self, batch: ExpectileBatch) -> tuple[Tensor, Metrics]:
        """Return the three losses, each a mean over output tokens. -> []."""
        method, mask, out = self.method, batch.sequences.response_mask, self.policy(batch.sequences)
        v, q, target = (out.head[name] for name in ("values", "q", "target_q"))
        u = target - v
        goal = zero_masked(batch.rewards, mask) + method.gamma * following(v, mask)
        weights = (method.beta * u.detach()).exp().clamp(max=100.0)
        losses = {
            "loss/q": (q - goal.detach()) ** 2,
            "loss/v": torch.where(u < 0, 1 - method.tau, method.tau) * u**2,
            "loss/policy": -weights * out.logprobs,
        }
        total = sum(losses.values(), torch.zeros_like(v))
        return masked_mean(total, mask), {name: Mean.of(x, mask) for name, x in losses.items()}

    def after_step(self) -> None:
        """Move the target towards Q."""
        self.unwrapped.head.follow(self.method.polyak)


def following(values: Tensor, mask: Tensor) -> Tensor:
    """Return V of the next selected token of the row, 0 after the last. [B, T] ×2 -> [B, T]."""
    found = torch.zeros_like(values)
    for row, keep in enumerate(mask):
        at = keep.nonzero()[:, 0]
        found[row, at[:-1]] = values[row, at[1:]]
    return found


KIT = Declaration(
    effects={"tau": Effect("slope of values", falls=(0.2, 0.5, 0.8))},
    structure=(Structure(scores="row", detached=("values",)),),
)
