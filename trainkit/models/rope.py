"""Rotary positions whose frequencies depend on the longest row of a batch: made those of one length, for all rows."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

log = logging.getLogger(__name__)


def fix_rope(model: nn.Module, limit: int, setting: str = "train.seq_length") -> None:
    """Give every row the rotary frequencies of a row of ``limit`` tokens, whatever the lengths of its neighbours.

    transformers chooses the frequencies of the kinds ``longrope`` and ``dynamic`` by the longest row of each batch.

    Args:
        model: the model, which is changed in place. Its config is not, so that an export is loaded as usual.
        limit: the largest number of tokens of a row.
        setting: what sets the limit, for the warning that these frequencies are not those of short rows.
    """
    changed = list[str]()
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer, kind in by_layer.items():
            if isinstance(kind, str) and (kind == "longrope" or "dynamic" in kind) and _fix(module, layer, kind, limit):
                changed.append(kind)
    if changed:
        log.warning(
            "%s: the rotary positions (%s) of all rows are those of a row of %d tokens, the largest number that may "
            "occur; with a smaller %s they can be those of short rows",
            type(model).__name__,
            " and ".join(sorted(set(changed))),
            limit,
            setting,
        )


@torch.no_grad()
def _fix(module: Any, layer: str | None, kind: str, limit: int) -> bool:
    """Set the frequencies so that what transformers chooses among is the same; return whether they change."""
    prefix, chosen = ("", {}) if layer is None else (f"{layer}_", {"layer_type": layer})
    usual_frequencies = getattr(module, f"{prefix}inv_freq")
    device, dtype = usual_frequencies.device, usual_frequencies.dtype
    held = torch.device("cpu") if device.type == "meta" else device  # of one that gets its weights later
    fixed, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, torch.device("cpu"), seq_len=limit, **chosen)
    usual, _ = ROPE_INIT_FUNCTIONS[kind](module.config, torch.device("cpu"), seq_len=1, **chosen)
    frequencies = fixed.to(device, dtype)
    setattr(module, f"{prefix}inv_freq", frequencies)
    setattr(module, f"{prefix}original_inv_freq", frequencies.clone())
    if kind == "longrope":
        setattr(module, f"{prefix}long_inv_freq", fixed.to(held, dtype))  # no buffer
    else:
        setattr(module, f"{prefix}attention_scaling", scaling)
        setattr(module, f"{prefix}max_seq_len_cached", max(limit, module.original_max_seq_len))
        module.original_max_seq_len = 0  # below it, transformers would return to the frequencies of short rows
    return not torch.equal(fixed, usual)
