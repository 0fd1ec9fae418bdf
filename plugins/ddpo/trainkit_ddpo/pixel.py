"""A small diffusion model in pixels: a UNet conditioned on the index of a prompt. Needs only torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trainkit.errors import ConfigError, DataError, describe
from trainkit_ddpo.adapters import merged
from trainkit_ddpo.ddim import Noise, per_row
from trainkit_ddpo.pipeline import ImagePipeline

CONFIG, WEIGHTS = "config.json", "model.safetensors"
DROPPED = 0.1
"""Share of the prompts that are dropped in denoising training, for guidance (Ho and Salimans 2022)."""


class PixelConfig(BaseModel):
    """The fields that ``model.model_path`` accepts for a model in pixels with random weights."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=())

    model_type: Literal["pixel_unet"] = "pixel_unet"
    """Identifies this kind of model."""
    image_size: int = Field(8, ge=2)
    """Height and width in pixels; a multiple of 2 ** (levels − 1)."""
    channels: Literal[1, 3] = 1
    """1: grey; 3: red, green, blue."""
    width: int = Field(32, ge=4, multiple_of=4)
    """Channels of the first level; each further level has twice as many."""
    levels: int = Field(2, ge=1)
    """Number of resolutions, each half of the one before; the last one has attention."""
    prompts: list[str] = []
    """The prompts that the model accepts. Empty: the model is unconditional and accepts any prompt."""
    train_timesteps: int = Field(1000, ge=2)
    """T of the cosine noise schedule (Nichol and Dhariwal 2021)."""

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        if self.image_size % 2 ** (self.levels - 1):
            raise ValueError(f"image_size {self.image_size} cannot be halved {self.levels - 1} times; change one")
        return self


class PixelPipeline(ImagePipeline):
    """A class-conditional UNet on images of a few thousand values."""

    def __init__(self, config: PixelConfig | Mapping[str, Any]) -> None:
        super().__init__()
        try:
            self.config = config if isinstance(config, PixelConfig) else PixelConfig(**config)
        except ValidationError as error:
            faults = "; ".join(f"{'.'.join(map(str, f['loc']))}: {f['msg']}" for f in error.errors())
            raise ConfigError(f"the fields of a pixel_unet are not valid: {faults}") from error
        self.shape = (self.config.channels, self.config.image_size, self.config.image_size)
        self.network = UNet(self.config)

    def noise(self, steps: int) -> Noise:
        """Return the cosine schedule with evenly spaced steps; the last step adds no noise.

        Raises:
            ConfigError: ``steps`` is not between 1 and `train_timesteps`.
        """
        total = self.config.train_timesteps
        if not 1 <= steps <= total:
            raise ConfigError(f"method.num_steps is {steps}; this model supports 1 to {total}; choose one of them")
        timesteps = (steps - torch.arange(steps)) * (total // steps) - 1
        return Noise(self._alphas(), timesteps, prediction="v_prediction", clip=1.0)

    def _alphas(self) -> Tensor:
        total = self.config.train_timesteps
        at = torch.arange(total + 1, dtype=torch.float64) / total
        curve = torch.cos((at + 0.008) / 1.008 * math.pi / 2) ** 2
        betas = (1 - curve[1:] / curve[:-1]).clamp(max=0.999)
        return (1 - betas).cumprod(0)

    def check(self, prompt: str, what: str) -> None:
        """Raise a `DataError` if the prompt is not one of the model's prompts."""
        known = self.config.prompts
        if prompt and known and prompt not in known:
            listed = ", ".join(map(repr, known[:20])) + (", …" if len(known) > 20 else "")
            raise DataError(f"{what} is {describe(prompt)}, and the model knows {listed}; give one of these")

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Return the index of each prompt [B]; the index after the last prompt means unconditional."""
        known = {prompt: index for index, prompt in enumerate(self.config.prompts)}
        none = len(known)
        ids = [known.get(prompt, none) for prompt in prompts]
        return torch.tensor(ids, device=next(self.parameters()).device)

    def predict(self, latents: Tensor, timesteps: Tensor, condition: Tensor) -> Tensor:
        """Return the predicted velocity v̂. [B, C, h, w], [B], [B] -> [B, C, h, w]."""
        return cast(Tensor, self.network(latents.to(next(self.parameters()).dtype), timesteps, condition))

    def decode(self, latents: Tensor) -> Tensor:
        """Rescale pixels from [−1, 1] to [0, 1]. [B, C, h, w]."""
        return (latents.float() / 2 + 0.5).clamp(0, 1)

    def denoising_loss(self, images: Tensor, prompts: Sequence[str], generator: torch.Generator) -> Tensor:
        """Return the training loss of the model on images, mean (v̂ − v)², v = √ᾱ ε − √(1 − ᾱ) x₀. -> [].

        Images are [B, C, h, w] with values from 0 to 1. Timesteps are sampled uniformly, and a tenth of the prompts is
        dropped. Sources: Ho et al. 2020, equation 14; Salimans and Ho 2022, appendix D.
        """
        count, device = len(images), images.device
        timesteps = torch.randint(self.config.train_timesteps, (count,), generator=generator, device=device)
        noise = torch.randn(images.shape, generator=generator, device=device)
        dropped = torch.rand(count, generator=generator, device=device) < DROPPED
        alpha, clean = per_row(self._alphas().to(device)[timesteps], images), 2 * images - 1
        signal, spread = alpha.sqrt(), (1 - alpha).sqrt()
        condition = torch.where(dropped, len(self.config.prompts), self.encode(prompts))
        predicted = self.predict(signal * clean + spread * noise, timesteps, condition)
        return F.mse_loss(predicted, signal * noise - spread * clean)

    def save_pretrained(self, directory: str | Path) -> None:
        """Write ``config.json`` and ``model.safetensors``."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / CONFIG).write_text(self.config.model_dump_json(indent=1), encoding="utf-8")
        state = merged(self.network).state_dict()
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, directory / WEIGHTS)

    def card(self) -> dict[str, str]:
        """Return the entries of the model card: the model is loaded with this plugin."""
        code = "from trainkit_ddpo import PixelPipeline\n\npipeline = PixelPipeline.from_pretrained(directory)"
        return {"loading": code}

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> Self:
        """Load a model that `save_pretrained` wrote.

        Raises:
            ConfigError: a file of the model is missing or cannot be read.
        """
        try:
            made = cls(json.loads((Path(directory) / CONFIG).read_text(encoding="utf-8")))
            made.network.load_state_dict(load_file(Path(directory) / WEIGHTS))
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(f"cannot load a model in pixels from {directory}: {error}") from error
        return made


