"""The trainer of ILQL: experience and loss."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit import AccelerateRLTrainer, Row, SamplingConfig, TokenBatch, TRLConfig, register_trainer
from trainkit.errors import ConfigError
from trainkit.functional import masked_mean, place_scores, token_logprobs, zero_masked
from trainkit.metrics import Mean, Metrics, Std
from trainkit.models import Policy, TokenOutputs, ValueHead, in_chunks, load_heads, load_model, make_policy, state_width
from trainkit_ilql.config import ILQLConfig, ILQLSampling

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ILQLBatch(TokenBatch):
    """Samples with rewards [B, T] like ``sequences``; the reward of a sample is on its last output token."""

    rewards: Tensor


# ------------------------------------------------------------------------------------------------- the mathematics


def next_values(values: Tensor, mask: Tensor) -> Tensor:
    """Return V(s') after each selected token: V of the state of the row's next selected token; 0 after the last.

    [B, T], [B, T] -> [B, T]. The tokens between two outputs of a dialogue belong to the transition from one output to
    the next.
    """
    chosen, rows = values[mask], mask.nonzero()[:, 0]
    follows = F.pad(rows[1:] == rows[:-1], (0, 1))
    return torch.zeros_like(values).masked_scatter(mask, zero_masked(chosen.roll(-1), follows))


def expectile_loss(error: Tensor, tau: float) -> Tensor:
    """Return |τ − 1(u < 0)|·u², minimal where the τ-expectile of u is 0. [*] -> [*]. Kostrikov et al. 2021, eq. 4."""
    return torch.where(error < 0, (1 - tau) * error**2, tau * error**2)


def awac_weights(advantages: Tensor, *, beta: float, limit: float) -> Tensor:
    """Return min(exp(β·A), limit), also where exp would overflow. [*] -> [*]. Nair et al. 2020, equation 13."""
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
    """Return Σ_i (Q_i − (r + γ V(s')))² and the expectile loss of V to Q̂, per token. [B, T] each -> ([B, T], [B, T]).

    The first loss has a gradient for Q only, the second for V only. Source: Snell et al. 2022, section 4.2.
    """
    goal = (zero_masked(rewards, mask) + gamma * next_values(values, mask)).detach()
    q_loss = torch.stack([(q - goal) ** 2 for q in qs]).sum(0)
    return q_loss, expectile_loss(target_q.detach() - values, tau)


# ------------------------------------------------------------------------------------------------------- the heads


class QHead(nn.Module):
    """Q(s, ·) from a hidden state: Linear(D, 2D), ReLU, Linear(2D, V), as in trlX; the output is 0 at initialisation.

    It is computed in the dtype of its weights, also under autocast, and returned in float32.
    """

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, 2 * width)
        self.out = nn.Linear(2 * width, vocabulary)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def features(self, states: Tensor) -> Tensor:
        """Return the input of the last layer. [N, D] -> [N, 2D]."""
        with torch.autocast(states.device.type, enabled=False):
            features: Tensor = self.hidden(states.to(self.hidden.weight.dtype)).relu()
            return features

    def forward(self, states: Tensor) -> Tensor:
        """Return Q of every token. [N, D] -> [N, V]."""
        return self._read(self.features(states))

    def _read(self, features: Tensor) -> Tensor:
        """Return Q of every token from the features. [N, 2D] -> [N, V]."""
        with torch.autocast(features.device.type, enabled=False):
            q: Tensor = self.out(features)
            return q.float()

    def chosen(self, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return Q of the chosen tokens, and log Σ exp Q − Q for the conservative loss. [N, D], [N] -> [N] ×2."""

        def read(features: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
            q = self._read(features)
            return q.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), -token_logprobs(q, tokens)

        q, conservative = in_chunks(read, self.out.out_features, self.features(states), tokens)
        return q, conservative

    def chosen_alone(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Return Q of the chosen tokens, without computing Q of other tokens. [N, D], [N] -> [N]."""
        with torch.autocast(states.device.type, enabled=False):
            products: Tensor = torch.linalg.vecdot(self.features(states).float(), self.out.weight[tokens])
            return products + self.out.bias[tokens]


class ILQLHeads(nn.Module):
    """V, one or two Q, and the targets Q̂: ``heads(states, tokens) -> {name: [N]}``.

    The targets are buffers: they have no gradient, and are saved in checkpoints and exports.
    """

    def __init__(self, width: int, vocabulary: int, two_qs: bool) -> None:
        super().__init__()
        self.v = ValueHead(width)
        self.q = nn.ModuleList(QHead(width, vocabulary) for _ in range(2 if two_qs else 1))
        self.target_q = _as_buffers(copy.deepcopy(self.q))

    def forward(self, states: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """Return V of the states [N, D]; and Q, min Q̂ and the conservative loss (summed over Q) of the tokens [N]."""
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
        """Return min Q̂(s, ·) − V(s) of every token. [N, D] -> [N, V]."""
        values: Tensor = self.v(states)
        return torch.stack([q(states) for q in self.target_q]).amin(0) - values.unsqueeze(-1)

    @torch.no_grad()
    def sync(self, alpha: float) -> None:
        """Update the targets: Q̂ ← α·Q + (1 − α)·Q̂."""
        for target, parameter in zip(self.target_q.buffers(), self.q.parameters(), strict=True):
            target.lerp_(parameter, alpha)


def _as_buffers(module: nn.ModuleList) -> nn.ModuleList:
    """Convert the parameters of the module to buffers, and return the module."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            delattr(part, name)
            part.register_buffer(name, parameter.detach())
    return module


# ----------------------------------------------------------------------------------------------------- the trainer


@register_trainer("ilql")
class ILQLTrainer(AccelerateRLTrainer[ILQLConfig]):
    """Trainer of ILQL: fits Q to r + γ V(s'), V to an expectile of Q̂ and π to the data; samples with β(Q̂ − V)."""

    inputs: ClassVar[tuple[str, ...]] = ("samples", "rewards")

    def get_arch(self, config: TRLConfig[ILQLConfig]) -> Policy:
        """Return the language model with ILQL's heads, at temperature 1, whatever the sampling temperature is."""
        model = load_model(config.model, self.live_model)
        width, vocabulary = state_width(model.config), model.config.get_text_config().vocab_size
        policy = make_policy(model, head=ILQLHeads(width, vocabulary, config.method.two_qs))
        if self.live_model is not None:
            return policy
        return load_heads(policy, config.model.model_path, config.model.kwargs)

    def add_samples(self, samples: Iterable[Any], rewards: Iterable[Any] | None = None) -> None:
        """Add samples and rewards, and compute the mean and standard deviation that normalise the rewards."""
        super().add_samples(samples, rewards)
        given = torch.tensor([row["reward"] for row in self._samples()], dtype=torch.float64)
        self.mean, self.std = float(given.mean()), float((given.var(correction=len(given) > 1) + 1e-8).sqrt())
        if len(given) > 1 and bool((given == given[0]).all()) and self.accelerator.is_main_process:
            log.warning(
                "all %d samples have the reward %g, so the rewards say nothing about which is better",
                len(given),
                float(given[0]),
            )

    def _samples(self) -> Sequence[Row]:
        rows: Sequence[Row] | None = getattr(self.pipeline, "rows", None)
        if rows is None:
            raise ConfigError(
                "ILQL normalises rewards over the whole dataset, which a stream does not provide; give list(samples)"
            )
        return rows

    def make_experience(
        self, rows: Sequence[Any], rewards: Iterable[float] | None = None, max_length: int | None = None
    ) -> ILQLBatch:
        """Return samples as sequences [B, T], with the normalised reward of each on its last output token.

        The training loop passes only ``rows``. As in trlX, a user may also pass samples and rewards, in the forms that
        `trainkit.train` accepts; `learn` then trains on them.

        Args:
            rows: rows from the training loop, or samples.
            rewards: one number per sample.
            max_length: maximum number of tokens of a sample and of generated text; it can only lower the trainer's
                limit.

        Raises:
            DataError: the numbers of samples and rewards differ, or a sample or reward is not valid; names its index.
        """
        if max_length is not None:
            self.text.limit = max_length if self.text.limit is None else min(self.text.limit, max_length)
        if rewards is not None:
            self.add_samples(rows, rewards)
            rows = self._samples()
        sequences = self.encode_samples(list(rows))
        scores = torch.tensor([(row["reward"] - self.mean) / self.std for row in rows])
        return ILQLBatch(sequences, place_scores(scores.to(sequences.input_ids.device), sequences.response_mask))

    def loss(self, batch: ILQLBatch) -> tuple[Tensor, Metrics]:
        """Return L_Q + L_V + cql_scale·L_CQL + awac_scale·L_AWAC, each a mean over output tokens. -> []."""
        method, mask, policy = self.method, batch.sequences.response_mask, self.policy(batch.sequences)
        head = policy.head
        qs = [answer for name, answer in head.items() if name in ("q0", "q1")]
        q_loss, v_loss = ilql_losses(
            qs, head["target_q"], head["values"], batch.rewards, mask, tau=method.tau, gamma=method.gamma
        )
        awac = -self.weights(policy) * policy.logprobs
        loss = masked_mean(q_loss, mask) + masked_mean(v_loss, mask)
        loss = loss + method.cql_scale * masked_mean(head["cql"], mask) + method.awac_scale * masked_mean(awac, mask)
        return loss, {
            "loss/q": Mean.of(q_loss, mask),
            "loss/v": Mean.of(v_loss, mask),
            "loss/cql": Mean.of(head["cql"], mask),
            "loss/awac": Mean.of(awac, mask),
            **self.statistics(batch, policy),
        }

    def weights(self, outputs: TokenOutputs) -> Tensor:
        """Return the weights of the language-model loss, without gradient. -> [B, T]."""
        return awac_weights(self._advantages(outputs), beta=self.method.beta_awac, limit=self.method.awac_weight_max)

    def statistics(self, batch: ILQLBatch, outputs: TokenOutputs) -> Metrics:
        """Return metrics of what the policy computed for a micro-batch; override it to add others."""
        method, mask, head = self.method, batch.sequences.response_mask, outputs.head
        chosen_q = torch.stack([answer for name, answer in head.items() if name in ("q0", "q1")]).mean(0)
        return {
            "values/mean": Mean.of(head["values"], mask),
            "values/std": Std.of(head["values"], mask),
            "qvalues/mean": Mean.of(chosen_q, mask),
            "qvalues/std": Std.of(chosen_q, mask),
            "awac/weight": Mean.of(self.weights(outputs), mask),
            "awac/clipfrac": Mean.of(
                method.beta_awac * self._advantages(outputs) > math.log(method.awac_weight_max), mask
            ),
        }

    def _advantages(self, outputs: TokenOutputs) -> Tensor:
        return (outputs.head["target_q"] - outputs.head["values"]).detach()

    def after_step(self) -> None:
        """Update the targets after every `steps_for_target_q_sync`-th step."""
        if self.progress.step % self.method.steps_for_target_q_sync == 0:
            self.unwrapped.head.sync(self.method.alpha)

    def steer(self, logits: Tensor, states: Tensor, settings: SamplingConfig) -> Tensor:
        """Return log π(a|s) + β(Q̂(s, a) − V(s)), where the temperature applies to π only. -> [b, V]."""
        beta = cast(ILQLSampling, settings).beta
        return logits if beta == 0 else logits + beta * self.unwrapped.head.advantages(states)
