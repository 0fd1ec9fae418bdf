"""Rollouts of images, as passed to reward functions and hooks, and image files of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from trainkit import Row

FEW = 16
"""Number of images of a collection or an evaluation that are written to a file."""


def as_ids(rows: Sequence[Row]) -> list[list[int]]:
    """Return the bytes of each prompt, from which seeds are derived."""
    return [list(row["prompt"].encode()) for row in rows]


@dataclass(frozen=True)
class ImageRollouts:
    """Images made for B prompts."""

    rows: list[Row]
    """The row each image belongs to, with its prompt under ``"prompt"`` and any further columns."""
    images: Tensor
    """Values from 0 to 1 [B, 1 or 3, H, W]."""
    scores: Tensor | None = None
    """Scores of the reward function [B]; None before they are known."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def prompts(self) -> list[str]:
        """The text of each prompt."""
        return [row["prompt"] for row in self.rows]

    @property
    def outputs(self) -> list[str]:
        """A description of each image, for text logs."""
        _, channels, height, width = self.images.shape
        what = f"{'grey' if channels == 1 else 'colour'} image {height}×{width}"
        scores = self.scores
        return [what if scores is None else f"{what}, reward {float(scores[i]):.4g}" for i in range(len(self))]

    @property
    def given(self) -> dict[str, Any]:
        """Arguments of reward and metric functions besides the columns; copies, which they may modify."""
        return {"images": self.images.clone(), "prompts": self.prompts}


def to_pil(image: Tensor) -> Image.Image:
    """Convert an image [1 or 3, H, W] with values from 0 to 1 to an 8-bit PIL image."""
    pixels = (image.detach().float().clamp(0, 1) * 255).round().byte().cpu()
    return Image.fromarray(pixels[0].numpy() if len(pixels) == 1 else pixels.permute(1, 2, 0).contiguous().numpy())


def save_grid(images: Sequence[Tensor] | Tensor, path: str | Path, *, columns: int | None = None) -> None:
    """Write images [B, 1 or 3, H, W] as a grid to one PNG; small images are enlarged."""
    tiles = [to_pil(image) for image in images]
    width, height = tiles[0].size
    zoom, columns = max(64 // max(width, height), 1), columns or math.ceil(len(tiles) ** 0.5)
    step = (width * zoom + 2, height * zoom + 2)
    grid = Image.new(tiles[0].mode, (columns * step[0], math.ceil(len(tiles) / columns) * step[1]))
    for index, tile in enumerate(tiles):
        place = (index % columns * step[0] + 1, index // columns * step[1] + 1)
        grid.paste(tile.resize((width * zoom, height * zoom), Image.Resampling.NEAREST), place)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    grid.save(path)
