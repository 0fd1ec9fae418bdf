"""Supervised fine-tuning."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import Any, ClassVar

from torch import Tensor
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase, TrainingArguments

from trainkit.data import Completions, Sequences, encode_sample, formatted, is_stream, sample_rows
from trainkit.errors import ConfigError, DataError
from trainkit_migrate import refusing
from trainkit_trl.arguments import check_takes
from trainkit_trl.extras.dataset_formatting import conversations_formatting_function, instructions_formatting_function
from trainkit_trl.trainer.calling import named_sequences
from trainkit_trl.trainer.offline import (
    OfflineTrainer,
    checking,
    collated,
    columns,
    count,
    longest,
    selected,
    tokenizer_of,
)
from trainkit_trl.trainer.utils import ConstantLengthDataset, DataCollatorForCompletionOnlyLM, Tokenised

log = logging.getLogger(__name__)
TOKENS = ("input_ids", "attention_mask", "labels")
COMPLETION = ("prompt", "completion")
COLLATORS = (type(None), DataCollatorForCompletionOnlyLM, DataCollatorForLanguageModeling)
"""The collators that are not called, because trainkit makes the same batches."""
DATASET = ("add_special_tokens", "append_concat_token", "skip_prepare_dataset")


class LikelihoodTrainer(OfflineTrainer):
    """A trainer whose loss is that of the model itself."""

    def inputs_of(self, batch: Sequences) -> dict[str, Tensor]:
        """Return ids, attention mask and labels [B, T]; the labels of an encoder-decoder are the outputs [B, R]."""
        return named_sequences(batch, apart=self.trainer.model_config.is_encoder_decoder)

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False) -> Any:
        """Return the negative log-likelihood [], a mean over tokens, with ``return_outputs`` also the model's outputs.

        Args:
            model: the model.
            inputs: those of its ``forward``, with ``labels`` [B, T], which are -100 where nothing is trained on.
            return_outputs: whether the outputs are returned.
        """
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class SFTTrainer(LikelihoodTrainer):
    """Supervised fine-tuning on texts, on what `formatting_func` makes of rows, or on token ids.

    Args:
        model: a model, or its name or directory.
        args: the arguments of training.
        data_collator: `DataCollatorForCompletionOnlyLM`, to train on what follows a template alone; another one is
            called with each row by itself, before training, and returns its ``input_ids`` and ``labels``.
        train_dataset: rows with ``dataset_text_field``, with ``messages``, or with ``input_ids`` and perhaps
            ``labels``; a `ConstantLengthDataset`.
        eval_dataset: held-out rows.
        tokenizer: the tokenizer; None: that of the model.
        model_init: refused, as are ``compute_metrics`` and ``preprocess_logits_for_metrics``.
        compute_metrics: refused.
        callbacks: objects with hooks of trainkit, or classes of such.
        optimizers: an optimizer and its schedule.
        preprocess_logits_for_metrics: refused.
        peft_config: the adapter that is trained.
        dataset_text_field: the column with the text.
        packing: whether several samples make a row.
        formatting_func: returns the texts of a batch of rows, or the text of a row with ``packing``.
        max_seq_length: the largest number of tokens; None: 1024, or less if tokenizer or model allow less.
        infinite: without effect.
        num_of_sequences: without effect.
        chars_per_token: without effect.
        dataset_num_proc: without effect.
        dataset_batch_size: rows of a call of ``formatting_func``.
        neftune_noise_alpha: α of NEFTune.
        model_init_kwargs: arguments of `from_pretrained`.
        dataset_kwargs: ``add_special_tokens``, whether texts get those of the tokenizer; ``append_concat_token``,
            whether EOS stands between packed texts; ``skip_prepare_dataset``, whether rows are token ids already.
        eval_packing: ``packing`` of the held-out samples; None: the same.

    Raises:
        ValueError: nothing says where the text of a row is, or ``formatting_func`` returns no list.
        ConfigError: a setting has no counterpart in trainkit; says what to write instead.
    """

    method: ClassVar[str] = "sft"
    section: ClassVar[str] = "SFTTrainer"

    @checking
    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        model_init: Any = None,
        compute_metrics: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Any = None,
        peft_config: Any = None,
        dataset_text_field: str | None = None,
        packing: bool | None = False,
        formatting_func: Callable[[Any], Any] | None = None,
        max_seq_length: int | None = None,
        infinite: bool | None = None,
        num_of_sequences: int | None = 1024,
        chars_per_token: float | None = 3.6,
        dataset_num_proc: int | None = None,
        dataset_batch_size: int = 1000,
        neftune_noise_alpha: float | None = None,
        model_init_kwargs: dict[str, Any] | None = None,
        dataset_kwargs: dict[str, Any] | None = None,
        eval_packing: bool | None = None,
    ) -> None:
        given = dict(locals())
        if (packing or eval_packing) and isinstance(data_collator, DataCollatorForCompletionOnlyLM):
            raise ValueError(
                "a DataCollatorForCompletionOnlyLM needs samples one by one; set packing=False, leave out eval_packing"
            )
        if model is not None and tokenizer is None:
            given["tokenizer"] = tokenizer = tokenizer_of(model)
        if isinstance(train_dataset, ConstantLengthDataset):  # its rows are packed already
            given["packing"] = False
            if packing:  # as in TRL
                train_dataset.infinite = args is not None and args.max_steps > 0
        self._data_collator, self.packing = data_collator, bool(packing)
        self.eval_packing = self.packing if eval_packing is None else eval_packing
        self.dataset_text_field, self.formatting_func = dataset_text_field, formatting_func
        self.dataset_batch_size, self.tokenizer = dataset_batch_size, tokenizer
        self.dataset_kwargs, self._told = dataset_kwargs or {}, False
        if unknown := sorted(self.dataset_kwargs.keys() - DATASET):
            raise ConfigError(f"dataset_kwargs has {', '.join(unknown)}; it may have {', '.join(DATASET)}")
        self.max_seq_length = max_seq_length or longest(model, tokenizer, 1024)
        check_takes("data_collator", data_collator, "rows")
        if getattr(data_collator, "mlm", False):
            raise ConfigError("data_collator masks tokens, and the model learns the next one; give it mlm=False")
        self._calls = type(data_collator) not in COLLATORS
        if self._calls and (self.packing or self.eval_packing):
            raise ConfigError(
                "data_collator is one of your own, which packed rows are not given to; set packing=False, and leave "
                "out eval_packing"
            )
        given["data_collator"] = data_collator if self._calls else None
        given["max_seq_length"] = self.max_seq_length
        given = {name: value for name, value in given.items() if value is not None or name in ("args", "tokenizer")}
        given.setdefault("packing", False)
        self._begin(given)

    def count(self, dataset: Any, samples: Any) -> int | None:
        """Return how many rows are trained on; None if trainkit packs them."""
        if isinstance(dataset, ConstantLengthDataset):
            return count(samples)
        return None if self.packing else count(dataset)

    def samples(self, dataset: Any) -> Any:
        """Return texts, samples of which only completions are trained on, or rows of token ids."""
        return self._samples(dataset, self.packing)

    def held_out(self, dataset: Any) -> Any:
        """Return the same of held-out samples, whose packing is ``eval_packing``.

        They are measured one by one, which gives the loss that they have when packed; a sample that is too long becomes
        several with packing, and is truncated without.
        """
        return self._samples(dataset, self.eval_packing)

    def _samples(self, dataset: Any, packing: bool) -> Any:
        collator = self.data_collator
        exact = self.dataset_kwargs.get("add_special_tokens") is False or (
            packing and self.dataset_kwargs.get("append_concat_token") is False
        )
        if self._calls:
            return collated(self._inputs(dataset), collator, TOKENS, needed=("input_ids", "labels"))
        found = self._texts(dataset, packing)
        if exact and isinstance(collator, DataCollatorForCompletionOnlyLM):
            raise ConfigError("dataset_kwargs chooses special tokens for whole texts alone; leave out data_collator")
        plain = not isinstance(dataset, ConstantLengthDataset) and "input_ids" not in columns(found)
        if plain and exact:
            found = formatted(found, partial(self._tokenised, packing=packing))
        elif plain and not packing and not self._told:
            self._told = True
            log.warning(
                "EOS is added to the end of each text and trained on, where TRL adds none; give rows with input_ids, "
                "or dataset_kwargs={'add_special_tokens': False}, to train on texts without it"
            )
        if packing and not isinstance(dataset, ConstantLengthDataset):
            pieces = Pieces(found, self.tokenizer, self.max_seq_length)
            return pieces if is_stream(found) else list(pieces)
        if not isinstance(collator, DataCollatorForCompletionOnlyLM):
            return found
        made = Completions(collator.response_template, collator.instruction_template, tokenizer=collator.tokenizer)
        return formatted(found, made) if is_stream(found) else list(_with_completions(found, made))

    def _inputs(self, dataset: Any) -> Any:
        """Return what TRL gives a collator: rows of token ids of at most ``max_seq_length``."""
        if isinstance(dataset, ConstantLengthDataset) or self.dataset_kwargs.get("skip_prepare_dataset"):
            return dataset
        found = self._texts(dataset, packing=False)
        if self.tokenizer.pad_token is None:  # as in TRL
            self.tokenizer.pad_token = self.tokenizer.eos_token
        if "input_ids" in columns(found):
            return found
        special = self.dataset_kwargs.get("add_special_tokens", True)
        length = {"truncation": True, "max_length": self.max_seq_length}
        return formatted(found, lambda text: dict(self.tokenizer(text, add_special_tokens=special, **length)))

    def _texts(self, dataset: Any, packing: bool) -> Any:
        field, function = self.dataset_text_field, self.formatting_func
        if isinstance(dataset, ConstantLengthDataset):
            return Tokenised(dataset) if dataset.infinite else list(dataset)
        named = columns(dataset)
        if self.dataset_kwargs.get("skip_prepare_dataset"):
            return selected(dataset, TOKENS, needed=TOKENS[:1])
        if field is None and function is None:
            if "input_ids" in named:
                return selected(dataset, TOKENS)
            if {"messages", "conversations"} & {*named} or {*COMPLETION} <= {*named}:
                return formatted(dataset, self._chat)
            raise ValueError("give dataset_text_field, the column with the text, or a formatting_func")
        if field is not None:
            if named and field not in named:
                raise ValueError(
                    f"dataset_text_field is {field!r}; the dataset has {', '.join(named)}: give one of them"
                )
            return formatted(dataset, lambda row: row[field])
        assert function is not None
        if packing:
            return formatted(dataset, function)
        if is_stream(dataset):
            return formatted(dataset, lambda row: _listed(function({name: [row[name]] for name in row}))[0])
        return list(
            chain.from_iterable(_listed(function(batch)) for batch in _batches(dataset, self.dataset_batch_size))
        )

    def _tokenised(self, text: str, *, packing: bool) -> dict[str, list[int]]:
        """Return a text as token ids with the special tokens that ``dataset_kwargs`` chooses, and no others."""
        special = self.dataset_kwargs.get("add_special_tokens", True)
        ids = list(self.tokenizer(text, add_special_tokens=special)["input_ids"])
        between = packing and self.dataset_kwargs.get("append_concat_token", True)
        return {"input_ids": [*ids, self.tokenizer.eos_token_id] if between else ids}

    def _chat(self, row: Any) -> str:
        """Return a conversation as the text that the chat template makes of it, all of which is trained on."""
        field = next((name for name in ("messages", "conversations") if row.get(name)), None)
        made = conversations_formatting_function(self.tokenizer, field) if field else None  # type: ignore[arg-type]
        return str((made or instructions_formatting_function(self.tokenizer))(row))


class Pieces:
    """Samples as rows of at most ``size`` token ids: a longer one becomes several, and every token is trained once.

    A row begins with the last token of the one before, because nothing precedes its first token.
    """

    def __init__(self, samples: Any, tokenizer: Any, size: int) -> None:
        self.samples, self.tokenizer, self.size = samples, tokenizer, size

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of a stream that shuffles."""
        if hasattr(self.samples, "set_epoch"):
            self.samples.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        for index, sample in enumerate(self.samples):
            (row,) = sample_rows([sample], None, self.tokenizer, first=index)
            ids, outputs = encode_sample(self.tokenizer, row, None, f"sample {index}")
            labels = [token if trained else -100 for token, trained in zip(ids, outputs, strict=True)]
            for start in range(0, max(len(ids) - 1, 1), self.size - 1):
                part = slice(start, start + self.size)
                if any(outputs[start + 1 : start + self.size]):
                    yield {"input_ids": ids[part], "labels": [-100, *labels[part][1:]]}


def _listed(texts: Any) -> list[str]:
    if not isinstance(texts, list):
        raise ValueError("formatting_func gets a batch of rows, and should return the list of their texts")
    return texts


def _batches(dataset: Any, size: int) -> Iterator[dict[str, list[Any]]]:
    for start in range(0, len(dataset), size):
        rows = [dataset[index] for index in range(start, min(start + size, len(dataset)))]
        yield {name: [row[name] for row in rows] for name in rows[0]}


def _with_completions(rows: Any, made: Completions) -> Iterator[Any]:
    """Yield the samples in which something follows the template; tell how many are skipped.

    Raises:
        DataError: all are skipped.
    """
    without, index = [], -1
    for index, row in enumerate(rows):
        try:
            yield made(row)
        except DataError:
            without.append(index)
    if without and len(without) == index + 1:
        raise DataError(
            f"nothing follows the response_template {made.response_template!r} in any of the {len(without)} samples, "
            "so nothing would be trained; give one that is in them"
        )
    if without:
        log.warning(
            "%d samples are skipped, since nothing follows the response_template %r in them: %s%s",
            len(without),
            made.response_template,
            ", ".join(map(str, without[:20])),
            ", ..." if len(without) > 20 else "",
        )


__getattr__ = refusing(__name__)
