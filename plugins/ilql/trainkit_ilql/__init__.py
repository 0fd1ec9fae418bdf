"""ILQL: implicit language Q-learning, from samples with rewards, without sampling while training.

Snell et al. 2022 (the algorithm), Kostrikov et al. 2021 (implicit Q-learning), as trlX computes it (F-13).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from trainkit import AccelerateRLTrainer, MethodConfig, Row, SamplingConfig, TokenBatch, TRLConfig, register_trainer
from trainkit.errors import ConfigError
from trainkit.functional import masked_mean, place_scores, token_logprobs, zero_masked
from trainkit.metrics import Mean, Metrics, Std
from trainkit.models import Policy, ValueHead, in_chunks, load_heads, load_model, make_policy, state_width


class ILQLSampling(SamplingConfig):
    """How responses are sampled: as ever, and by value."""

    beta: float = Field(1.0, ge=0)
    """What a unit of advantage is worth in nats: tokens are drawn from π(a|s)·exp(β(Q(s, a) − V(s))). 0 is off."""


class ILQLConfig(MethodConfig):
    """The numbers of ILQL. Defaults are trlX's, but for the target network (Kostrikov et al. 2021) and the clamp."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 5e-5}, "train": {"total_steps": 1000}}
    sampling: ClassVar[type[SamplingConfig]] = ILQLSampling

    name: str = "ilql"
    """The registered name."""
    tau: float = Field(0.7, gt=0, lt=1)
    """The expectile of Q that V is fitted to: 0.5 is the mean over what the data do, 1 the best that they do."""
    gamma: float = Field(0.99, ge=0, le=1)
    """Discount per token."""
    cql_scale: float = Field(0.1, ge=0)
    """Weight of the conservative loss, which lowers Q of tokens that the data do not choose."""
    awac_scale: float = Field(1.0, ge=0)
    """Weight of the language model's own loss."""
    beta_awac: float = Field(0.0, ge=0)
    """How much the language model's loss is weighted by advantage; 0: not at all. Sampling has a β of its own."""
    awac_weight_max: float = Field(20.0, ge=1)
    """The most that a token can weigh in the language model's loss."""
    two_qs: bool = True
    """Learn two Q and trust the lower one."""
    alpha: float = Field(0.005, gt=0, le=1)
    """How far the target Q goes towards Q each time; 1 copies it."""
    steps_for_target_q_sync: int = Field(1, ge=1)
    """Steps between two moves of the target Q."""


@dataclass(frozen=True)
class ILQLBatch(TokenBatch):
    """Samples, and what was rewarded: [B, T] like ``sequences``, the reward of a sample on its last output token."""

    rewards: Tensor


# ------------------------------------------------------------------------------------------------- the mathematics


def next_values(values: Tensor, mask: Tensor) -> Tensor:
    """V(s') after each selected token: V of the state in which the row's next one is chosen; 0 after the last.

    [B, T], [B, T] -> [B, T]. What stands between two outputs of a dialogue is part of the step from one to the next.
    """
    chosen, rows = values[mask], mask.nonzero()[:, 0]
    follows = F.pad(rows[1:] == rows[:-1], (0, 1))
    return torch.zeros_like(values).masked_scatter(mask, zero_masked(chosen.roll(-1), follows))


def expectile_loss(error: Tensor, tau: float) -> Tensor:
    """|τ − 1(u < 0)|·u², least where the τ-expectile of u is 0. [*] -> [*]. Kostrikov et al. 2021, equation 4."""
    return torch.where(error < 0, (1 - tau) * error**2, tau * error**2)


def awac_weights(advantages: Tensor, *, beta: float, limit: float) -> Tensor:
    """min(exp(β·A), limit), also where exp would be infinite (S-43). [*] -> [*]. Nair et al. 2020, equation 13."""
    return (beta * advantages).clamp(max=math.log(limit)).exp()


def ilql_losses(
    qs: Sequence[Tensor],
    target_q: Tensor,
    values: Tensor,
    rewards: Tensor,
    mask: Tensor,
    *,
    tau: float,
    gamma: float,
) -> tuple[Tensor, Tensor]:
    """Σ_i (Q_i − (r + γ V(s')))², and the expectile loss of V to Q̂, per token. [B, T] each -> ([B, T], [B, T]).

    Gradients reach Q through the first and V through the second alone. Source: Snell et al. 2022, section 4.2.
    """
    goal = (zero_masked(rewards, mask) + gamma * next_values(values, mask)).detach()
    q_loss = torch.stack([(q - goal) ** 2 for q in qs]).sum(0)
    return q_loss, expectile_loss(target_q.detach() - values, tau)


