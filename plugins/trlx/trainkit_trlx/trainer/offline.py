"""Trainers that learn from samples."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from trainkit import Sequences
from trainkit.errors import ConfigError, DataError, describe
from trainkit_trlx.pipeline.offline_pipeline import IGNORED, batches_of
from trainkit_trlx.trainer.bridge import Bridge
from trainkit_trlx.trainer.computed import Computed

TOKEN_REWARDS = "token_rewards"
"""The column with the rewards of the tokens of a sample that are trained on."""


class Samples(Bridge):
    """What trainers of trainkit that learn from samples do."""

    def from_trlx(self, batch: Any) -> Sequences:
        """Return a batch with ``input_ids``, ``attention_mask`` and ``labels`` [B, T] as sequences."""
        ids, real = batch["input_ids"], batch["attention_mask"].bool()
        labels = batch.get("labels", ids)
        rows = [row[keep].tolist() for row, keep in zip(ids, real, strict=True)]
        chosen = [(label[keep] != IGNORED).tolist() for label, keep in zip(labels, real, strict=True)]
        return Sequences.from_rows(rows, [[False, *mask[1:]] for mask in chosen])

    def rows_of(self, batch: Any) -> list[dict[str, Any]]:
        """Return what is trained on as tokenised samples."""
        real = zip(batch.input_ids, batch.attention_mask, batch.response_mask, strict=True)
        return [
            {"input_ids": ids[keep].tolist(), "labels": ids.masked_fill(~chosen, IGNORED)[keep].tolist()}
            for ids, keep, chosen in real
        ]


class Offline(Computed):
    """A trainer that learns from samples. ``store`` holds them as token ids; it is made when it is first read."""

    def set_samples(self, samples: Any, rewards: Any, max_length: int | None) -> None:
        """Set the samples to train on.

        Raises:
            DataError: they are no list, or cannot be used.
            ConfigError: ``max_length`` is no number of tokens.
        """
        if isinstance(samples, str) or not isinstance(samples, Iterable):
            raise DataError(f"samples should be a list of strings or dialogues; given {describe(samples)}")
        if max_length is not None and (not isinstance(max_length, int) or max_length < 1):
            raise ConfigError(f"the longest sample should be a number of tokens; given {describe(max_length)}")
        given = [self._turns(sample, rewards is not None) for sample in samples]
        self._kept: Any = None
        self._make_store = partial(self.new_store, given, rewards, max_length)
        self._replayed["samples"] = partial(self._add, given, rewards, max_length)
        self._add(given, rewards, max_length)

    def _add(self, samples: Any, rewards: Any, max_length: int | None) -> None:
        text = self.trainer.text
        if max_length is not None:
            text.limit = max_length if text.limit is None else min(text.limit, max_length)
        self.trainer.add_samples(samples, rewards)

    def _turns(self, sample: Any, rewarded: bool) -> Any:
        """Return a sample as trainkit takes it: with rewards, a single string follows the beginning token."""
        if isinstance(sample, str):
            start = self.tokenizer.bos_token or self.tokenizer.eos_token
            return (start, sample) if rewarded else sample
        return tuple(sample) if isinstance(sample, Iterable) and not hasattr(sample, "keys") else sample

    def new_store(self, samples: list[Any], rewards: Any, max_length: int | None) -> Any:
        """Return a store of samples."""
        raise NotImplementedError

    def _refuse_apart(self) -> None:
        if self.trainer.model_config.is_encoder_decoder:
            raise ConfigError(
                "samples of an encoder-decoder are not kept as token ids; override make_experience, to give that of "
                "trlX other texts and rewards, and leave store alone"
            )

    @property
    def store(self) -> Any:
        """The samples as token ids. They are trained on as they are there, once it has been read or set."""
        if getattr(self, "_kept", None) is None and hasattr(self, "_make_store"):
            self._refuse_apart()
            self._kept = self._make_store()
        return getattr(self, "_kept", None)

    @store.setter
    def store(self, store: Any) -> None:
        self._kept = store

    def take_store(self) -> None:
        """Train on the samples of the store, if it has been read or set."""
        store = getattr(self, "_kept", None)
        if store is None:
            return
        self._refuse_apart()
        batches = batches_of(store, self.config.train.batch_size, self.fields)
        rows = [row for batch in batches for row in self.trainer.rows_of(self.trainer.from_trlx(batch))]
        rewards = [sum(row[TOKEN_REWARDS]) for row in rows] if "rewards" in self.trainer.inputs else None
        self.trainer.add_samples(rows, rewards)