# ------------------------------------------------------------------------------------------------------- the UNet


class UNet(nn.Module):
    """v̂(x, t, prompt): residual blocks down and up again, with attention at the lowest resolution."""

    def __init__(self, config: PixelConfig) -> None:
        super().__init__()
        widths = [config.width * 2**level for level in range(config.levels)]
        embedding = 4 * config.width
        self.time = nn.Sequential(nn.Linear(config.width, embedding), nn.SiLU(), nn.Linear(embedding, embedding))
        self.prompt = nn.Embedding(len(config.prompts) + 1, embedding)
        self.first = nn.Conv2d(config.channels, widths[0], 3, padding=1)
        inputs = [widths[0], *widths[:-1]]
        self.down = nn.ModuleList(Residual(a, b, embedding) for a, b in zip(inputs, widths, strict=True))
        self.middle = nn.ModuleList([Attention(widths[-1]), Residual(widths[-1], widths[-1], embedding)])
        self.up = nn.ModuleList(Residual(2 * b, a, embedding) for a, b in zip(inputs, widths, strict=True))
        self.last = nn.Sequential(_norm(widths[0]), nn.SiLU(), nn.Conv2d(widths[0], config.channels, 3, padding=1))

    def forward(self, x: Tensor, timesteps: Tensor, prompts: Tensor) -> Tensor:
        """Return the predicted velocity. [B, C, h, w], [B], [B] -> [B, C, h, w]."""
        times = sinusoids(timesteps, self.prompt.embedding_dim // 4).to(x.dtype)
        about = self.time(times) + self.prompt(prompts)
        x = self.first(x)
        kept = []
        for level, block in enumerate(self.down):
            x = block(F.avg_pool2d(x, 2) if level else x, about)
            kept.append(x)
        attention, block = self.middle
        x = block(attention(x), about)
        for level in reversed(range(len(self.up))):
            x = self.up[level](torch.cat([x, kept[level]], 1), about)
            x = F.interpolate(x, scale_factor=2.0) if level else x
        return cast(Tensor, self.last(x))


class Residual(nn.Module):
    """x + two convolutions; between them, the embedding of time and prompt scales and shifts the features."""

    def __init__(self, inputs: int, outputs: int, embedding: int) -> None:
        super().__init__()
        self.one = nn.Sequential(_norm(inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.norm, self.about = _norm(outputs), nn.Sequential(nn.SiLU(), nn.Linear(embedding, 2 * outputs))
        self.two = nn.Sequential(nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1))
        self.skip = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, about: Tensor) -> Tensor:
        """Apply the block. [B, C, h, w], [B, D] -> [B, C', h, w]."""
        scale, shift = self.about(about)[:, :, None, None].chunk(2, 1)
        inner = self.norm(self.one(x)) * (1 + scale) + shift  # after the norm, which would undo a shift
        return cast(Tensor, self.skip(x) + self.two(inner))


class Attention(nn.Module):
    """x + self-attention over positions. The layers have diffusers' names, so that adapters find them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = _norm(width)
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in range(3))
        self.to_out = nn.Sequential(nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the block. [B, C, h, w] -> [B, C, h, w]."""
        places = self.norm(x).flatten(2).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(self.to_q(places), self.to_k(places), self.to_v(places))
        return x + cast(Tensor, self.to_out(mixed)).transpose(1, 2).reshape(x.shape)


def sinusoids(timesteps: Tensor, width: int) -> Tensor:
    """Return sines and cosines of the timesteps, at frequencies from 1 down to 1/10000. [B] -> [B, D]."""
    half = width // 2
    rates = torch.exp(-math.log(10_000) * torch.arange(half, device=timesteps.device) / half)
    angles = timesteps.float().unsqueeze(1) * rates
    return torch.cat([angles.sin(), angles.cos()], 1)


def _norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(8, max(width // 4, 1)), width)