# ------------------------------------------------------------------------------------------------------- the heads


class QHead(nn.Module):
    """Q(s, ·) from a hidden state: Linear(D, 2D), ReLU, Linear(2D, V), the shape that trlX uses; 0 at first.

    Computed in the type of its weights, also under autocast, and given in float32.
    """

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, 2 * width)
        self.out = nn.Linear(2 * width, vocabulary)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def features(self, states: Tensor) -> Tensor:
        """What the last layer reads. [N, D] -> [N, 2D]."""
        with torch.autocast(states.device.type, enabled=False):
            features: Tensor = self.hidden(states.to(self.hidden.weight.dtype)).relu()
            return features

    def forward(self, states: Tensor) -> Tensor:
        """Q of every token. [N, D] -> [N, V]."""
        return self._read(self.features(states))

    def _read(self, features: Tensor) -> Tensor:
        """Q of every token. [N, 2D] -> [N, V]."""
        with torch.autocast(features.device.type, enabled=False):
            q: Tensor = self.out(features)
            return q.float()

    def chosen(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Q of the chosen tokens, and log Σ exp Q − Q, which the conservative loss lowers. [N, D], [N] -> [N] ×2."""

        def read(features: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
            q = self._read(features)
            return q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), -token_logprobs(q, tokens)

        q, conservative = in_chunks(read, self.out.out_features, self.features(states), tokens)
        return q, conservative

    def chosen_alone(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Q of the chosen tokens, without that of others. [N, D], [N] -> [N]."""
        with torch.autocast(states.device.type, enabled=False):
            products: Tensor = torch.linalg.vecdot(self.features(states).float(), self.out.weight[tokens])
            return products + self.out.bias[tokens]


class ILQLHeads(nn.Module):
    """V, one or two Q, and their targets Q̂, which follow them: ``heads(states, tokens) -> {name: [N]}``.

    The targets are buffers: no gradient moves them, and checkpoints and exports hold them.
    """

    def __init__(self, width: int, vocabulary: int, two_qs: bool) -> None:
        super().__init__()
        self.v = ValueHead(width)
        self.q = nn.ModuleList(QHead(width, vocabulary) for _ in range(2 if two_qs else 1))
        self.target_q = _as_buffers(copy.deepcopy(self.q))

    def forward(self, states: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """V of the states [N, D]; Q, min Q̂ and the conservative loss (of all Q together) of the tokens [N]."""
        read = [q.chosen(states, tokens) for q in cast("list[QHead]", self.q)]
        with torch.no_grad():
            targets = [q.chosen_alone(states, tokens) for q in cast("list[QHead]", self.target_q)]
        return {
            **{f"q{index}": q for index, (q, _) in enumerate(read)},
            "values": self.v(states),
            "target_q": torch.stack(targets).amin(0),
            "cql": torch.stack([conservative for _, conservative in read]).sum(0),
        }

    @torch.no_grad()
    def advantages(self, states: Tensor) -> Tensor:
        """min Q̂(s, ·) − V(s) of every token. [N, D] -> [N, V]."""
        values: Tensor = self.v(states)
        return torch.stack([q(states) for q in self.target_q]).amin(0) - values.unsqueeze(-1)

    @torch.no_grad()
    def sync(self, alpha: float) -> None:
        """Q̂ ← α·Q + (1 − α)·Q̂."""
        for target, parameter in zip(self.target_q.buffers(), self.q.parameters(), strict=True):
            target.lerp_(parameter, alpha)


def _as_buffers(module: nn.ModuleList) -> nn.ModuleList:
    """The module with its parameters as buffers."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            delattr(part, name)
            part.register_buffer(name, parameter.detach())
    return module


# ----------------------------------------------------------------------------------------------------- the trainer


@register_trainer("ilql")
class ILQLTrainer(AccelerateRLTrainer[ILQLConfig]):
    """Q to r + γ V(s'), V to an expectile of Q̂, π to the data; sampling is steered by β(Q̂ − V)."""

    inputs: ClassVar[tuple[str, ...]] = ("samples", "rewards")

    @classmethod
    def tiny_arguments(cls) -> dict[str, Any]:
        """Targets that follow within a run of a few steps."""
        return {"config": {"method": {"alpha": 0.1}}}

    def get_arch(self, config: TRLConfig[ILQLConfig]) -> Policy:
        """The language model with ILQL's heads; trained at temperature 1 whatever the sampling's is."""
        model = load_model(config.model, self.live_model)
        width, vocabulary = state_width(model.config), model.config.get_text_config().vocab_size
        policy = make_policy(model, head=ILQLHeads(width, vocabulary, config.method.two_qs))
        if self.live_model is not None:
            return policy
        return load_heads(policy, config.model.model_path, config.model.kwargs)

    def add_samples(self, samples: Iterable[Any], rewards: Iterable[Any] | None = None) -> None:
        """Take samples and rewards, which are learnt with mean 0 and standard deviation 1 over all of them."""
        super().add_samples(samples, rewards)
        given = torch.tensor([row["reward"] for row in self._samples()], dtype=torch.float64)
        self.mean, self.std = float(given.mean()), float((given.var(correction=len(given) > 1) + 1e-8).sqrt())

    def _samples(self) -> Sequence[Row]:
        rows: Sequence[Row] | None = getattr(self.pipeline, "rows", None)
        if rows is None:
            raise ConfigError(
                "ILQL learns rewards relative to those of the whole dataset, and a stream has no whole; "
                "give list(samples)"
            )
        return rows

    def make_experience(
        self, rows: Sequence[Any], rewards: Iterable[float] | None = None, max_length: int | None = None
    ) -> ILQLBatch:
        """Samples as sequences, the normalised reward of each on its last output token.

        The loop gives its rows alone. Trainer in hand, one may give samples and rewards as `trainkit.train` takes
        them, as in trlX; `learn` then learns from these.

        Args:
            rows: the loop's rows, or samples.
            rewards: one per sample.
            max_length: the most tokens of a sample and of what is generated, below the limit that the trainer has.

        Raises:
            DataError: samples and rewards do not fit together, or one of them is none; names its index.
        """
        if max_length is not None:
            self.limit = max_length if self.limit is None else min(self.limit, max_length)
        if rewards is not None:
            self.add_samples(rows, rewards)
            rows = self._samples()
        sequences = self.encode_samples(list(rows))
        scores = torch.tensor([(row["reward"] - self.mean) / self.std for row in rows])
        return ILQLBatch(sequences, place_scores(scores.to(sequences.input_ids.device), sequences.response_mask))

    def loss(self, batch: ILQLBatch) -> tuple[Tensor, Metrics]:
        """L_Q + L_V + cql_scale·L_CQL + awac_scale·L_AWAC, each a mean over output tokens. -> []."""
        method, mask, policy = self.method, batch.sequences.response_mask, self.policy(batch.sequences)
        head = policy.head
        qs = [answer for name, answer in head.items() if name in ("q0", "q1")]
        q_loss, v_loss = ilql_losses(
            qs, head["target_q"], head["values"], batch.rewards, mask, tau=method.tau, gamma=method.gamma
        )
        advantages = (head["target_q"] - head["values"]).detach()
        weights = awac_weights(advantages, beta=method.beta_awac, limit=method.awac_weight_max)
        awac = -weights * policy.logprobs
        loss = masked_mean(q_loss, mask) + masked_mean(v_loss, mask)
        loss = loss + method.cql_scale * masked_mean(head["cql"], mask) + method.awac_scale * masked_mean(awac, mask)
        chosen_q = torch.stack(qs).mean(0)
        return loss, {
            "loss/q": Mean.of(q_loss, mask),
            "loss/v": Mean.of(v_loss, mask),
            "loss/cql": Mean.of(head["cql"], mask),
            "loss/awac": Mean.of(awac, mask),
            "values/mean": Mean.of(head["values"], mask),
            "values/std": Std.of(head["values"], mask),
            "qvalues/mean": Mean.of(chosen_q, mask),
            "qvalues/std": Std.of(chosen_q, mask),
            "awac/weight": Mean.of(weights, mask),
            "awac/clipfrac": Mean.of(method.beta_awac * advantages > math.log(method.awac_weight_max), mask),
        }

    def after_step(self) -> None:
        """The targets follow (S-14)."""
        if self.progress.step % self.method.steps_for_target_q_sync == 0:
            self.unwrapped.head.sync(self.method.alpha)

    def steer(self, logits: Tensor, states: Tensor, settings: SamplingConfig) -> Tensor:
        """log π(a|s) + β(Q̂(s, a) − V(s)), π at the sampling temperature, which β does not share (S-42). -> [b, V]."""
        beta = cast(ILQLSampling, settings).beta
        return logits if beta == 0 else logits + beta * self.unwrapped.head.advantages(states)

    @classmethod
    def tiny_contexts(cls) -> dict[str, dict[str, Any]]:
        """Weights are bounded where advantages weigh."""
        weighty = {"method.beta_awac": 100.0, "method.alpha": 1.0, "optimizer.lr": 0.03}
        return {"awac_weight_max": {**weighty, "method.awac_weight_max": 4.0}}
