"""Rollouts that are images: what reward functions and hooks are given, and pictures of them as files."""

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
"""Images of a collection or an evaluation that are written as a file."""


@dataclass(frozen=True)
class ImageRollouts:
    """Images made for B prompts."""

    rows: list[Row]
    """The row each image belongs to, with its prompt under ``"prompt"`` and any further columns."""
    images: Tensor
    """Values from 0 to 1 [B, 1 or 3, H, W]."""
    scores: Tensor | None = None
    """What the reward function said of them [B]; None before it has."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def prompts(self) -> list[str]:
        """Prompt text."""
        return [row["prompt"] for row in self.rows]

    @property
    def outputs(self) -> list[str]:
        """The images in words, for logs of text."""
        _, channels, height, width = self.images.shape
        what = f"{'grey' if channels == 1 else 'colour'} image {height}×{width}"
        scores = self.scores
        return [what if scores is None else f"{what}, reward {float(scores[i]):.4g}" for i in range(len(self))]

    @property
    def given(self) -> dict[str, Any]:
        """What reward and metric functions get beside the columns; theirs to change."""
        return {"images": self.images.clone(), "prompts": self.prompts}


def to_pil(image: Tensor) -> Image.Image:
    """An image [1 or 3, H, W] with values from 0 to 1, in 8 bits."""
    pixels = (image.detach().float().clamp(0, 1) * 255).round().byte().cpu()
    return Image.fromarray(pixels[0].numpy() if len(pixels) == 1 else pixels.permute(1, 2, 0).contiguous().numpy())


def save_grid(images: Sequence[Tensor] | Tensor, path: str | Path, *, columns: int | None = None) -> None:
    """Write images [B, 1 or 3, H, W] as one PNG, side by side, small ones magnified."""
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
