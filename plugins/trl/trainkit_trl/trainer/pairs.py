"""What the trainers of TRL that learn from pairs have in common."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from trainkit import Preferences, Sequences
from trainkit.functional import masked_sum, token_logprobs
from trainkit_trl.trainer.offline import OfflineTrainer, count, longest, selected, single
from trainkit_trl.trainer.utils import pad_to_length

log = logging.getLogger(__name__)
COLUMNS = ("prompt", "chosen", "rejected")
NAMES = {"loss/nll": "nll_loss", "odds/log_ratio": "log_odds_chosen"}
"""The names of TRL for metrics of trainkit."""


class PairTrainer(OfflineTrainer):
    """A trainer on rows with ``prompt``, ``chosen`` and ``rejected``."""

    label_pad_token_id = -100

    def get_batch_loss_metrics(
        self, model: Any, batch: dict[str, Any], train_eval: Literal["train", "eval"] = "train"
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss [] of a batch, and its metrics by TRL's names.

        Args:
            model: computes log π.
            batch: ids, attention masks and labels of both sides.
            train_eval: with ``"eval"``, the names of metrics begin with ``eval_``.
        """
        raise NotImplementedError

    def _adapted(self, model: Any, given: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the model with its adapter merged into its weights, and the arguments."""
        log.warning("the adapter of the model is merged into its weights, and peft_config adds a new one")
        merged = model.merge_and_unload()
        merged._hf_peft_config_loaded = False  # transformers would take the adapter for one that is still there
        return merged, dict(given)

    def samples(self, dataset: Any) -> Any:
        """Return the pairs without other columns."""
        return selected(dataset, COLUMNS, needed=COLUMNS)

    def get_train_dataloader(self) -> Iterator[dict[str, Tensor]]:
        """Yield the pairs in the order of the dataset, in batches of ``per_device_train_batch_size`` by TRL's names."""
        rows, size = list(self.trainer.pipeline.rows), self.args.per_device_train_batch_size
        for start in range(0, len(rows), size):
            pairs = self.trainer.encode_preferences(rows[start : start + size])
            batch = {}
            for side in COLUMNS[1:]:
                sequences = getattr(pairs, side)
                labels = sequences.input_ids.masked_fill(~sequences.response_mask, self.label_pad_token_id)
                batch[f"{side}_input_ids"], batch[f"{side}_labels"] = sequences.input_ids, labels
                batch[f"{side}_attention_mask"] = sequences.attention_mask.long()
            yield batch

    @staticmethod
    def concatenated_inputs(
        batch: dict[str, Any],
        is_encoder_decoder: bool = False,  # noqa: ARG004  (of TRL's signature)
        label_pad_token_id: int = -100,
        padding_value: int = 0,
        device: torch.device | None = None,
    ) -> dict[str, Tensor]:
        """Return the chosen and then the rejected sides as one batch [2B, T], named ``concatenated_*``.

        Args:
            batch: ids, attention masks and labels of both sides.
            is_encoder_decoder: without effect.
            label_pad_token_id: fills up labels.
            padding_value: fills up ids.
            device: where the tensors are put; None: where they are.
        """
        fills = {"input_ids": padding_value, "attention_mask": 0, "labels": label_pad_token_id}
        found = {}
        for name, fill in fills.items():
            sides = [batch[f"{side}_{name}"] for side in COLUMNS[1:] if f"{side}_{name}" in batch]
            if sides:
                width = max(side.shape[1] for side in sides)
                found[f"concatenated_{name}"] = torch.cat([pad_to_length(x, width, fill) for x in sides]).to(device)
        return found

    @staticmethod
    def get_batch_logps(
        logits: Tensor,
        labels: Tensor,
        average_log_prob: bool = False,
        label_pad_token_id: int = -100,
        is_encoder_decoder: bool = False,
    ) -> Tensor:
        """Return the sum, or the mean, of the log-probabilities of the labels. [B, T, V], [B, T] -> [B].

        Args:
            logits: [B, T, V]; those of a decoder-only model are of the next token.
            labels: [B, T].
            average_log_prob: whether it is the mean.
            label_pad_token_id: the label of tokens that do not count.
            is_encoder_decoder: whether logits and labels are at the same places.
        """
        if not is_encoder_decoder:
            logits, labels = logits[:, :-1], labels[:, 1:]
        mask = labels != label_pad_token_id
        picked = token_logprobs(logits.flatten(0, 1), labels.masked_fill(~mask, 0).flatten()).view_as(labels)
        sums = masked_sum(picked, mask, dim=1)
        return sums / mask.sum(1) if average_log_prob else sums

    def evaluation_loop(
        self,
        dataloader: Iterable[dict[str, Tensor]],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Return the metrics of `get_batch_loss_metrics` over batches, as means over their pairs.

        Args:
            dataloader: batches as those of `get_train_dataloader`.
            description: without effect.
            prediction_loss_only: without effect: only metrics are returned.
            ignore_keys: without effect.
            metric_key_prefix: what the names of metrics begin with.
        """
        sums, pairs = dict[str, float](), 0
        for batch in dataloader:
            with torch.no_grad():
                loss, metrics = self.get_batch_loss_metrics(self.model, batch)
            rows = len(batch["chosen_input_ids"])
            pairs += rows
            for name, value in {"loss": loss, **metrics}.items():
                sums[name] = sums.get(name, 0.0) + rows * float(value)
        means = {f"{metric_key_prefix}_{name}": total / pairs for name, total in sums.items()}
        return EvalLoopOutput(predictions=None, label_ids=None, metrics=means, num_samples=pairs)  # type: ignore[arg-type]


class ReferenceFreeTrainer(PairTrainer):
    """A trainer on pairs whose loss reads the policy alone.

    Args:
        model: a model, or its name or directory.
        args: the arguments of training, with those of the loss.
        data_collator: refused.
        train_dataset: rows with ``prompt``, ``chosen`` and ``rejected``.
        eval_dataset: held-out rows.
        tokenizer: the tokenizer; None: that of the model.
        model_init: refused, as are ``callbacks``, ``preprocess_logits_for_metrics`` and ``compute_metrics``.
        callbacks: refused.
        optimizers: an optimizer and its schedule.
        preprocess_logits_for_metrics: refused.
        peft_config: the adapter that is trained.
        compute_metrics: refused.

    Raises:
        ConfigError: a setting has no counterpart in trainkit; says what to write instead.
    """

    def __init__(
        self,
        model: Any = None,
        args: TrainingArguments | None = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        model_init: Any = None,
        callbacks: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Any = None,
        peft_config: Any = None,
        compute_metrics: Any = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if value is not None or name in ("args", "tokenizer")}
        if getattr(args, "disable_dropout", True) and getattr(peft_config, "lora_dropout", None):
            given["peft_config"] = without_dropout(peft_config)
        rows = None if train_dataset is None else count(train_dataset)
        train, held_out = (
            None if each is None else self.samples(each) for each in (train_dataset, single(eval_dataset))
        )
        room = getattr(args, "max_length", None) or longest(model, tokenizer, 512)
        self._begin(given, train, held_out, rows=rows, changes={"train": {"seq_length": room}})
        self.beta = self.trainer.method.beta

    def get_batch_loss_metrics(
        self, model: Any, batch: dict[str, Any], train_eval: Literal["train", "eval"] = "train"
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss [] of a batch, and its metrics by TRL's names.

        Args:
            model: without effect: log π is that of ``self.model``.
            batch: ids, attention masks and labels of both sides.
            train_eval: with ``"eval"``, the names of metrics begin with ``eval_``.
        """
        both = self.concatenated_inputs(batch, label_pad_token_id=self.label_pad_token_id)
        parts = zip(*(both[f"concatenated_{name}"].chunk(2) for name in ("input_ids", "attention_mask", "labels")),
                    strict=True)  # fmt: skip
        sides = [Sequences(ids, real.bool(), labels != self.label_pad_token_id) for ids, real, labels in parts]
        loss, metrics = self.trainer.loss(Preferences(*sides))
        prefix = "eval_" * (train_eval == "eval")
        named = {NAMES.get(name, name): torch.tensor(metric.compute()) for name, metric in metrics.items()}
        return loss, {f"{prefix}{name}": value for name, value in named.items()}

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False) -> Any:
        """Return the loss of a batch of pairs [], with ``return_outputs`` also its metrics by TRL's names.

        Args:
            model: without effect: log π is that of ``self.model``.
            inputs: ids, attention masks and labels of both sides.
            return_outputs: whether the metrics are returned.
        """
        loss, metrics = self.get_batch_loss_metrics(model, inputs)
        return (loss, metrics) if return_outputs else loss


def without_dropout(peft_config: Any) -> Any:
    """Return an adapter's configuration without dropout, which TRL switches off in adapters, too."""
    log.warning("lora_dropout is %s, and disable_dropout switches it off, as in TRL", peft_config.lora_dropout)
    found = copy.deepcopy(peft_config)
    found.lora_dropout = 0.0
    return found
