"""Denoising as a Markov chain of Gaussians: DDIM steps and their log-probabilities, in float32 or wider.

Shapes: B rows, S denoising steps, `*` the shape of one latent or image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Prediction = Literal["epsilon", "v_prediction", "sample"]


@dataclass(frozen=True)
class Noise:
    """The noise schedule and parametrisation that a diffusion model was trained with, and the denoising timesteps."""

    alphas_cumprod: Tensor
    """ᾱ_t, the share of the image's variance that remains after t + 1 of T noising steps [T]."""
    timesteps: Tensor
    """The t of each denoising step, in sampling order [S]."""
    final_alpha: float = 1.0
    """ᾱ after the last step."""
    prediction: Prediction = "epsilon"
    """What the network predicts: the noise, the velocity, or the image."""
    clip: float | None = None
    """Predicted images are clipped to ± this value. None: not clipped."""

    def steps(self, eta: float) -> Steps:
        """Return the denoising steps for η. A step leads from t to t − T // S."""
        total = len(self.alphas_cumprod)
        wide, before = self.alphas_cumprod.double(), self.timesteps - total // len(self.timesteps)
        alphas = wide[self.timesteps]
        previous = torch.where(
            before >= 0, wide[before.clamp(min=0)], torch.tensor(self.final_alpha, dtype=torch.float64)
        )
        return Steps(self.timesteps, alphas, previous, ddim_sigma(alphas, previous, eta=eta), self)


@dataclass(frozen=True)
class Steps:
    """S denoising steps, in sampling order; all tensors [S]."""

    timesteps: Tensor
    alphas: Tensor
    """ᾱ before the step."""
    previous: Tensor
    """ᾱ after it."""
    sigmas: Tensor
    """Standard deviation of the noise that the step adds."""
    noise: Noise

    def __len__(self) -> int:
        return len(self.timesteps)

    @property
    def trained(self) -> Tensor:
        """Indices of the steps that add noise, and so have a density; the other steps are deterministic."""
        return (self.sigmas > 0).nonzero().flatten()


def ddim_sigma(alpha: Tensor, previous: Tensor, *, eta: float) -> Tensor:
    """Return σ = η √((1 − ᾱ') / (1 − ᾱ) · (1 − ᾱ / ᾱ')), with ᾱ before a step and ᾱ' after it. [*], [*] -> [*].

    Source: Song et al. 2021, equation 16.
    """
    return eta * ((1 - previous) / (1 - alpha) * (1 - alpha / previous)).clamp(min=0).sqrt()


def ddim_mean(
    latents: Tensor,
    predicted: Tensor,
    alpha: Tensor,
    previous: Tensor,
    sigma: Tensor,
    *,
    prediction: Prediction = "epsilon",
    clip: float | None = None,
) -> Tensor:
    """Return the mean of a denoising step, μ = √ᾱ' x̂₀ + √(1 − ᾱ' − σ²) ε̂. [B, *] ×2, [B] ×3 -> [B, *].

    Source: Song et al. 2021, equation 12; x̂₀ and ε̂ are computed as in Salimans and Ho 2022.
    """
    x, out = at_least_float32(latents), at_least_float32(predicted)
    a, a_after, s = (per_row(value, x) for value in (alpha, previous, sigma))
    image, noise = _image_and_noise(x, out, a, prediction)
    if clip is not None:
        image = image.clamp(-clip, clip)
    return a_after.sqrt() * image + (1 - a_after - s**2).clamp(min=0).sqrt() * noise


def _image_and_noise(x: Tensor, out: Tensor, alpha: Tensor, prediction: Prediction) -> tuple[Tensor, Tensor]:
    """Return x̂₀ and ε̂ of x = √ᾱ x₀ + √(1 − ᾱ) ε. -> [B, *] ×2."""
    signal, spread = alpha.sqrt(), (1 - alpha).sqrt()
    if prediction == "epsilon":
        return (x - spread * out) / signal, out
    if prediction == "sample":
        return out, (x - signal * out) / spread
    return signal * x - spread * out, signal * out + spread * x


def gaussian_logprob(x: Tensor, mean: Tensor, sigma: Tensor) -> Tensor:
    """Return −(x − μ)² / 2σ² − ln σ − ½ ln 2π, a mean over the dimensions of each row. [B, *], [B, *], [B] -> [B].

    It is a mean instead of the sum of a density, because the clipping range of Black et al. 2023 assumes a mean. σ must
    be positive.
    """
    x = at_least_float32(x)
    wide, s = at_least_float32(mean), per_row(sigma, x)
    constant = 0.5 * torch.log(torch.tensor(2 * torch.pi, dtype=x.dtype))
    each = -((x - wide) ** 2) / (2 * s**2) - s.log() - constant.to(x.device)
    return each.flatten(1).mean(1)


def at_least_float32(x: Tensor) -> Tensor:
    """Return ``x`` in float32, or unchanged if its dtype is wider. [*]."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def per_row(values: Tensor, like: Tensor) -> Tensor:
    """Return numbers of rows [B] in a shape that broadcasts with ``like`` [B, *]."""
    return values.to(like.device, like.dtype).view(-1, *[1] * (like.dim() - 1))
