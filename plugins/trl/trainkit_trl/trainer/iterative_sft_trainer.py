"""Supervised fine-tuning in a loop of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainingArguments

from trainkit.data import Sequences
from trainkit.errors import ConfigError
from trainkit_migrate import refusing
from trainkit_trl.trainer.offline import checking, longest
from trainkit_trl.trainer.sft_trainer import LikelihoodTrainer


class IterativeSFTTrainer(LikelihoodTrainer):
    """Supervised fine-tuning on samples that are given to `step`, one call after another.

    Args:
        model: a model.
        args: the arguments of training; ``max_steps`` is needed for the schedule.
        tokenizer: the tokenizer.
        optimizers: an optimizer and its schedule.
        data_collator: refused.
        eval_dataset: held-out texts, or rows of token ids.
        max_length: the largest number of tokens; None: 512, or less if tokenizer or model allow less.
        truncation_mode: ``"keep_end"`` or ``"keep_start"``.
        preprocess_logits_for_metrics: refused.
        compute_metrics: refused.
        optimize_device_cache: without effect.

    Raises:
        ConfigError: a setting has no counterpart in trainkit, or ``max_steps`` is not set.
    """

    method: ClassVar[str] = "sft"
    section: ClassVar[str] = "IterativeSFTTrainer"

    @checking
    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        data_collator: Any = None,
        eval_dataset: Any = None,
        max_length: int | None = None,
        truncation_mode: str | None = "keep_end",
        preprocess_logits_for_metrics: Any = None,
        compute_metrics: Any = None,
        optimize_device_cache: bool | None = False,
    ) -> None:
        given = dict(locals())
        if args is None or args.max_steps <= 0:
            raise ConfigError("the learning rate is scheduled over args.max_steps, which is not set; set it")
        if truncation_mode not in ("keep_end", "keep_start"):
            raise ValueError(f"truncation_mode should be 'keep_end' or 'keep_start'; given {truncation_mode!r}")
        given["max_length"] = max_length or longest(model, tokenizer, 512)
        self._begin(given)
        self.tokenizer.truncation_side = "left" if truncation_mode == "keep_end" else "right"

    def samples(self, dataset: Any) -> Any:
        """Return the rows as they are."""
        return list(dataset)

    def step(
        self,
        input_ids: list[Tensor] | None = None,
        attention_mask: list[Tensor] | None = None,
        labels: list[Tensor] | None = None,
        texts: list[str] | None = None,
        texts_labels: list[str] | None = None,
    ) -> dict[str, float]:
        """Train on samples, one pass over them. Return the metrics.

        Args:
            input_ids: token ids, a tensor [T] for each sample.
            attention_mask: which of the ids are real.
            labels: the ids again, or -100 where they are not trained on; None: all are trained on. Of an
                encoder-decoder, the ids that the decoder writes.
            texts: texts in the place of token ids; of an encoder-decoder, what the encoder reads.
            texts_labels: of an encoder-decoder, what the decoder writes; of another model, the texts again.

        Raises:
            ValueError: neither or both of ids and texts are given, or lists are not of one length.
        """
        self.check_settings()
        if (input_ids is None) == (texts is None):
            raise ValueError("give either input_ids or texts")
        if texts_labels is not None and not self.trainer.text.is_encoder_decoder:
            if not isinstance(texts_labels, Sequence) or list(texts_labels) != list(texts or ()):
                raise ValueError(
                    "texts_labels of a model that is no encoder-decoder should be the texts themselves; give input_ids "
                    "and labels, to train on some of the tokens alone"
                )
            texts_labels = None
        named = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        given = {name: value for name, value in named.items() if value is not None}
        lists = {**given, "texts": texts, "texts_labels": texts_labels}
        for name, value in lists.items():
            if value is not None and (isinstance(value, str) or not isinstance(value, Sequence)):
                raise ValueError(f"{name} should be a list; given {type(value).__name__}")
        if len({len(value) for value in lists.values() if value is not None}) > 1:
            raise ValueError("input_ids, attention_mask, labels, texts and texts_labels should have one length")
        self._choose_directory()
        samples: list[Any]
        if texts is None:
            samples = [dict(zip(given, row, strict=True)) for row in zip(*given.values(), strict=True)]
            if self.trainer.model_config.is_encoder_decoder:
                return self._step_apart(samples)
        else:
            samples = list(texts) if texts_labels is None else list(zip(texts, texts_labels, strict=True))
        metrics: dict[str, float] = self.trainer.learn_from(samples)
        return metrics

    def _step_apart(self, samples: list[dict[str, Tensor]]) -> dict[str, float]:
        """Train an encoder-decoder on token ids of what it reads, and of what it writes."""
        if "labels" not in samples[0]:
            raise ValueError("input_ids is what an encoder-decoder reads; give labels too, the ids that it writes")
        masks = [sample.get("attention_mask", torch.ones_like(sample["input_ids"])).bool() for sample in samples]
        read = [sample["input_ids"][mask].tolist() for sample, mask in zip(samples, masks, strict=True)]
        written = [sample["labels"][sample["labels"] >= 0].tolist() for sample in samples]
        sequences, trainer = Sequences.from_lists(read, written), self.trainer
        metrics: dict[str, float] = trainer.learn_collection(lambda: trainer.store.push(sequences), passes=1)
        return metrics


__getattr__ = refusing(__name__)
