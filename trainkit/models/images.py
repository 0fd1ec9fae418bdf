"""Images as inputs of models: pixel values, and the positions or types of the tokens that stand for them."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

from trainkit.data.batches import Images


def reads_images(config: PreTrainedConfig) -> bool:
    """Return whether the config is of a causal language model in which tokens stand for images."""
    token, known = image_token(config), type(config) in AutoModelForImageTextToText._model_mapping
    return known and not config.is_encoder_decoder and token is not None and token < config.get_text_config().vocab_size


def image_token(config: PreTrainedConfig) -> int | None:
    """Return the id of the token that stands for a part of an image; None if there is none."""
    token: int | None = getattr(config, "image_token_id", None)
    return token


def readers_of_images(module: nn.Module) -> list[tuple[PreTrainedModel, list[nn.Module]]]:
    """Return the models within a module that read images, each with its modules that read no text."""
    found = []
    for network in module.modules():
        if isinstance(network, PreTrainedModel) and network.base_model is not network and reads_images(network.config):
            base: Any = network.base_model
            decoder = base.get_decoder()
            found.append((network, [each for each in base.children() if each is not decoder]))
    return found


def image_inputs(model: PreTrainedModel, ids: Tensor, mask: Tensor, images: Images | None) -> dict[str, Tensor]:
    """Return what a model reads besides the token ids [B, T], their mask and positions; empty without images.

    Positions are among it if they have several axes: the model makes them of ids and sizes, also for padded rows.
    """
    inputs = {} if images is None else images.inputs
    if not inputs:
        return {}
    token: Any = image_token(model.config)
    types: Tensor = (ids == token).long()
    base: Any = model.base_model
    if hasattr(base, "get_rope_index"):
        sizes = inputs.get("image_grid_thw")
        positions, _ = base.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=sizes, attention_mask=mask)
        return {**inputs, "position_ids": positions}
    named = inspect.signature(base.forward).parameters
    return {**inputs, "token_type_ids": types} if "token_type_ids" in named else inputs
