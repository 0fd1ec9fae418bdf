"""Digits of 8 × 8 pixels: a diffusion model that generates them, and rewards for its images."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from trainkit_ddpo import PixelPipeline, to_pil

PROMPT = "a digit"
MODEL = {"model_type": "pixel_unet", "image_size": 8, "channels": 1, "width": 32}
IMAGES = 48
"""Number of images in an evaluation."""


def digits() -> tuple[Tensor, np.ndarray[Any, Any]]:
    """Return scikit-learn's 1,797 digits [1797, 1, 8, 8] with values from 0 to 1, and their labels."""
    data, labels = load_digits(return_X_y=True)
    return torch.tensor(data, dtype=torch.float32).view(-1, 1, 8, 8) / 16, labels


def denoiser(seed: int, steps: int, batch_size: int = 128, lr: float = 2e-3) -> PixelPipeline:
    """Train a model to denoise digits, from random weights, and return it."""
    images, draws = digits()[0], torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = PixelPipeline(MODEL)
    optimizer = torch.optim.Adam(pipeline.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, lr / 10)
    for _ in range(steps):
        rows = torch.randint(len(images), (batch_size,), generator=draws)
        optimizer.zero_grad()
        pipeline.denoising_loss(images[rows], [PROMPT] * batch_size, draws).backward()
        optimizer.step()
        schedule.step()
    return pipeline.eval()


def compressibility(images: Tensor, **_: Any) -> list[float]:
    """Return minus the size in kB of each image, enlarged 8 times, as a JPEG of quality 95 (Black et al. 2023)."""
    return [-_jpeg_bytes(image) / 1000 for image in images]


def _jpeg_bytes(image: Tensor) -> int:
    with io.BytesIO() as file:
        to_pil(image).resize((64, 64), 0).save(file, "JPEG", quality=95)
        return file.tell()


@cache
def classifier() -> LogisticRegression:
    """Return a classifier of digits, with an accuracy of about 97 % on held-out digits."""
    images, labels = digits()
    return LogisticRegression(C=1.0, max_iter=1000).fit(images.flatten(1).numpy(), labels)


def wanted_digit(images: Tensor, digit: list[int], **_: Any) -> list[float]:
    """Return the classifier's probability that each image is the digit in the prompt's column ``digit``."""
    given = images.flatten(1).cpu().numpy()
    return [float(row[wanted]) for row, wanted in zip(classifier().predict_proba(given), digit, strict=True)]


REWARDS = {"compressibility": compressibility, "digit": wanted_digit}


def measured(images: Tensor, digit: list[int], **_: Any) -> dict[str, list[float]]:
    """Return the values of both rewards, as metrics."""
    return {"kilobytes": [-r for r in compressibility(images)], "is the digit": wanted_digit(images, digit)}


def reward(name: str, digit: int) -> dict[str, Any]:
    """Return arguments of `trainkit.train`: a single prompt, and the reward with the given name."""
    row = {"prompt": PROMPT, "digit": digit}
    return {
        "reward_fn": REWARDS[name],
        "metric_fn": measured,
        "prompts": [row],
        "eval_prompts": [row] * IMAGES,
    }
