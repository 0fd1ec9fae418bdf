"""Images of prompts as vLLM reads them: the tensors of each, and the tokens that stand for it.

vLLM gets what the trained model reads, and not the images: its own processor could make other tensors and tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainkit.data import Images
from trainkit.errors import EngineError


@dataclass(frozen=True)
class Piece:
    """An image, or a part of one that is read alone."""

    offset: int
    """The place of its first token in the prompt."""
    length: int
    """How many tokens stand for it."""
    inputs: dict[str, Tensor]
    """What the model reads of it."""
    content: str
    """A hash of that."""


def pieces_of(queries: Sequence[list[int]], images: Images | None, token: int | None, dtype: torch.dtype) -> list[Any]:
    """Return the pieces of each prompt; ``token`` stands for a part of an image, ``dtype`` is that of pixels in vLLM.

    Raises:
        EngineError: the tokens of a piece are apart.
    """
    if images is None:
        return [[] for _ in queries]
    images, known = images.to(torch.device("cpu")), dict[int, list[tuple[dict[str, Tensor], str]]]()
    for row, of in enumerate(images.of.tolist()):
        if of >= 0 and of not in known:
            known[of] = [(each, _hash(each)) for each in _apart(images.take(torch.tensor([row])).inputs, dtype)]
    return [_placed(query, known.get(of, []), token) for query, of in zip(queries, images.of.tolist(), strict=True)]


def _hash(inputs: dict[str, Tensor]) -> str:
    return hashlib.sha256(b"".join(value.float().numpy().tobytes() for value in inputs.values())).hexdigest()


def _apart(inputs: dict[str, Tensor], dtype: torch.dtype) -> list[dict[str, Tensor]]:
    """Return what the model reads of each piece of the images of a prompt."""
    pixels, mask = inputs["pixel_values"].to(dtype), inputs.get("pixel_attention_mask")
    if (grid := inputs.get("image_grid_thw")) is not None:
        parts = pixels.split(grid.prod(-1).tolist())
        return [{"pixel_values": part, "image_grid_thw": each} for part, each in zip(parts, grid, strict=True)]
    one = torch.tensor(1)
    pieces = [{"pixel_values": each, "num_patches": one} for each in pixels.flatten(0, -4).unsqueeze(1)]
    if mask is None:
        return pieces
    masks = mask.bool().flatten(0, -3).unsqueeze(1)
    return [{**each, "pixel_attention_mask": real} for each, real in zip(pieces, masks, strict=True) if real.any()]


def _placed(query: list[int], inputs: list[tuple[dict[str, Tensor], str]], token: int | None) -> list[Piece]:
    """Return pieces with their places in a prompt, which have tokens by the size of their grid, or equally many."""
    places = [place for place, each in enumerate(query) if each == token]
    sizes = [int(each["image_grid_thw"].prod()) if "image_grid_thw" in each else 1 for each, _ in inputs]
    found, start = list[Piece](), 0
    for size, (each, content) in zip(sizes, inputs, strict=True):
        length, rest = divmod(len(places) * size, sum(sizes))
        here, start = places[start : start + length], start + length
        if rest or here != [*range(here[0], here[0] + length)]:
            raise EngineError(
                f"the engine 'vllm' reads images whose tokens follow each other, and of a prompt the {len(places)} "
                f"tokens of its {len(inputs)} images, or parts of images, do not; set rollout.engine to 'local'"
            )
        found.append(Piece(here[0], length, each, content))
    return found


def for_engine(query: list[int], pieces: Sequence[Piece], tag: str) -> Any:
    """Return a prompt for the engine of vLLM in this process."""
    from vllm.inputs.engine import mm_input, tokens_input  # type: ignore[import-not-found, unused-ignore]

    if not pieces:
        return tokens_input(query)
    from vllm.multimodal.inputs import (  # type: ignore[import-not-found, unused-ignore]
        MultiModalKwargsItems,
        PlaceholderRange,
    )

    return mm_input(
        query,
        MultiModalKwargsItems({"image": [_item(piece) for piece in pieces]}),
        _names(pieces, tag),
        {"image": [PlaceholderRange(piece.offset, piece.length) for piece in pieces]},
    )


def for_server(pieces: Sequence[Piece], tag: str) -> dict[str, Any]:
    """Return what a request to a server has of the images of its prompt.

    Raises:
        EngineError: vLLM, which writes it, is not installed here.
    """
    if not pieces:
        return {}
    try:
        from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import (  # type: ignore[import-not-found, unused-ignore]
            encode_mm_kwargs_item,
        )
    except ImportError as error:
        raise EngineError(
            "prompts with images are written for servers of vLLM by vLLM, which cannot be imported here "
            f"({error}); install trainkit-vllm with it, or set rollout.engine to 'local'"
        ) from error
    return {
        "features": {
            "mm_hashes": _names(pieces, tag),
            "mm_placeholders": {"image": [{"offset": each.offset, "length": each.length} for each in pieces]},
            "kwargs_data": {"image": [encode_mm_kwargs_item(_item(piece)) for piece in pieces]},
        }
    }


def _names(pieces: Sequence[Piece], tag: str) -> dict[str, list[str]]:
    """Return by what vLLM finds again what it has computed of pieces with the weights ``tag``."""
    return {"image": [f"{tag}-{piece.content}" for piece in pieces]}


def _item(piece: Piece) -> Any:
    from vllm.multimodal.inputs import (
        MultiModalBatchedField,
        MultiModalFieldElem,
        MultiModalFlatField,
        MultiModalKwargsItem,
    )

    rows, sizes = MultiModalFlatField(slices=[]), MultiModalBatchedField(keep_on_cpu=True)
    return MultiModalKwargsItem(
        {
            name: MultiModalFieldElem(value, rows if name.startswith("pixel") else sizes)
            for name, value in piece.inputs.items()
        }
    )
