"""Controllers of the KL penalty, running moments, collators, and texts as rows of one length."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState
from torch.utils.data import IterableDataset
from transformers import BitsAndBytesConfig, DataCollatorForLanguageModeling, TrainerCallback

from trainkit import metrics
from trainkit.data import Completions
from trainkit.errors import DataError
from trainkit.functional import preference_accuracy
from trainkit.metrics import PerPromptStatTracker as PerPromptStatTracker
from trainkit.models import disable_dropout
from trainkit_migrate import refusing
from trainkit_migrate.shared import AdaptiveKLController as AdaptiveKLController
from trainkit_migrate.shared import FixedKLController as FixedKLController
from trainkit_trl.trainer.model_config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)
IGNORED = -100


class RunningMoments(metrics.RunningMoments):
    """Mean and standard deviation of all values so far.

    Args:
        accelerator: sums over the processes.
    """

    def __init__(self, accelerator: Any = None) -> None:
        super().__init__()
        self.accelerator = accelerator

    def update(self, xs: Tensor, reduce: Any = None) -> tuple[float, float]:  # type: ignore[override]
        """Add the values ``xs``, and return the mean and the unbiased standard deviation of these alone."""
        if reduce is None:
            reduce = (lambda t: t) if self.accelerator is None else self.accelerator.reduce
        super().update(xs, reduce)
        alone = metrics.RunningMoments()
        alone.update(xs, reduce)
        return alone.mean, alone.std


class DataCollatorForCompletionOnlyLM(DataCollatorForLanguageModeling):
    """Makes batches of tokenised texts whose labels are -100 but for what follows a template.

    `SFTTrainer` finds the template in the text, if it is text. A collator that is called finds it in the token ids.

    Args:
        response_template: text or token ids before an output.
        instruction_template: text or token ids after an output, in texts of several turns.
        *args: those of `DataCollatorForLanguageModeling`, the tokenizer first.
        mlm: must be false.
        ignore_index: the label of tokens that are not trained on.
        **kwargs: those of `DataCollatorForLanguageModeling`.
    """

    def __init__(
        self,
        response_template: str | list[int],
        instruction_template: str | list[int] | None = None,
        *args: Any,
        mlm: bool = False,
        ignore_index: int = -100,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, mlm=mlm, **kwargs)  # type: ignore[misc]
        self.response_template, self.instruction_template = response_template, instruction_template
        self.ignore_index = ignore_index
        self._completions = Completions(response_template, instruction_template, tokenizer=self.tokenizer)

    def torch_call(self, examples: list[Any]) -> dict[str, Any]:
        """Return a padded batch with ``labels`` [B, T]; warn of rows in which nothing follows the template."""
        batch: dict[str, Any] = dict(super().torch_call(examples))
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            found = self._completions.labels(ids.tolist())
            if found is None:
                text = self.tokenizer.decode(ids)
                warnings.warn(
                    f"nothing follows the response_template {self.response_template!r} in {text!r}, so nothing of it "
                    "is trained on",
                    stacklevel=2,
                )
            kept = torch.zeros_like(ids, dtype=torch.bool) if found is None else torch.tensor(found) != IGNORED
            labels[~kept | (labels == IGNORED)] = self.ignore_index
        return batch


class ConstantLengthDataset(IterableDataset[dict[str, Any]]):
    """Texts, joined by EOS and cut into rows of ``seq_length`` token ids. The last, shorter row is omitted.

    Args:
        tokenizer: the tokenizer.
        dataset: rows.
        dataset_text_field: the column with the text.
        formatting_func: returns the text of a row.
        infinite: whether the rows are repeated without end.
        seq_length: the tokens of a row.
        num_of_sequences: with ``chars_per_token``, how many characters are read at a time.
        chars_per_token: as above.
        eos_token_id: stands between texts if the tokenizer has no EOS.
        shuffle: whether the rows that are read at a time are shuffled, by random numbers of their own.
        append_concat_token: whether EOS stands between texts.
        add_special_tokens: whether the tokenizer adds its special tokens.

    Raises:
        ValueError: nothing says where the text of a row is.
    """

    def __init__(
        self,
        tokenizer: Any,
        dataset: Any,
        dataset_text_field: str | None = None,
        formatting_func: Callable[[Any], str] | None = None,
        infinite: bool = False,
        seq_length: int = 1024,
        num_of_sequences: int = 1024,
        chars_per_token: float = 3.6,
        eos_token_id: int = 0,
        shuffle: bool = True,
        append_concat_token: bool = True,
        add_special_tokens: bool = True,
    ) -> None:
        if formatting_func is None and dataset_text_field is None:
            raise ValueError("give dataset_text_field, the column with the text, or a formatting_func")
        self.tokenizer, self.dataset, self.infinite, self.seq_length = tokenizer, dataset, infinite, seq_length
        self.concat_token_id = eos_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
        self.max_buffer_size = seq_length * chars_per_token * num_of_sequences
        self.shuffle, self.append_concat_token = shuffle, append_concat_token
        self.add_special_tokens = add_special_tokens
        self.formatting_func = formatting_func or partial(_text_of, str(dataset_text_field))

    def __len__(self) -> int:
        """Return the number of texts, as TRL does; how many rows they make is known when they are read."""
        return len(self.dataset)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for ids in self._rows():
            yield {"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)}

    def _rows(self) -> Iterator[list[int]]:
        drawn, left = random.Random(0), list[int]()
        for texts in self._buffers():
            for text in texts:
                left += self.tokenizer(text, add_special_tokens=self.add_special_tokens)["input_ids"]
                left += [self.concat_token_id] * self.append_concat_token
            whole = len(left) // self.seq_length * self.seq_length
            rows = [left[at : at + self.seq_length] for at in range(0, whole, self.seq_length)]
            left = left[whole:]
            if self.shuffle:
                drawn.shuffle(rows)
            yield from rows

    def _buffers(self) -> Iterator[list[str]]:
        """Yield texts of about ``max_buffer_size`` characters."""
        while True:
            texts, size = list[str](), 0
            for row in self.dataset:
                texts.append(self.formatting_func(row))
                size += len(texts[-1])
                if size >= self.max_buffer_size:
                    yield texts
                    texts, size = [], 0
            if texts:
                yield texts
            if not self.infinite:
                return


def _text_of(column: str, row: Mapping[str, Any]) -> str:
    if column not in row:
        raise DataError(f"a row has no {column!r}, which is dataset_text_field; it has {', '.join(map(str, row))}")
    return str(row[column])


class Tokenised:
    """The rows of a `ConstantLengthDataset`, without its length, which is that of the texts."""

    def __init__(self, dataset: ConstantLengthDataset) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from self.dataset


@dataclass
class RewardDataCollatorWithPadding:
    """Makes batches of tokenised pairs; `RewardTrainer` pads by itself.

    Raises:
        ValueError: a row lacks token ids or masks.
    """

    tokenizer: Any
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        """Return ids and masks [B, T] of both sides, and ``margin`` [B] if the rows have it."""
        batch: dict[str, Any] = {"return_loss": True}
        for side in ("chosen", "rejected"):
            names = [f"input_ids_{side}", f"attention_mask_{side}"]
            if any(name not in row for row in features for name in names):
                raise ValueError("rows should have input_ids and attention_mask, each _chosen and _rejected")
            rows = [{"input_ids": row[names[0]], "attention_mask": row[names[1]]} for row in features]
            padded = self.tokenizer.pad(
                rows,
                padding=self.padding,
                max_length=self.max_length,
                pad_to_multiple_of=self.pad_to_multiple_of,
                return_tensors=self.return_tensors,
            )
            batch |= {f"{name}_{side}": padded[name] for name in ("input_ids", "attention_mask")}
        if "margin" in features[0]:
            batch["margin"] = torch.tensor([row["margin"] for row in features], dtype=torch.float)
        return batch


class RichProgressCallback(TrainerCallback):
    """Stands for TRL's display of progress: trainkit shows its own, and this has no effect."""

    def __init__(self) -> None:
        log.warning("RichProgressCallback has no effect: progress is shown and logged by train.trackers")


