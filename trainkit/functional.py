"""Pure functions of reinforcement learning on token sequences: statistics, log-probabilities, returns, surrogates.

Shapes: B rows, T tokens, N selected tokens, V vocabulary. Every mask is boolean, ``True`` = counts, and every
function ignores masked positions, whatever values they hold. Per-token tensors are token-aligned: position ``t``
belongs to token ``t``. Nothing here depends on configs, models or devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over all processes; the identity on one process."""


def _identity(x: Tensor) -> Tensor:
    return x


# --------------------------------------------------------------------------------------------- masked statistics


def to_float64(x: Tensor) -> Tensor:
    """Return ``x`` in float64, so that sums over many tokens stay accurate; in float32 on MPS, without float64. [*]."""
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


def zero_masked(x: Tensor, mask: Tensor) -> Tensor:
    """Return ``x`` where ``mask`` is True and exactly 0 elsewhere, even where ``x`` is NaN or infinite. [*] -> [*]."""
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return Σ x over ``mask``. [*] -> []; with ``dim``, the sum over that dimension only."""
    kept = zero_masked(x, mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return Σ x over ``mask`` / Σ mask. [*] -> []; 0 where nothing is selected."""
    return masked_sum(x, mask) / mask.sum().clamp(min=1)


def whiten(x: Tensor, mask: Tensor, *, shift_mean: bool = True, reduce: Reduce = _identity) -> Tensor:
    """Return (x − μ) / √(σ² + 1e-8) over the selected entries of all processes, 0 elsewhere. [*] -> [*].

    The variance is unbiased and computed in two passes. With fewer than two selected entries they are returned
    unchanged. ``shift_mean=False`` adds μ back, so the mean stays the same.
    """
    x = x if x.is_floating_point() else x.float()  # whitened integers are not integers
    count = reduce(to_float64(mask.sum()))
    if count < 2:
        return zero_masked(x, mask)
    wide = to_float64(x)
    mean = reduce(masked_sum(wide, mask)) / count
    var = reduce(masked_sum((wide - mean) ** 2, mask)) / (count - 1)
    white = (wide - mean) * torch.rsqrt(var + 1e-8) + (0.0 if shift_mean else mean)
    return zero_masked(white.to(x.dtype), mask)


# -------------------------------------------------------------------------------------- log-probabilities and KL


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return log softmax(logits)[token]. [N, V], [N] -> [N]."""
    return logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Return the entropy, H = log Σ exp(z) − Σ softmax(z)·z; forbidden tokens (−inf) contribute 0. [N, V] -> [N]."""
    probs = logits.softmax(-1)
    finite = logits.masked_fill(probs == 0, 0.0)  # before the product: 0 * -inf is NaN, in the gradient too
    return logits.logsumexp(-1) - (probs * finite).sum(-1)


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return k1 = log π − log π_ref of the sampled token: unbiased for KL(π‖π_ref) when sampling from π. [*] -> [*]."""
    return logprobs - ref_logprobs


def kl_k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return k2 = (log π − log π_ref)² / 2: biased, never negative (Schulman 2020). [*] -> [*]."""
    return 0.5 * (logprobs - ref_logprobs) ** 2


