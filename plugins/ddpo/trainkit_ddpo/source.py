"""From what a configuration names, or a user gives, to an image model: first what the door needs, then its weights."""

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
    """An image model before its weights are there."""

    noise: Callable[[int], Noise]
    """As `ImagePipeline.noise`."""
    check: Callable[[str, str], None]
    """As `ImagePipeline.check`."""
    fits: Callable[[str], bool]
    """As `ImagePipeline.fits`."""
    load: Callable[[], ImagePipeline]
    """The model with its weights, drawn from torch's global generator where they are random."""


def open_source(config: Any, live: Any = None) -> Source:
    """What the section ``model`` names, or the live object.

    Raises:
        ConfigError: nothing is named, or it is no image model that can be trained here.
        PluginError: it needs diffusers, which cannot be imported.
    """
    dtype = getattr(torch, config.dtype)
    if live is not None:
        pipeline = _as_pipeline(live)
        return Source(pipeline.noise, pipeline.check, pipeline.fits, lambda: pipeline)
    path = config.model_path
    if path is None:
        raise ConfigError("no model is given; set model.model_path to an image model, or pass one")
    fields = _pixel_fields(path)
    if fields is None:
        return _latent(path, dtype, config.kwargs)
    if config.kwargs:
        raise ConfigError(f"model.kwargs is {config.kwargs}, which models in pixels have no use for; leave it out")
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
    """The fields of a model in pixels; None if ``path`` names another."""
    if not isinstance(path, str):
        if path.get("model_type") != "pixel_unet":
            raise ConfigError(
                f"model.model_path has the model_type {path.get('model_type')!r}; ddpo makes random weights of "
                "'pixel_unet' only. Models in latents are given by a hub id or directory, or live"
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
        """Any text is."""

    return Source(
        lambda steps: scheduled_noise(scheduler, steps),
        known,
        lambda prompt: fits(tokenizer, prompt),
        lambda: load_latent(path, dtype, kwargs),
    )
