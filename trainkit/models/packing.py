"""The check that a model can read packed rows: several samples in one row, none of which attends to another."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainkit.data import Sequences
from trainkit.errors import ConfigError
from trainkit.models.images import reads_images
from trainkit.models.policy import hidden_states, inputs_of
from trainkit.models.prompts import equal_but_for_rounding, tolerance_for
from trainkit.models.unloaded import decided, reads_weights
from trainkit.models.virtual import virtual_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTHS = (5, 3, 4)
"""The lengths of the samples that the check packs, in tokens."""
MASKED = ("sdpa", "eager")
"""The implementations of attention with the masks of transformers: where one does not pack, the other does not."""


@torch.no_grad()
def check_packing(model: PreTrainedModel) -> None:
    """Raise a ConfigError if a packed sample does not get the hidden states that it gets alone.

    Two packed rows are compared with their samples one by one, and with the same rows after a change of the first
    sample. Such a change may alter the rounding of the later samples' states (by the routing of experts, for example),
    but by no more than a hundredth of what it alters where the samples do attend to each other, or in 16 bits a
    twentieth.

    Raises:
        ConfigError: the states differ. A recurrent model carries its state over from sample to sample, and some
            attention implementations ignore positions.
    """
    if not reads_weights():
        return
    training, vocabulary = model.training, model.config.get_text_config().vocab_size
    model.eval()
    try:
        fault = decided(lambda: _fault(model, vocabulary), bool)
    finally:
        model.train(training)
    if fault:
        attention = getattr(model.config, "_attn_implementation", None)
        other = ", or, if the model has attention only, model.kwargs.attn_implementation to 'sdpa'"
        raise ConfigError(
            f"{type(model).__name__} (attention: {attention}) cannot be trained on packed rows: {fault}. Set "
            f"method.packing to false{'' if attention in MASKED else other}"
        )


def _fault(model: PreTrainedModel, vocabulary: int) -> str:
    """Return what is wrong with the model's states of packed rows; an empty string if nothing is."""
    if model.config.is_encoder_decoder:
        return "an encoder-decoder reads prompts and outputs separately"
    if reads_images(model.config):
        return "images have positions of their own"
    if virtual_tokens(model) is not None:
        return "virtual tokens are put before a row, not before each of its samples"
    total = 2 * sum(LENGTHS)
    ids = [(7 * i * i + i) % vocabulary for i in range(total)]  # no pattern that positions could explain
    samples = _samples(ids, model)
    other = _samples([(i + 1) % vocabulary if at < LENGTHS[0] else i for at, i in enumerate(ids)], model)
    rows = [each.packed([3, 3]) for each in (samples, other)]
    try:
        packed, spoilt = (hidden_states(model, inputs_of(each)) for each in rows)
        seen, changed = (hidden_states(model, inputs_of(replace(each, segments=None))) for each in rows)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    alone = hidden_states(model, inputs_of(samples))
    apart = torch.cat([state[:length] for state, length in zip(alone, samples.lengths.tolist(), strict=True)])
    if _change(packed, spoilt) > _change(seen, changed) * max(tolerance_for(packed), 0.01):
        return "the tokens of a sample change the states of the sample after it"
    if not equal_but_for_rounding(packed.flatten(0, 1), apart):
        return "a packed sample has other states than the same sample alone"
    return ""


def _change(states: Tensor, others: Tensor) -> float:
    """Return the largest difference between two results for the first row, after its first sample."""
    return float((states - others)[0, LENGTHS[0] :].abs().max())


def _samples(ids: list[int], model: PreTrainedModel) -> Sequences:
    rows, at = [], 0
    for length in 2 * LENGTHS:
        rows.append(ids[at : at + length])
        at += length
    return Sequences.from_lists([row[:1] for row in rows], [row[1:] for row in rows]).to(model.device)
