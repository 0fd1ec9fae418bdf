"""The interface of image models, in pixels or in latents, and the policy that samples from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from trainkit_ddpo.adapters import cast
from trainkit_ddpo.ddim import Noise, Steps, ddim_mean, gaussian_logprob


class ImagePipeline(nn.Module, ABC):
    """A model that makes images from prompts by denoising. Subclass it to train another kind of model.

    ``network`` is trained; all other modules are frozen.
    """

    network: nn.Module
    config: Any
    """The configuration that the model was made from."""
    shape: tuple[int, int, int]
    """Shape [C, h, w] of what is denoised: pixels or latents."""

    @abstractmethod
    def noise(self, steps: int) -> Noise:
        """Return the noise schedule of the model's training, with the timesteps of ``steps`` denoising steps."""

    def check(self, prompt: str, what: str) -> None:
        """Raise a `DataError` if the model does not accept ``prompt``; ``what`` names the prompt in the message."""

    def fits(self, prompt: str) -> bool:
        """Return whether ``prompt`` is encoded without truncation."""
        return True

    @abstractmethod
    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Return the conditioning input of the network for each prompt [B, *]; an empty prompt means unconditional."""

    @abstractmethod
    def predict(self, latents: Tensor, timesteps: Tensor, condition: Tensor) -> Tensor:
        """Return the network's prediction. [B, C, h, w], [B], [B, *] -> [B, C, h, w]."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Return images with values from 0 to 1. [B, C, h, w] -> [B, 1 or 3, H, W]."""

    @abstractmethod
    def save_pretrained(self, directory: str | Path) -> None:
        """Write all files that are needed to load the model again; an adapter is merged into the weights."""

    def card(self) -> dict[str, str]:
        """Return entries of the model card: ``library_name`` on the hub, and code for ``loading`` the model."""
        return {}

    def prepare(self, dtype: torch.dtype | None) -> Self:
        """Freeze everything but the network, and convert what is frozen to ``dtype`` if it is given."""
        for child in self._frozen():
            child.requires_grad_(False)
            if dtype is not None:
                cast(child, dtype)
        return self

    def train(self, mode: bool = True) -> Self:
        """Set the network's mode; frozen modules stay in evaluation mode."""
        super().train(mode)
        for child in self._frozen():
            child.eval()
        return self

    def _frozen(self) -> list[nn.Module]:
        return [child for name, child in self.named_children() if name != "network"]


class DiffusionPolicy(nn.Module):
    """The mean of each denoising step: the network's prediction with classifier-free guidance, and one DDIM step.

    Args:
        pipeline: the image model.
        steps: the denoising steps.
        guidance_scale: g in ε̂ = ε̂(negative) + g (ε̂(prompt) − ε̂(negative)); with 1, ε̂(prompt) alone is used.
        negative_prompt: the negative prompt of guidance.
    """

    def __init__(
        self, pipeline: ImagePipeline, steps: Steps, *, guidance_scale: float = 1.0, negative_prompt: str = ""
    ) -> None:
        super().__init__()
        self.pipeline, self.guidance_scale, self.negative_prompt = pipeline, guidance_scale, negative_prompt
        self.prediction, self.clip = steps.noise.prediction, steps.noise.clip
        self.timesteps: Tensor
        self.alphas: Tensor
        self.previous: Tensor
        self.sigmas: Tensor
        self.register_buffer("timesteps", steps.timesteps, persistent=False)
        for name in ("alphas", "previous", "sigmas"):
            self.register_buffer(name, getattr(steps, name).float(), persistent=False)
        self._negative: Tensor | None = None

    @property
    def model(self) -> nn.Module:
        """The module that is trained."""
        return self.pipeline.network

    def forward(self, latents: Tensor, steps: Tensor, condition: Tensor) -> Tensor:
        """Return μ of the steps with these indices, in float32. [B, C, h, w], [B], [B, *] -> [B, C, h, w]."""
        predicted = self._guided(latents, self.timesteps[steps], condition)
        at = (self.alphas[steps], self.previous[steps], self.sigmas[steps])
        return ddim_mean(latents, predicted, *at, prediction=self.prediction, clip=self.clip)

    def _guided(self, latents: Tensor, timesteps: Tensor, condition: Tensor) -> Tensor:
        if self.guidance_scale == 1:
            return self.pipeline.predict(latents, timesteps, condition)
        negative = self._led_away_from().to(condition).expand_as(condition)
        both = self.pipeline.predict(latents.repeat(2, 1, 1, 1), timesteps.repeat(2), torch.cat([negative, condition]))
        away, towards = both.float().chunk(2)
        return away + self.guidance_scale * (towards - away)

    def _led_away_from(self) -> Tensor:
        """Return the encoded negative prompt [1, *]. It is encoded once, because the encoder is frozen."""
        if self._negative is None:
            with torch.no_grad():
                self._negative = self.pipeline.encode([self.negative_prompt])
        return self._negative

    def logprobs(self, mean: Tensor, latents: Tensor, steps: Tensor) -> Tensor:
        """Return the log-probabilities of ``latents`` under steps with mean ``mean``. [B, *] ×2, [B] -> [B]."""
        return gaussian_logprob(latents, mean, self.sigmas[steps])

    @torch.no_grad()
    def sample(self, condition: Tensor, noise: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Sample the latents of S steps, and return them with the log-probabilities of the steps.

        Each step starts from the stored latents, rounded to ``dtype``, and the log-probabilities are those of the
        stored latents. A step that adds no noise has log-probability 0.

        Args:
            condition: the output of `ImagePipeline.encode` [B, *].
            noise: standard normal noise [B, S + 1, C, h, w]: the initial latents, then the noise of each step.
            dtype: dtype in which latents are stored.

        Returns:
            The latents [B, S + 1, C, h, w] in ``dtype``, and the log-probabilities [B, S] in float32.
        """
        latents = [noise[:, 0].to(dtype)]
        logprobs = []
        for index, sigma in enumerate(self.sigmas.tolist()):
            at = torch.full((len(noise),), index, device=noise.device)
            mean = self(latents[-1], at, condition)
            latents.append((mean + sigma * noise[:, index + 1]).to(dtype))
            drawn = self.logprobs(mean, latents[-1], at) if sigma > 0 else mean.new_zeros(len(mean))
            logprobs.append(drawn)
        return torch.stack(latents, 1), torch.stack(logprobs, 1)
