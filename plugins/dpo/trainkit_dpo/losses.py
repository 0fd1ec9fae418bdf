"""The losses of pairs, of r = log π − log π_ref of the chosen and the rejected response."""

from __future__ import annotations

from collections.abc import Callable
from math import log

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.functional import hinge_loss, ipo_loss, sigmoid_loss


def robust_loss(margins: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """Return the robust loss of DPO, (−(1 − ε) log σ(βx) + ε log σ(−βx)) / (1 − 2ε). [*] -> [*].

    It is an unbiased estimate of the loss with correct labels if a share ε of the labels is flipped.
    Source: Chowdhury, Kini, Natarajan 2024.
    """
    x = beta * margins
    return (-(1 - label_smoothing) * F.logsigmoid(x) + label_smoothing * F.logsigmoid(-x)) / (1 - 2 * label_smoothing)


def kto_pair_losses(
    chosen: Tensor, rejected: Tensor, chosen_kl: Tensor, rejected_kl: Tensor, *, beta: float
) -> tuple[Tensor, Tensor]:
    """Return the losses of both sides, 1 − σ(β(r_c − z_r)) and 1 − σ(β(z_c − r_r)). [*] ×4 -> [*] ×2.

    r is log π − log π_ref; z = max(0, mean r) estimates the KL. Each side is compared with the KL of the other, without
    gradient through z. Source: Ethayarajh et al. 2023 (HALOs), the form of KTO for pairs.
    """
    against_chosen, against_rejected = rejected_kl.detach().clamp(min=0), chosen_kl.detach().clamp(min=0)
    return 1 - F.sigmoid(beta * (chosen - against_chosen)), 1 - F.sigmoid(beta * (against_rejected - rejected))


def unpaired_aot_loss(
    chosen: Tensor, rejected: Tensor, beside_chosen: Tensor, beside_rejected: Tensor, *, beta: float, smoothing: float
) -> Tensor:
    """Return ½ (f(r_c − b_c) + f(b_r − r_r)), f the loss `sigmoid`, with the gradient of their sum. [*] ×4 -> [*].

    b_c is the r_r of the same rank among all pairs, and b_r the r_c, without gradient: the mean over all pairs is that
    of f(r_c − r_r) over both sides in sorted order. Source: Melnyk et al. 2024, the unpaired form.
    """
    margins = torch.stack([chosen - beside_chosen.detach(), beside_rejected.detach() - rejected])
    both: Tensor = sigmoid_loss(margins, beta=beta, label_smoothing=smoothing).sum(0)
    return both - both.detach() / 2


def exo_loss(margins: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """Return KL(p ‖ q) for p = (σ(βx), σ(−βx)) and the labels q = (1 − ε, ε). [*] -> [*].

    Source: Ji et al. 2024, Efficient Exact Optimization, equation 16.
    """
    x = beta * margins
    likely = F.sigmoid(x) * (F.logsigmoid(x) - log(1 - label_smoothing))
    return likely + F.sigmoid(-x) * (F.logsigmoid(-x) - log(label_smoothing))


def nca_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return −log σ(βr_c) − ½ log σ(−βr_c) − ½ log σ(−βr_r). [*] ×2 -> [*].

    Source: Chen et al. 2024, Noise Contrastive Alignment, algorithm 1, for two responses.
    """
    unlikely = F.logsigmoid(-beta * chosen) + F.logsigmoid(-beta * rejected)
    return -F.logsigmoid(beta * chosen) - unlikely / 2


def bco_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return −log σ(βr_c) − log σ(−βr_r). [*] ×2 -> [*].

    Source: Jung et al. 2024, Binary Classifier Optimization, without the shift of rewards, as in TRL.
    """
    return -F.logsigmoid(beta * chosen) - F.logsigmoid(-beta * rejected)


def sppo_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return (r_c − 1/2β)² + (r_r + 1/2β)². [*] ×2 -> [*].

    Source: Wu et al. 2024, Self-Play Preference Optimization, equation 4.7, where the chosen response wins for certain.
    """
    return (chosen - 1 / (2 * beta)) ** 2 + (rejected + 1 / (2 * beta)) ** 2


def apo_zero_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return 1 − σ(βr_c) + σ(βr_r). [*] ×2 -> [*]. Source: D'Oosterlinck et al. 2024, equation 7."""
    return F.sigmoid(-beta * chosen) + F.sigmoid(beta * rejected)


def apo_down_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Return σ(βr_c) + 1 − σ(βx). [*] ×2 -> [*]. Source: D'Oosterlinck et al. 2024, equation 8."""
    return F.sigmoid(beta * chosen) + F.sigmoid(-beta * (chosen - rejected))


def discopop_loss(margins: Tensor, *, beta: float) -> Tensor:
    """Return −(1 − m) log σ(βx) + m exp(−βx), m = σ(βx / 0.05). [*] -> [*].

    Source: Lu et al. 2024, Discovering Preference Optimization Algorithms, equation 5.
    """
    x = beta * margins
    share = F.sigmoid(x / 0.05)
    return -(1 - share) * F.logsigmoid(x) + share * torch.exp(-x)


LOSSES: dict[str, Callable[[Tensor, Tensor, float, float], Tensor]] = {
    "sigmoid": lambda c, r, beta, smoothing: sigmoid_loss(c - r, beta=beta, label_smoothing=smoothing),
    "sigmoid_norm": lambda c, r, beta, _: sigmoid_loss(c - r, beta=beta),
    "hinge": lambda c, r, beta, _: hinge_loss(c - r, beta=beta),
    "ipo": lambda c, r, beta, _: ipo_loss(c - r, beta=beta),
    "robust": lambda c, r, beta, smoothing: robust_loss(c - r, beta=beta, label_smoothing=smoothing),
    "exo_pair": lambda c, r, beta, smoothing: exo_loss(c - r, beta=beta, label_smoothing=smoothing),
    "nca_pair": lambda c, r, beta, _: nca_loss(c, r, beta=beta),
    "bco_pair": lambda c, r, beta, _: bco_loss(c, r, beta=beta),
    "sppo_hard": lambda c, r, beta, _: sppo_loss(c, r, beta=beta),
    "apo_zero": lambda c, r, beta, _: apo_zero_loss(c, r, beta=beta),
    "apo_down": lambda c, r, beta, _: apo_down_loss(c, r, beta=beta),
    "discopop": lambda c, r, beta, _: discopop_loss(c - r, beta=beta),
}
"""Losses of a pair by the name of `loss_type`: of r_c and r_r [B] ×2, β and ε."""
