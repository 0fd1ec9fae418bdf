"""Deep models by shallow ones: blocks that are alike need alike, so the need grows by the same with each."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from trainkit.config import TRLConfig
from trainkit.models.adapters import HUB
from trainkit.models.loading import load_model, load_model_config
from trainkit.models.trunk import depth_of, find_blocks
from trainkit.models.unloaded import without_weights

LEAST = 2
"""The blocks of the smaller model: the last one is not the first, below which nothing may need a gradient."""


@dataclass(frozen=True)
class Shallow:
    """Two models with fewer blocks, which differ by one period of the blocks of the whole one."""

    less: TRLConfig[Any]
    more: TRLConfig[Any]
    periods: int
    """How many periods the whole model has more than ``less``."""

    def whole(self, less: int, more: int) -> int:
        """Return what the whole model needs of something, of which the two need ``less`` and ``more``."""
        return less + self.periods * (more - less)


def shallow(config: TRLConfig[Any]) -> Shallow | None:
    """Return models with fewer blocks, by which a model can be measured; None if its blocks differ too much."""
    model_config = load_model_config(config.model)
    depth, above = depth_of(model_config), max(config.model.num_layers_unfrozen, 0)
    if depth is None or 2 * (above + LEAST) >= depth or model_config.is_encoder_decoder:
        return None
    if model_config.get_text_config() is not model_config:
        return None
    with torch.device("meta"), without_weights():
        blocks = find_blocks(load_model(config.update({"model.num_layers_unfrozen": -1}).model))
    if blocks is None:
        return None
    kinds = list(zip(map(_kind, blocks), *_of_blocks(model_config, depth).values(), strict=True))
    for period in range(1, depth):
        for less in range(above + max(period, LEAST), (depth - period + 1) // 2):
            known = kinds[less - above - period :]  # which blocks are trained is counted from the last one
            if not (depth - less) % period and known[period:] == known[:-period]:
                few, more = (_with_blocks(config, model_config, depth, count) for count in (less, less + period))
                return Shallow(few, more, periods=(depth - less) // period)
    return None


def _kind(block: nn.Module) -> list[Any]:
    """Return what a block's need depends on: modules, shapes and types of tensors, and numbers but the block's own."""
    return [
        (
            name,
            type(module),
            [
                (key, value)
                for key, value in vars(module).items()
                if isinstance(value, int | float | str | None) and key not in ("layer_idx", "layer_id")
            ],
            [
                (key, x.shape, x.dtype)
                for key, x in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            ],
        )
        for name, module in block.named_modules()
    ]


def _of_blocks(config: PreTrainedConfig, depth: int) -> dict[str, Any]:
    """Return the fields of a model's config that have a value for each block."""
    return {key: value for key, value in vars(config).items() if isinstance(value, list) and len(value) == depth}


def _with_blocks(config: TRLConfig[Any], model_config: PreTrainedConfig, depth: int, count: int) -> TRLConfig[Any]:
    """Return the configuration with the first ``count`` blocks of the model alone."""
    changed = copy.deepcopy(model_config)
    for key, value in _of_blocks(model_config, depth).items():
        setattr(changed, key, value[:count])
    changed.num_hidden_layers = count
    fields = {**changed.to_diff_dict(), "model_type": changed.model_type}
    fields.pop("router_aux_loss_coef", None)  # changes nothing, and is refused where it is asked for
    kwargs = {key: value for key, value in config.model.kwargs.items() if key not in HUB}
    return config.model_copy(update={"model": config.model.model_copy(update={"model_path": fields, "kwargs": kwargs})})
