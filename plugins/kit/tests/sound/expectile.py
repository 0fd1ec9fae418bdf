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
from trainkit.testing import Declaration, Effect, Structure, nudged


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


def pull_on_values(trainer: Any) -> float:
    """Return the derivative of the loss by V of all states, with V = 1 and Q̂ = 0: 2 (1 − τ)."""
    return slope_of_values(trainer, 1.0)


def pull_on_low_values(trainer: Any) -> float:
    """Return the derivative of the loss by V of all states, with V = −1 and Q̂ = 0: −2 τ."""
    return slope_of_values(trainer, -1.0)


def slope_of_values(trainer: Any, value: float) -> float:
    """Return the sum of the derivatives of the loss by V, with V = ``value`` and Q̂ = 0."""
    batch, kept = trainer.store.experience.to(trainer.accelerator.device), list[Tensor]()

    def replaced(_: Any, __: Any, outputs: Any) -> Any:
        kept.append(torch.full_like(outputs.head["values"], value).requires_grad_())
        target = torch.zeros_like(outputs.head["target_q"])
        return outputs._replace(head={**outputs.head, "values": kept[0], "target_q": target})

    handle = trainer.policy.register_forward_hook(replaced)
    loss = trainer.loss(batch)[0]
    handle.remove()
    return float(torch.autograd.grad(loss, kept[0])[0].sum())


def goal_of_the_first_token(trainer: Any) -> float:
    """Return the mean goal of tokens that are not the last, relative to V of the next state, with Q = 0: γ."""
    batch, kept = trainer.store.experience.to(trainer.accelerator.device), list[Tensor]()
    mask = batch.sequences.response_mask

    def replaced(_: Any, __: Any, outputs: Any) -> Any:
        kept.append(torch.zeros_like(outputs.head["q"]).requires_grad_())
        values = torch.arange(mask.size(1), device=mask.device).expand_as(mask) * torch.ones_like(outputs.head["q"])
        return outputs._replace(head={**outputs.head, "values": values, "q": kept[0]})

    handle = trainer.policy.register_forward_hook(replaced)
    loss = trainer.loss(batch)[0]
    handle.remove()
    slopes = -torch.autograd.grad(loss, kept[0])[0] * float(batch.weight) / 2
    inner = mask & (mask.flip(1).cumsum(1).flip(1) > 1)
    following = torch.arange(1, mask.size(1) + 1, device=mask.device).expand_as(mask)
    return float((slopes / following)[inner].mean())


def share_that_is_left(trainer: Any) -> float:
    """Return how far the target is from Q after `after_step`, relative to before."""
    head, distances = nudged(trainer).unwrapped.head, []
    for step in (lambda: None, trainer.after_step):
        step()
        pairs = [(target, dict(head.q.named_parameters())[name].detach()) for name, target in head.target.items()]
        distances.append(float(torch.cat([(one - other).flatten() for one, other in pairs]).norm()))
    return distances[1] / distances[0]


KIT = Declaration(
    effects={
        "tau": [Effect(pull_on_values, equals={0.8: 0.4}), Effect(pull_on_low_values, equals={0.8: -1.6})],
        "gamma": Effect(goal_of_the_first_token, equals={0.5: 0.5, 0.9: 0.9}),
        "polyak": Effect(share_that_is_left, equals={0.1: 0.9, 1.0: 0.0}),
    },
    structure=(Structure(scores="row", detached=("values",)),),
)