def kl_abs(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return |log π − log π_ref| of the sampled token: no estimate of a KL; the penalty ``abs`` of TRL. [*] -> [*]."""
    return (logprobs - ref_logprobs).abs()


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return k3 = exp(−k1) − 1 + k1: unbiased and never negative when sampling from π (Schulman 2020). [*] -> [*]."""
    k1 = logprobs - ref_logprobs
    return torch.expm1(-k1) + k1


def kl_exact(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Return KL(π‖π_ref) = Σ_v p_v (log p_v − log q_v), 0 where p_v = 0: the reverse KL. [N, V], [N, V] -> [N]."""
    return _kl(logits.log_softmax(-1), ref_logits.log_softmax(-1))


def kl_forward(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """Return KL(π_ref‖π) = Σ_v q_v (log q_v − log p_v), 0 where q_v = 0. [N, V], [N, V] -> [N]."""
    return _kl(ref_logits.log_softmax(-1), logits.log_softmax(-1))


def jensen_shannon(logits: Tensor, ref_logits: Tensor, *, beta: float = 0.5) -> Tensor:
    """Return β KL(π_ref‖m) + (1−β) KL(π‖m), with the mixture m = β π_ref + (1−β) π. [N, V], [N, V] -> [N].

    β is in (0, 1); ½ gives the Jensen-Shannon divergence, which is at most log 2. Divided by β, the result approaches
    the forward KL as β → 0; divided by 1 − β, it approaches the reverse KL as β → 1. A token that neither
    distribution allows (−inf) contributes 0. Source: the generalised Jensen-Shannon divergence of Agarwal et al. 2023
    (*GKD*), D_JSD(β)(π_ref‖π).

    Raises:
        ValueError: ``beta`` is not in (0, 1).
    """
    if not 0 < beta < 1:
        raise ValueError(f"beta is {beta}; give a weight between 0 and 1, or use kl_forward or kl_exact")
    p, q = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    allowed = (p > -torch.inf) | (q > -torch.inf)  # elsewhere, the gradient of logaddexp would be NaN
    mixture = torch.logaddexp(
        torch.where(allowed, q, 0.0) + math.log(beta), torch.where(allowed, p, 0.0) + math.log1p(-beta)
    )
    return beta * _kl(q, mixture) + (1 - beta) * _kl(p, mixture)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return Σ_v exp(p_v) (p_v − q_v) of log-probabilities, 0 where p_v = −inf. [N, V], [N, V] -> [N]."""
    return (p.exp() * torch.where(p > -torch.inf, p - q, 0.0)).sum(-1)


# ------------------------------------------------------------------------------------------- rewards and returns


def last_token(mask: Tensor) -> Tensor:
    """Return a mask of the last selected position of each row. [B, T] -> [B, T]; all False in rows with none."""
    after = mask.flip(-1).cumsum(-1).flip(-1)
    return mask & (after == 1)


def at_last(numbers: Tensor, mask: Tensor) -> Tensor:
    """Return the value at the last selected position of each row, 0 in rows with none: a response's reward.

    [B, T, *], [B, T] -> [B, *].
    """
    last = last_token(mask.bool())
    return zero_masked(numbers, last.reshape(*last.shape, *[1] * (numbers.dim() - 2))).sum(1)


def per_response(scores: Tensor) -> Tensor:
    """Return scores per response: Σ_t of rewards per token, or the scores unchanged. [B, T] or [B] -> [B]."""
    return scores if scores.dim() == 1 else scores.sum(1)


def place_scores(scores: Tensor, mask: Tensor) -> Tensor:
    """Return scores as rewards per token [B, T]: scores [B] at the last response token, or [B, T] unchanged."""
    if scores.dim() == 1:
        return zero_masked(scores.unsqueeze(-1).expand(mask.shape), last_token(mask))
    return zero_masked(scores, mask)


def penalise_truncated(rewards: Tensor, terminated: Tensor, mask: Tensor, penalty: float) -> Tensor:
    """Return the rewards, less ``penalty`` at the last response token of responses that did not terminate.

    [B, T], [B], [B, T] -> [B, T].
    """
    return rewards - penalty * (last_token(mask) & ~terminated.unsqueeze(-1))


def normalise_scores(scores: Tensor, mask: Tensor, *, mean: Tensor | float, std: Tensor | float) -> Tensor:
    """Return (score − mean) / std per response, the mean subtracted at its last token. [B] or [B, T] -> [B, T].

    The normalisation of TRL's ``use_score_norm``. Rewards per token keep their places.
    """
    placed = place_scores(scores, mask)
    return (placed - zero_masked(torch.as_tensor(mean).to(placed).expand_as(placed), last_token(mask))) / std


def kl_shaped_rewards(
    scores: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
    kl_coef: float,
    *,
    penalty: Tensor | None = None,
) -> Tensor:
    """Return r_t = score_t − β·(log π − log π_ref)_t, with a terminal score at the last response token.

    Scores are [B] (terminal) or [B, T] (dense, token-aligned), the others [B, T] -> [B, T], 0 outside the mask.
    ``penalty`` [B, T] takes the place of log π − log π_ref. Source: Ziegler et al. 2019, equation 2.
    """
    penalty = kl_k1(logprobs, ref_logprobs) if penalty is None else penalty
    return place_scores(scores, mask) - kl_coef * zero_masked(penalty, mask)


def gae(
    values: Tensor, rewards: Tensor, mask: Tensor, *, gamma: float, lam: float | Tensor, bootstrap: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return GAE advantages A and returns A + V. [B, T] ×3 -> ([B, T], [B, T]).

    A_t = δ_t + γλ A_{t+1} with δ_t = r_t + γ V_{t+1} − V_t. Position t + 1 is the *next selected* token of the row;
    after the last one A is 0 and V is ``bootstrap`` [B], or 0. Both results are 0 outside the mask. λ is one number, or
    one for each row [B].
    Source: Schulman et al. 2015b, equations 11, 12 and 16.
    """
    values, rewards = zero_masked(values, mask), zero_masked(rewards, mask)
    next_value = torch.zeros_like(values[:, 0]) if bootstrap is None else bootstrap.to(values.dtype)
    next_advantage = torch.zeros_like(next_value)
    columns = []
    for t in range(values.size(1) - 1, -1, -1):  # over columns, all rows at once: the recursion is sequential in t
        here = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(here, delta + gamma * lam * next_advantage, next_advantage)
        next_value = torch.where(here, values[:, t], next_value)
        columns.append(next_advantage)
    advantages = zero_masked(torch.stack(columns[::-1], dim=1), mask)
    return advantages, advantages + values


def leave_one_out(rewards: Tensor, k: int) -> Tensor:
    """Return A_i = R_i − mean of the other k − 1 rewards of its group; a group is k adjacent rewards. [B] -> [B].

    Exactly 0 where all rewards of a group are equal: a rounding error there would be magnified by Adam.
    Source: Kool et al. 2019, equation 8.
    """
    if k < 2:
        raise ValueError(f"a group of {k} has no other rewards to compare with; give k of 2 or more")
    groups = to_float64(rewards).view(-1, k)
    return ((groups - groups.mean(1, keepdim=True)) * (k / (k - 1))).flatten().to(rewards.dtype)


# ------------------------------------------------------------------------------------------------------- losses


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, *, cliprange: float, cliprange_high: float | None = None
) -> Tensor:
    """Return the negated PPO objective per element, max(−A·ρ, −A·clip(ρ, 1−ε, 1+ε_high)). [*], [*] -> [*].

    ``cliprange_high`` is ε_high; None: ε. Source: Schulman et al. 2017, equation 7; Yu et al. 2025 for ε_high.
    """
    high = cliprange if cliprange_high is None else cliprange_high
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + high))


def importance_ratios(logprobs: Tensor, behaviour_logprobs: Tensor, mask: Tensor, *, level: str = "token") -> Tensor:
    """Return ρ = π/μ of each selected token, or of the whole response for all of its tokens; 1 elsewhere. -> [B, T].

    Args:
        logprobs: log π [B, T], of the weights that are trained.
        behaviour_logprobs: log μ [B, T], of the weights and the engine that sampled.
        mask: bool [B, T], the response tokens.
        level: ``"token"``, or ``"sequence"`` for the product of the ratios of a response.

    Source: Precup, Sutton, Singh 2000, per decision and per episode.
    """
    log_ratios = zero_masked(logprobs - behaviour_logprobs, mask)
    if level == "sequence":
        log_ratios = zero_masked(log_ratios.sum(1, keepdim=True).expand_as(mask), mask)
    return log_ratios.exp()


def truncated_ratios(ratios: Tensor, cap: float) -> Tensor:
    """Return min(ρ, cap), the weights of truncated importance sampling. [*] -> [*].

    Multiplied with advantages under a ratio to the newest weights before the collection (the proximal policy) they give
    decoupled PPO. Sources: Ionides 2008; Espeholt et al. 2018, section 4.1, for ρ̄; Hilton et al. 2021, section 3, for
    the decoupled objective; Fu et al. 2025 (AReaL) for language models.
    """
    return ratios.clamp(max=cap)


def masked_ratios(ratios: Tensor, cap: float) -> Tensor:
    """Return ρ where 1/cap ≤ ρ ≤ cap, and 0 elsewhere. [*] -> [*].

    Source: Ling team 2025, *Every step evolves* (IcePop), with bounds that are reciprocal.
    """
    return ratios * ((ratios >= 1 / cap) & (ratios <= cap))


def effective_sample_size(weights: Tensor, mask: Tensor) -> Tensor:
    """Return (Σw)² / Σw² over the selected elements; as many as there are if all weights are equal. [*] -> [].

    Source: Kong 1992.
    """
    total, squares = masked_sum(weights, mask), masked_sum(weights**2, mask)
    return total**2 / squares.clamp(min=torch.finfo(weights.dtype).tiny)


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, cliprange: float) -> Tensor:
    """Return ½ max((V − R)², (clip(V, V_old ± ε) − R)²) per element. [*] ×3 -> [*].

    Source: Schulman's PPO code.
    """
    clipped = torch.maximum(torch.minimum(values, old_values + cliprange), old_values - cliprange)
    return 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return how much of the variance of ``returns`` the ``values`` explain, and that variance, as sums. [*] -> [], [].

    The first divided by the second is 1 − Var(returns − values) / Var(returns): 1 for perfect values, 0 for a constant,
    less for values that are worse than one.
    """

    def squares(x: Tensor) -> Tensor:
        wide = to_float64(x)
        return masked_sum((wide - masked_mean(wide, mask)) ** 2, mask)

    total = squares(returns)
    return total - squares(returns - values), total


def repetition(tokens: Tensor, mask: Tensor, *, periods: int = 8) -> Tensor:
    """Return to what extent each row repeats itself: the largest share of tokens that equal the one p before. -> [B].

    It is 1 for a row that repeats a part of up to ``periods`` tokens over and over.

    Args:
        tokens: token ids [B, T].
        mask: which tokens count [B, T].
        periods: the largest p.
    """
    shares = []
    for period in range(1, min(periods, tokens.shape[1] - 1) + 1):
        both = mask[:, period:] & mask[:, :-period]
        equal = both & (tokens[:, period:] == tokens[:, :-period])
        shares.append(equal.sum(1) / both.sum(1).clamp(min=1))
    return torch.stack(shares).amax(0) if shares else torch.zeros(len(tokens), device=tokens.device)


def preference_accuracy(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return 1 where chosen > rejected, 0 where chosen < rejected, ½ for a tie. [B], [B] -> [B]."""
    return (chosen > rejected).float() + 0.5 * (chosen == rejected)


def sigmoid_loss(margins: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Return −(1 − ε) log σ(βx) − ε log σ(−βx), the loss of a pair in DPO, for x its margin. [*] -> [*].

    Source: Rafailov et al. 2023, equation 7; with ε Mitchell 2023, *A note on DPO with noisy preferences*.
    """
    x = beta * margins
    return -(1 - label_smoothing) * F.logsigmoid(x) - label_smoothing * F.logsigmoid(-x)


def hinge_loss(margins: Tensor, *, beta: float) -> Tensor:
    """Return max(0, 1 − βx), the hinge loss of a pair. [*] -> [*]. Source: Liu et al. 2023 (RSO), hinge-norm."""
    return F.relu(1 - beta * margins)


def ipo_loss(margins: Tensor, *, beta: float) -> Tensor:
    """Return (x − 1/2β)², the loss of a pair in IPO, with their τ as β. [*] -> [*]. Azar et al. 2023, equation 17."""
    return (margins - 1 / (2 * beta)) ** 2


def nll(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return −mean log π over the selected tokens. [B, T] ×2 -> []."""
    return -masked_mean(logprobs, mask)


# ------------------------------------------------------------------------------------- restrictions on sampling


def truncate_logits(logits: Tensor, *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Tensor:
    """Set logits to −inf by top-k, then nucleus (top-p), then min-p truncation. [B, V] -> [B, V].

    Kept are the ``top_k`` largest logits, of these the smallest set of probability mass ``top_p``, and of these the
    tokens with at least ``min_p`` times the largest probability. ``top_k=0``, ``top_p=1`` and ``min_p=0`` switch a
    truncation off. The most likely token is always kept. Sources: Holtzman et al. 2020 (nucleus), Nguyen et al. 2024
    (min-p).
    """
    if top_k > 0 and top_k < logits.size(-1):
        kth = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p < 1.0:
        ordered, order = logits.sort(-1, descending=True)
        before = F.pad(running_sums(ordered.softmax(-1))[..., :-1], (1, 0))  # mass of the tokens ahead of each
        drop = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(drop, -torch.inf)
    if min_p > 0.0:
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(min_p), -torch.inf)
    return logits


def running_sums(values: Tensor) -> Tensor:
    """Return the sums of each row up to each of its columns, with the same bits in every run. [B, T] -> [B, T].

    On a CUDA device torch adds several rows in one order, and a single row in an order that varies. After
    `torch.use_deterministic_algorithms` it refuses both.
    """
    if not values.is_cuda:
        return values.cumsum(-1)
    chosen, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        return (values.expand(2, *values.shape[1:]) if values.size(0) == 1 else values).cumsum(-1)[: values.size(0)]
    finally:
        torch.use_deterministic_algorithms(chosen, warn_only=warns)


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Return z / θ where z > 0 and z·θ where z < 0 for the tokens in ``seen``, z for others. [B, V], bool [B, V].

    Source: Keskar et al. 2019, section 4.1, with negative logits handled as in transformers.
    """
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def allow_logits(logits: Tensor, previous: Tensor, logit_mask: Tensor | None) -> Tensor:
    """Return logits with −inf at the tokens that ``logit_mask`` forbids. [N, V], previous tokens [N] -> [N, V].

    The mask is bool, True = allowed: [V], or [V, V] with a row per previous token. None allows all tokens.
    """
    if logit_mask is None:
        return logits
    return logits.masked_fill(~(logit_mask if logit_mask.dim() == 1 else logit_mask[previous]), -torch.inf)
