"""The trainer of supervised fine-tuning: experience and loss."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn

from trainkit import AccelerateRLTrainer, Batch, Row, Sequences, TRLConfig, register_trainer
from trainkit.errors import ConfigError
from trainkit.functional import nll
from trainkit.metrics import Mean, Metrics
from trainkit.models import check_packing, load_model, make_policy
from trainkit_sft.config import SFTConfig
from trainkit_sft.noise import embedding_noise

B = TypeVar("B", bound=Batch)

AT_ONCE = 1000
"""Number of samples that are encoded at a time to measure their lengths."""


@register_trainer("sft")
class SFTTrainer(AccelerateRLTrainer[SFTConfig]):
    """Trainer of SFT: loss = −mean log π(y_t | prompt, y_<t) over output tokens, EOS included; prompts are context."""

    inputs: ClassVar[tuple[str, ...]] = ("samples",)

    def get_arch(self, config: TRLConfig[SFTConfig]) -> nn.Module:
        """Return the language model as a policy at temperature 1, which does not depend on the sampling temperature."""
        model = load_model(config.model, self.live_model)
        if config.method.packing:
            check_packing(model)
        for name in ("neftune_alpha", "train_on_prompts"):
            if getattr(config.method, name) and model.config.is_encoder_decoder:
                raise ConfigError(
                    f"method.{name} is for decoder-only models; {type(model).__name__} is an encoder-decoder. Remove "
                    f"method.{name}"
                )
        if config.method.neftune_alpha and config.train.padding_free:
            raise ConfigError(
                "train.padding_free is true, and the noise of method.neftune_alpha needs whole rows; remove one of them"
            )
        return make_policy(model)

    def arrange(self, rows: list[Row]) -> list[Row]:
        """Pack the samples into rows of at most ``self.limit`` tokens if packing is on; return them unchanged if not.

        Raises:
            ConfigError: packing is on, and neither `train.seq_length` nor the model limits the length of a row.
        """
        if not self.method.packing:
            return rows
        if self.limit is None:
            raise ConfigError("method.packing fills rows of train.seq_length tokens, which is not set; set it")
        parts = [self.encode_samples(rows[start : start + AT_ONCE]) for start in range(0, len(rows), AT_ONCE)]
        lengths = [length for part in parts for length in part.lengths.tolist()]
        return [{"samples": [rows[index] for index in pack]} for pack in best_fit(lengths, self.limit)]

    def make_experience(self, rows: list[Row]) -> Sequences:
        """Return the samples as token sequences [B, T], one packed row each with packing."""
        packed = "samples" in rows[0] and "turns" not in rows[0]
        samples = [sample for row in rows for sample in row["samples"]] if packed else rows
        sequences = self.encode_samples(samples)
        if self.method.train_on_prompts:
            after_first = torch.arange(sequences.input_ids.size(1), device=sequences.input_ids.device) > 0
            sequences = replace(sequences, response_mask=sequences.attention_mask & after_first)
        return sequences.packed([len(row["samples"]) for row in rows]) if packed else sequences

    def through_trunk(self, batch: B) -> B:
        """Return the batch with the output of frozen layers; unchanged with noise, which is added below them."""
        return batch if self.method.neftune_alpha else super().through_trunk(batch)

    def loss(self, batch: Sequences) -> tuple[Tensor, Metrics]:
        """Return the negative log-likelihood, a mean over output tokens. -> []."""
        with embedding_noise(self.unwrapped, self.method.neftune_alpha):
            logprobs = self.policy(batch).logprobs
        found: Metrics = {"loss/nll": Mean.of(-logprobs, batch.response_mask)}
        if self.limit is not None:
            found["rows/filled"] = Mean.of(batch.lengths / self.limit)
        return nll(logprobs, batch.response_mask), found


def best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Pack indices of ``lengths`` into bins of at most ``size``, longest first, each into the fullest bin with room.

    Best-fit decreasing needs at most 11/9 · OPT + 4 bins (Johnson et al. 1974).
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (free space, index) of each bin, sorted
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(rooms, (lengths[index], 0))
        room, into = rooms.pop(at) if at < len(rooms) else (size, len(bins))
        if into == len(bins):
            bins.append([])
        bins[into].append(index)
        insort(rooms, (room - lengths[index], into))
    return bins
