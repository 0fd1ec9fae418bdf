"""Stable Diffusion models, through diffusers, which is imported only when such a model is used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from trainkit.errors import ConfigError, PluginError
from trainkit_ddpo.adapters import lora_of, merged
from trainkit_ddpo.ddim import Noise
from trainkit_ddpo.pipeline import ImagePipeline

PARTS = ("unet", "vae", "text_encoder", "tokenizer", "scheduler")


def diffusers() -> ModuleType:
    """Import and return diffusers.

    Raises:
        PluginError: diffusers is not installed, or cannot be imported. Models in pixels do not need it.
    """
    try:
        import diffusers
        from diffusers import DDIMScheduler, StableDiffusionPipeline  # noqa: F401  (lazy imports fail here)
    except Exception as error:  # its imports may raise anything
        raise PluginError(
            f"models in latents need diffusers, and importing it raised {type(error).__name__}: {error}. Install it "
            "with pip install 'trainkit-ddpo[diffusers]', or give a model in pixels (model_type: pixel_unet)"
        ) from error
    return diffusers


class LatentPipeline(ImagePipeline):
    """A live ``StableDiffusionPipeline``: tokenizer, text encoder, UNet and autoencoder."""

    def __init__(self, pipe: Any) -> None:
        super().__init__()
        check_parts(pipe)
        self.pipe = pipe
        self.network, self.vae, self.text_encoder = pipe.unet, pipe.vae, pipe.text_encoder
        self.config = pipe.config
        size = pipe.unet.config.sample_size
        self.shape = (pipe.unet.config.in_channels, size, size)

    def noise(self, steps: int) -> Noise:
        """Return the noise schedule of the pipeline's scheduler."""
        return scheduled_noise(self.pipe.scheduler.config, steps)

    def fits(self, prompt: str) -> bool:
        """Return whether the prompt fits within the text encoder's limit."""
        return fits(self.pipe.tokenizer, prompt)

    def encode(self, prompts: Sequence[str]) -> Tensor:
        """Return the text encoder's hidden state of each token [B, L, D]."""
        tokenizer = self.pipe.tokenizer
        length = tokenizer.model_max_length
        ids = tokenizer(
            list(prompts), padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        ).input_ids
        return cast(Tensor, self.text_encoder(ids.to(self.text_encoder.device))[0])

    def predict(self, latents: Tensor, timesteps: Tensor, condition: Tensor) -> Tensor:
        """Return the UNet's prediction. [B, C, h, w], [B], [B, L, D] -> [B, C, h, w]."""
        dtype = next(self.network.parameters()).dtype
        found = self.network(latents.to(dtype), timesteps, encoder_hidden_states=condition.to(dtype))
        return cast(Tensor, found.sample)

    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents with the autoencoder, to values from 0 to 1. [B, C, h, w] -> [B, 3, H, W]."""
        scaled = latents.to(next(self.vae.parameters()).dtype) / self.vae.config.scaling_factor
        images = self.vae.decode(scaled).sample
        return cast(Tensor, (images.float() / 2 + 0.5).clamp(0, 1))

    def save_pretrained(self, directory: str | Path) -> None:
        """Write the pipeline in diffusers' format; the weights of a LoRA adapter too, for ``load_lora_weights``."""
        pipe, whole = self.pipe, merged(self.network)
        pipe.register_modules(unet=whole)
        try:
            with _quiet(diffusers()):
                pipe.save_pretrained(str(directory))
        finally:
            pipe.register_modules(unet=self.network)
        if whole is self.network:
            return
        weights, config = lora_of(self.network)
        if weights:
            pipe.save_lora_weights(str(directory), unet_lora_layers=weights, unet_lora_adapter_metadata=config)

    def card(self) -> dict[str, str]:
        """Return the entries of the model card: the model is loaded with diffusers."""
        cls = type(self.pipe).__name__
        code = f"from diffusers import {cls}\n\npipeline = {cls}.from_pretrained(directory)"
        return {"library_name": "diffusers", "loading": code}


