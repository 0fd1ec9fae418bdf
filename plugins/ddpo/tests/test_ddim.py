"""The denoising steps: golden numbers, what they are in closed form, and that diffusers makes the same ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tables import table
from trainkit_ddpo.ddim import Noise, Steps, ddim_mean, ddim_sigma, gaussian_logprob

X = torch.tensor([[0.5, -0.3, 1.2, 0.0]], dtype=torch.float64)
EPS = torch.tensor([[0.1, 0.2, -0.1, 0.4]], dtype=torch.float64)
NEXT = torch.tensor([[0.45, -0.25, 1.1, 0.05]], dtype=torch.float64)


def alphas_cumprod() -> Tensor:
    """Stable Diffusion's: β from .00085 to .012, scaled linearly, T = 1000."""
    return (1 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2).cumprod(0)


def steps_at(timesteps: list[int], eta: float = 1.0, final: float | None = None) -> Steps:
    """Steps of fifty at these timesteps: T // S = 20."""
    padded = torch.tensor([*timesteps, *[999] * (50 - len(timesteps))])
    alphas = alphas_cumprod()
    return Noise(alphas, padded, float(alphas[0]) if final is None else final).steps(eta)


def test_golden_numbers_of_a_step() -> None:
    """Golden 10.6: t = 501, and t = 1, whose step leads to ᾱ_0 (its t − 20 is below 0)."""
    steps = steps_at([501, 1])
    mean = ddim_mean(X, EPS, steps.alphas[:1], steps.previous[:1], steps.sigmas[:1])
    assert float(steps.sigmas[0]) == pytest.approx(0.294785, abs=1e-6)
    assert mean[0].tolist() == pytest.approx([0.513109, -0.336774, 1.269266, -0.044475], abs=1e-6)
    assert float(gaussian_logprob(NEXT, mean, steps.sigmas[:1])) == pytest.approx(0.231959, abs=1e-6)
    mean = ddim_mean(X, EPS, steps.alphas[1:2], steps.previous[1:2], steps.sigmas[1:2])
    assert float(steps.sigmas[1]) == pytest.approx(0.020648, abs=1e-6)
    assert float(gaussian_logprob(NEXT, mean, steps.sigmas[1:2])) == pytest.approx(-2.663221, abs=2e-6)


def test_a_step_that_draws_nothing_is_not_trained() -> None:
    """Golden 10.6: at t = 0 the noise is the last level's own and σ is 0; so it is with a final ᾱ of 1."""
    assert steps_at([501, 0]).sigmas[1] == 0
    assert steps_at([501, 1], final=1.0).sigmas[1] == 0
    assert 1 not in steps_at([501, 0]).trained
    assert {0, 1} <= set(steps_at([501, 1]).trained.tolist())


@given(st.floats(0.001, 0.998), st.floats(0.0005, 0.9995), st.floats(0.01, 1.0), st.integers(0, 1000))
def test_mean_and_logprob_are_the_closed_form(low: float, share: float, eta: float, seed: int) -> None:
    """Song et al. 2021, equations 12 and 16, in NumPy; the three kinds of prediction speak of one x̂₀ and ε̂."""
    a, after = low, low + (0.9999 - low) * share
    rng = np.random.default_rng(seed)
    image, eps = rng.normal(size=(2, 6))
    x = math.sqrt(a) * image + math.sqrt(1 - a) * eps
    sigma = eta * math.sqrt((1 - after) / (1 - a) * (1 - a / after))
    expected = math.sqrt(after) * image + math.sqrt(max(1 - after - sigma**2, 0)) * eps
    t = [torch.tensor([value], dtype=torch.float64) for value in (a, after)]
    s = ddim_sigma(t[0], t[1], eta=eta)
    assert float(s) == pytest.approx(sigma, rel=1e-9)
    predicted = {
        "epsilon": eps, "sample": image, "v_prediction": math.sqrt(a) * eps - math.sqrt(1 - a) * image
    }  # fmt: skip
    for kind, value in predicted.items():
        mean = ddim_mean(torch.tensor(x)[None], torch.tensor(value)[None], t[0], t[1], s, prediction=kind)
        assert mean[0].numpy() == pytest.approx(expected, abs=1e-6)
        drawn = expected + sigma * rng.normal(size=6)
        logprob = np.mean(-((drawn - expected) ** 2) / (2 * sigma**2) - np.log(sigma) - 0.5 * np.log(2 * np.pi))
        assert float(gaussian_logprob(torch.tensor(drawn)[None], mean, s)) == pytest.approx(logprob, abs=1e-4)


def test_predicted_images_are_clipped_and_the_noise_is_not() -> None:
    alpha, after, sigma = (torch.tensor([v], dtype=torch.float64) for v in (0.25, 0.64, 0.0))
    # x̂₀ = (2 − √.75 · 0) / .5 = 4, clipped to 1; μ = .8 · 1 + √.36 · 0
    mean = ddim_mean(torch.tensor([[2.0]]).double(), torch.zeros(1, 1).double(), alpha, after, sigma, clip=1.0)
    assert mean.tolist() == [[pytest.approx(0.8)]]


@table("dtype", [torch.bfloat16, torch.float16])
def test_logprobs_of_half_latents_are_computed_in_float32(dtype: torch.dtype) -> None:
    """Of the number that is kept, not of the one before rounding, and without rounding the result."""
    mean, sigma = torch.full((1, 4), 0.3), torch.tensor([0.1])
    kept = (mean + 0.1 * torch.tensor([[0.5, -1.0, 1.5, 0.1]])).to(dtype)
    found = gaussian_logprob(kept, mean, sigma)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, gaussian_logprob(kept.double(), mean.double(), sigma.double()).float())


def test_logprob_is_a_mean_over_dimensions_and_has_the_gradient_of_one() -> None:
    generator = torch.Generator().manual_seed(0)
    x, mean = (torch.randn(2, 3, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    sigma = torch.tensor([0.5, 2.0], dtype=torch.float64)
    expected = torch.distributions.Normal(mean, sigma.view(2, 1, 1)).log_prob(x).flatten(1).mean(1)
    torch.testing.assert_close(gaussian_logprob(x, mean, sigma), expected)
    assert torch.autograd.gradcheck(lambda m: gaussian_logprob(x, m, sigma), mean.requires_grad_())
