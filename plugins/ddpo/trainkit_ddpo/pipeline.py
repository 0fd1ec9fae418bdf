"""What DDPO needs of an image model: one face for pixels and latents, and the policy over it."""

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
    """From prompts to images, by denoising: derive from it to train a model of another kind.

    ``network`` is what is trained; everything else that has weights is frozen.
    """

    network: nn.Module
    config: Any
    """What it was made from."""
    shape: tuple[int, int, int]
    """Shape [C, h, w] of what is denoised: pixels, or their latents."""

    @abstractmethod
    def noise(self, steps: int) -> Noise:
        """How it was trained to see noise, and which of the noise levels ``steps`` denoising steps visit."""

    def check(self, prompt: str, what: str) -> None:
        """Raise a `DataError` unless ``prompt`` is one that the model knows; ``what`` names it."""

    def fits(self, prompt: str) -> bool:
        """Whether ``prompt`` is encoded whole."""
        return True

    @abstractmethod
    def encode(self, prompts: Sequence[str]) -> Tensor:
        """What the network reads of each prompt [B, *]; an empty one stands for no prompt at all."""

    @abstractmethod
    def predict(self, latents: Tensor, timesteps: Tensor, condition: Tensor) -> Tensor:
        """The network's prediction. [B, C, h, w], [B], [B, *] -> [B, C, h, w]."""

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Images with values from 0 to 1. [B, C, h, w] -> [B, 1 or 3, H, W]."""

    @abstractmethod
    def save_pretrained(self, directory: str | Path) -> None:
        """Write everything that loading it again takes; an adapter is merged into the weights."""

    def card(self) -> dict[str, str]:
        """What a model card says of how it is loaded: ``library_name`` on the hub, code for ``loading``."""
        return {}

    def prepare(self, dtype: torch.dtype | None) -> Self:
        """Freeze all but the network, and hold what is frozen for good in ``dtype`` where that is given."""
        for child in self._frozen():
            child.requires_grad_(False)
            if dtype is not None:
                cast(child, dtype)
        return self

    def train(self, mode: bool = True) -> Self:
        """Set the network's mode; what is frozen is never in training."""
        super().train(mode)
        for child in self._frozen():
            child.eval()
        return self

    def _frozen(self) -> list[nn.Module]:
        return [child for name, child in self.named_children() if name != "network"]


class DiffusionPolicy(nn.Module):
    """Where each denoising step is centred: the network under classifier-free guidance, through one DDIM step.

    Args:
        pipeline: the image model.
        steps: the denoising steps.
        guidance_scale: g in ε̂ = ε̂(negative) + g (ε̂(prompt) − ε̂(negative)); 1 is ε̂(prompt) alone.
        negative_prompt: what to lead away from.
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
        """What is trained."""
        return self.pipeline.network

    def forward(self, latents: Tensor, steps: Tensor, condition: Tensor) -> Tensor:
        """μ of the denoising steps with these indices, in float32. [B, C, h, w], [B], [B, *] -> [B, C, h, w]."""
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
        """The negative prompt, encoded once: what encodes it is frozen. [1, *]."""
        if self._negative is None:
            with torch.no_grad():
                self._negative = self.pipeline.encode([self.negative_prompt])
        return self._negative

    def logprobs(self, mean: Tensor, latents: Tensor, steps: Tensor) -> Tensor:
        """The log-probabilities of ``latents`` under steps that are centred at ``mean``. [B, *] ×2, [B] -> [B]."""
        return gaussian_logprob(latents, mean, self.sigmas[steps])

    @torch.no_grad()
    def sample(self, condition: Tensor, noise: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Latents after each of S steps, and the log-probabilities of the steps, 0 where one draws nothing.

        The chain goes on from what is kept, rounded to ``dtype``, and so do the log-probabilities speak of it (S-50).

        Args:
            condition: what `ImagePipeline.encode` gave [B, *].
            noise: standard normal: where the chain begins, and what each step adds [B, S + 1, C, h, w].
            dtype: what latents are kept in.

        Returns:
            [B, S + 1, C, h, w] in ``dtype``, and [B, S] in float32.
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