disable_dropout_in_model = disable_dropout


def pad_to_length(tensor: Tensor, length: int, pad_value: int | float, dim: int = -1) -> Tensor:
    """Return a tensor padded at the end of a dimension, if it is shorter than ``length`` there."""
    missing = length - tensor.size(dim)
    if missing <= 0:
        return tensor
    shape = [*tensor.shape]
    shape[dim] = missing
    return torch.cat([tensor, tensor.new_full(shape, pad_value)], dim=dim)


def compute_accuracy(eval_pred: tuple[Any, Any]) -> dict[str, float]:
    """Return the share of pairs [B, 2] whose first score is the larger one; ties count half."""
    scores = torch.as_tensor(eval_pred[0], dtype=torch.float64)
    return {"accuracy": float(preference_accuracy(scores[:, 0], scores[:, 1]).mean())}


def get_kbit_device_map() -> dict[str, int] | None:
    """Return the ``device_map`` that puts a model on the GPU of this process; None without one."""
    return {"": PartialState().local_process_index} if torch.cuda.is_available() else None


def get_quantization_config(model_config: ModelConfig) -> BitsAndBytesConfig | None:
    """Return the quantisation that a configuration asks for; None if it asks for none."""
    if model_config.load_in_4bit:
        return BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_compute_dtype=model_config.torch_dtype,
            bnb_4bit_quant_type=model_config.bnb_4bit_quant_type or "nf4",
            bnb_4bit_use_double_quant=model_config.use_bnb_nested_quant,
        )
    return BitsAndBytesConfig(load_in_8bit=True) if model_config.load_in_8bit else None


def get_peft_config(model_config: ModelConfig) -> Any:
    """Return the LoRA adapter that a configuration asks for; None if it asks for none."""
    if not model_config.use_peft:
        return None
    from peft import LoraConfig

    names = ("lora_alpha", "lora_dropout")
    return LoraConfig(
        r=model_config.lora_r or 16,
        target_modules=model_config.lora_target_modules,
        modules_to_save=model_config.lora_modules_to_save,
        task_type=model_config.lora_task_type,
        **{name: getattr(model_config, name) for name in names},
    )


__getattr__ = refusing(__name__)
