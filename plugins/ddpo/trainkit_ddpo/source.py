"""Image models from a configuration or a live object: first what checks need, then the weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainkit.errors import ConfigError, describe
from trainkit_ddpo.ddim import Noise
from trainkit_ddpo.latent import LatentPipeline, fits, load_latent, load_part, scheduled_noise
from trainkit_ddpo.pipeline import ImagePipeline
from trainkit_ddpo.pixel import CONFIG, PixelConfig, PixelPipeline


@dataclass(frozen=True)
class Source:
    """An image model before its weights are loaded."""

    noise: Callable[[int], Noise]
    """As `ImagePipeline.noise`."""
    check: Callable[[str, str], None]
    """As `ImagePipeline.check`."""
    fits: Callable[[str], bool]
    """As `ImagePipeline.fits`."""
    load: Callable[[], ImagePipeline]
    """Loads the model with its weights; random weights are drawn from torch's global generator."""


def open_source(config: Any, live: Any = None) -> Source:
    """Return the source of the model that the section ``model`` names, or of the live object.

    Raises:
        ConfigError: no model is given, or it is not an image model that ddpo can train.
        PluginError: the model needs diffusers, and diffusers cannot be imported.
    """
    dtype = getattr(torch, config.dtype or "float32")
    if live is not None:
        pipeline = _as_pipeline(live)
        return Source(pipeline.noise, pipeline.check, pipeline.fits, lambda: pipeline)
    path = config.model_path
    if path is None:
        raise ConfigError("no model is given; set model.model_path to an image model, or pass a live one")
    fields = _pixel_fields(path)
    if fields is None:
        return _latent(path, dtype, config.kwargs)
    if config.kwargs:
        raise ConfigError(f"model.kwargs is {config.kwargs}, and models in pixels take none; remove it")
    return _pixel(fields, path, dtype)


def _as_pipeline(live: Any) -> ImagePipeline:
    if isinstance(live, ImagePipeline):
        return live
    if hasattr(live, "components"):
        return LatentPipeline(live)
    raise ConfigError(
        f"the live model is {describe(live)}; ddpo trains a trainkit_ddpo.ImagePipeline or a StableDiffusionPipeline "
        "of diffusers"
    )


def _pixel_fields(path: Any) -> dict[str, Any] | None:
    """Return the fields of a model in pixels, or None if ``path`` names another kind of model."""
    if not isinstance(path, str):
        if path.get("model_type") != "pixel_unet":
            raise ConfigError(
                f"model.model_path has the model_type {path.get('model_type')!r}; ddpo makes random weights only for "
                "'pixel_unet'. Give a model in latents as a hub id, a directory or a live pipeline"
            )
        return dict(path)
    file = Path(path) / CONFIG
    if not file.is_file():
        return None
    fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return fields if fields.get("model_type") == "pixel_unet" else None


def _pixel(fields: dict[str, Any], path: Any, dtype: torch.dtype) -> Source:
    with torch.device("meta"):
        door = PixelPipeline(fields)

    def load() -> ImagePipeline:
        made = PixelPipeline.from_pretrained(path) if isinstance(path, str) else PixelPipeline(PixelConfig(**fields))
        return made.to(dtype)

    return Source(door.noise, door.check, door.fits, load)


def _latent(path: str, dtype: torch.dtype, kwargs: dict[str, Any]) -> Source:
    scheduler, tokenizer = load_part("scheduler", path, kwargs), load_part("tokenizer", path, kwargs)

    def known(prompt: str, what: str) -> None:
        """Accept any prompt."""

    return Source(
        lambda steps: scheduled_noise(scheduler, steps),
        known,
        lambda prompt: fits(tokenizer, prompt),
        lambda: load_latent(path, dtype, kwargs),
    )