def check_parts(pipe: Any) -> None:
    """Raise a `ConfigError` unless the pipeline has the parts of Stable Diffusion and no second text encoder."""
    have = getattr(pipe, "components", {})
    missing = [name for name in PARTS if have.get(name) is None]
    second = [name for name in have if name.endswith(("_2", "_3")) and have[name] is not None]
    if missing or second:
        fault = f"lacks {', '.join(missing)}" if missing else f"has {', '.join(second)} too"
        raise ConfigError(
            f"{type(pipe).__name__} {fault}; models in latents consist of {', '.join(PARTS)}, as Stable Diffusion 1 "
            "and 2 do. For other models, subclass trainkit_ddpo.ImagePipeline and pass the object"
        )


def scheduled_noise(config: Mapping[str, Any], steps: int) -> Noise:
    """Return the noise schedule of a scheduler's configuration, of any scheduler class, for DDIM steps."""
    clips = config.get("clip_sample", False)  # latents have no bounds, but DDIMScheduler clips by default
    scheduler = diffusers().DDIMScheduler.from_config(config, clip_sample=clips)
    if scheduler.config.thresholding:
        raise ConfigError(
            "the model's scheduler uses dynamic thresholding, which ddpo does not support; set thresholding to "
            "false in its configuration"
        )
    try:
        scheduler.set_timesteps(steps)
    except ValueError as error:
        raise ConfigError(f"method.num_steps is {steps}, which the model's scheduler refuses: {error}") from error
    return Noise(
        scheduler.alphas_cumprod,
        scheduler.timesteps,
        float(scheduler.final_alpha_cumprod),
        scheduler.config.prediction_type,
        scheduler.config.clip_sample_range if scheduler.config.clip_sample else None,
    )


def fits(tokenizer: Any, prompt: str) -> bool:
    """Return whether a prompt has at most as many tokens as the text encoder accepts."""
    return len(tokenizer(prompt).input_ids) <= int(tokenizer.model_max_length)


def load_part(name: str, path: str, kwargs: Mapping[str, Any]) -> Any:
    """Return the tokenizer or the scheduler's configuration of the pipeline at ``path``, without loading weights."""
    library = diffusers()
    keys = ("revision", "token", "cache_dir", "variant")
    known = {key: value for key, value in kwargs.items() if key in keys}
    try:
        if name == "scheduler":
            return library.DDIMScheduler.load_config(path, subfolder="scheduler", **known)
        from transformers import CLIPTokenizer

        return CLIPTokenizer.from_pretrained(path, subfolder="tokenizer", **known)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(_cannot_load(path, error)) from error


def load_latent(path: str, dtype: torch.dtype, kwargs: Mapping[str, Any]) -> LatentPipeline:
    """Return the pipeline at ``path``, a directory or a hub id, without safety checker and feature extractor."""
    library = diffusers()
    unused = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    try:
        with _quiet(library):
            pipe = library.StableDiffusionPipeline.from_pretrained(path, dtype=dtype, **{**unused, **kwargs})
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(_cannot_load(path, error)) from error
    return LatentPipeline(pipe)


@contextmanager
def _quiet(library: ModuleType) -> Iterator[None]:
    """Disable the progress bars of diffusers and transformers within the context."""
    from transformers.utils import logging as others

    own, shown = library.utils.logging, others.is_progress_bar_enabled()
    own.disable_progress_bar()
    others.disable_progress_bar()
    try:
        yield
    finally:
        own.enable_progress_bar()
        if shown:
            others.enable_progress_bar()


def _cannot_load(path: str, error: Exception) -> str:
    return (
        f"the image model {path!r} (model.model_path) cannot be loaded: {error}. Give a hub id or a directory of a "
        "Stable Diffusion pipeline, a model in pixels that trainkit saved, or the fields of one (model_type: "
        "pixel_unet)"
    )
