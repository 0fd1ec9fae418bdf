"""The settings and the loss of ILQL, its heads, and its sampling."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainkit import functional as F
from trainkit_trlx.data.method_configs import MethodConfig, register_method
from trainkit_trlx.utils.modeling import flatten_dict, get_tensor_stats

if TYPE_CHECKING:
    from torch import Tensor


def topk_mask(xs: Tensor, k: int) -> Tensor:
    """Return ``xs`` with -inf in place of all but the k largest of the last dimension; ties are kept. [*, V]."""
    if k <= 0 or k > xs.shape[-1]:
        return xs
    least = torch.topk(xs, k, dim=-1).values[..., -1:]
    return torch.where(xs < least, torch.full_like(xs, -torch.inf), xs)


def batched_index_select(x: Tensor, idxs: Tensor, dim: int) -> Tensor:
    """Return the elements of each row at its indices. [B, T, D], [B, N] -> [B, N, D] with ``dim`` 1."""
    shape = list(x.shape)
    shape[dim] = idxs.shape[1]
    view = [1] * x.dim()
    view[0], view[dim] = idxs.shape[0], idxs.shape[1]
    return x.gather(dim, idxs.view(view).expand(shape))


def make_head(n_embd: int, out: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return Linear(n, 2n), ReLU, Linear(2n, out)."""
    return nn.Sequential(nn.Linear(n_embd, n_embd * 2, dtype=dtype), nn.ReLU(), nn.Linear(n_embd * 2, out, dtype=dtype))


class ILQLHeads(nn.Module):
    """V, one or two Q, and their targets, with the names of trlX.

    Args:
        hidden_size: D.
        vocab_size: V.
        two_qs: whether there are two Q.
        alpha: the share of Q in an update of its target.
        dtype: the type of the weights.
    """

    def __init__(
        self, hidden_size: int, vocab_size: int, two_qs: bool, alpha: float, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.two_qs, self.alpha = two_qs, alpha
        self.v_head = make_head(hidden_size, 1, dtype)
        self.q_heads = nn.ModuleList(make_head(hidden_size, vocab_size, dtype) for _ in range(2 if two_qs else 1))
        self.target_q_heads = copy.deepcopy(self.q_heads).requires_grad_(False)

    def forward(
        self, hs: Tensor, states_ixs: Tensor | None = None, actions_ixs: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
        """Return Q and target Q of the actions [B, A, V], and V of the states [B, A + 1, 1].

        Args:
            hs: hidden states [B, T, D].
            states_ixs: [B, A + 1]; all positions if they are not given.
            actions_ixs: [B, A].
        """
        states = hs if states_ixs is None else batched_index_select(hs, states_ixs, 1)
        actions = hs if actions_ixs is None else batched_index_select(hs, actions_ixs, 1)
        qs, targets = (tuple(head(actions) for head in heads) for heads in (self.q_heads, self.target_q_heads))
        return qs, targets, self.v_head(states)

    @torch.no_grad()
    def sync_target_q_heads(self) -> None:
        """Move the targets towards Q: alpha · Q + (1 − alpha) · target."""
        for target, q in zip(self.target_q_heads.parameters(), self.q_heads.parameters(), strict=True):
            target.lerp_(q, self.alpha)


@dataclass
@register_method
class ILQLConfig(MethodConfig):
    """Settings of ILQL."""

    tau: float
    gamma: float
    cql_scale: float
    awac_scale: float
    alpha: float
    beta: float
    steps_for_target_q_sync: int
    two_qs: bool
    gen_kwargs: dict[str, Any]

    def loss(self, outputs: Any, labels: Any) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss, Q + V + cql_scale · CQL + awac_scale · AWAC, and its statistics. Snell et al. 2022.

        Args:
            outputs: ``(logits, (qs, target_qs, vs))``: [B, T, V] or [B, A, V], the Q of actions [B, A, V], the V of
                states [B, A + 1, 1].
            labels: a batch with ``input_ids``, ``actions_ixs``, ``dones`` and ``rewards``.
        """
        logits, (qs, target_qs, vs) = outputs
        tokens = getattr(labels, "decoder_input_ids", labels.input_ids)[:, 1:]
        actions = tokens.gather(1, labels.actions_ixs)
        if logits.shape[1] != actions.shape[1]:
            logits = batched_index_select(logits, labels.actions_ixs, 1)
        dones, vs = labels.dones.to(vs.dtype), vs.squeeze(-1)
        mask = dones[:, :-1]
        count = mask.sum().clamp(min=1)

        def chosen(q: Tensor) -> Tensor:
            return q.gather(-1, actions.unsqueeze(-1)).squeeze(-1)

        def mean(x: Tensor) -> Tensor:
            return (x * mask).sum() / count

        target = torch.stack([chosen(q) for q in target_qs]).amin(0).detach()
        goal = (labels.rewards + self.gamma * vs[:, 1:] * dones[:, 1:]).detach()
        v = vs[:, :-1]
        loss_q = mean(torch.stack([(chosen(q) - goal) ** 2 for q in qs]).sum(0))
        weight = torch.where(target >= v, self.tau, 1 - self.tau)
        loss_v = mean(weight * (target - v) ** 2)
        loss_cql = mean(torch.stack([-_logprobs(q, actions) for q in qs]).sum(0))
        awac_weight = (self.beta * (target - v)).exp().detach()
        loss_awac = mean(-_logprobs(logits, actions) * awac_weight)
        loss = loss_q + loss_v + self.cql_scale * loss_cql + self.awac_scale * loss_awac
        losses = {"loss": loss, "loss_q": loss_q, "loss_v": loss_v, "loss_cql": loss_cql, "loss_awac": loss_awac}
        stats = {
            "losses": {name: value.item() for name, value in losses.items()},
            "values": get_tensor_stats(v, mask, count),
            "qvalues": {str(i): get_tensor_stats(chosen(q), mask, count) for i, q in enumerate(qs)},
            "awac_weight": get_tensor_stats(awac_weight, mask, count),
        }
        return loss, {name: float(value) for name, value in flatten_dict(stats).items()}


def _logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.token_logprobs(logits.flatten(0, 1), tokens.flatten()).view_as(tokens)
