"""Reward modelling."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer_utils import PredictionOutput

from trainkit.data import Sequences, formatted
from trainkit.functional import preference_accuracy
from trainkit.metrics import Mean, Metrics
from trainkit.models import Scorer, load_model
from trainkit_migrate import refusing
from trainkit_trl.arguments import check_takes
from trainkit_trl.trainer.offline import OfflineTrainer, checking, collated, longest, selected
from trainkit_trl.trainer.utils import RewardDataCollatorWithPadding, compute_accuracy

log = logging.getLogger(__name__)
COLUMNS = ("input_ids_chosen", "attention_mask_chosen", "input_ids_rejected", "attention_mask_rejected", "margin")


class RewardTrainer(OfflineTrainer):
    """Training of a sequence classifier with one label on pairs of token ids.

    Args:
        model: an `AutoModelForSequenceClassification` with one label, or its name or directory.
        args: the arguments of training, a `RewardConfig`.
        data_collator: `RewardDataCollatorWithPadding`, without effect; another one is called with each row by itself,
            before training, and returns the columns of ``train_dataset``.
        train_dataset: rows with ``input_ids_chosen``, ``input_ids_rejected``, their masks, perhaps ``margin``.
        eval_dataset: held-out rows.
        tokenizer: the tokenizer; None: that of the model.
        model_init: refused, as are ``compute_metrics`` and ``preprocess_logits_for_metrics``.
        compute_metrics: refused.
        callbacks: objects with hooks of trainkit, or classes of such.
        optimizers: an optimizer and its schedule.
        preprocess_logits_for_metrics: refused.
        max_length: the largest number of tokens of a side; None: that of ``args``, or 512.
        peft_config: the adapter that is trained.

    Raises:
        ValueError: two lengths are given.
        ConfigError: a setting has no counterpart in trainkit; says what to write instead.
    """

    method: ClassVar[str] = "reward"
    section: ClassVar[str] = "RewardTrainer"
    names: ClassVar[Mapping[str, str]] = {"rewards/accuracies": "accuracy"}

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
        max_length: int | None = None,
        peft_config: Any = None,
    ) -> None:
        given = dict(locals())
        of_args = getattr(args, "max_length", None)
        if max_length is not None and of_args is not None:
            raise ValueError("max_length is given here and in args; give it in args alone")
        check_takes("data_collator", data_collator, "rows")
        self._calls = type(data_collator) not in (type(None), RewardDataCollatorWithPadding)
        given["data_collator"] = data_collator if self._calls else None
        self._data_collator = data_collator or RewardDataCollatorWithPadding(tokenizer)
        given["max_length"] = max_length or of_args or longest(model, tokenizer, 512)
        self._labels = int(getattr(getattr(model, "config", None), "num_labels", 1))
        if self._labels > 1:
            log.warning(
                "the model has %d labels, and the loss is a mean over them, as in TRL; as a reward function it needs "
                "num_labels=1",
                self._labels,
            )
        self.use_reward_data_collator = not self._calls
        self._begin(given)

    def changes(self) -> dict[str, Any]:
        """Return the methods that take the place of trainkit's: with several labels, those of their model and loss."""
        if self._labels == 1:
            return super().changes()
        own = {
            "get_arch": lambda trainer, config: Labels(load_model(with_heads(config.model), trainer.live_model)),
            "loss": lambda _, batch: self.own_loss(batch),
        }
        return {**own, **super().changes()}

    def own_loss(self, batch: Any) -> tuple[Tensor, Metrics]:
        """Return the loss of trainkit, of a model with several labels as TRL computes it: the mean over labels too."""
        if self._labels == 1:
            return super().own_loss(batch)
        chosen, rejected = self.trainer.policy(batch.both).split(len(batch))
        found = (chosen.mean(1), rejected.mean(1))
        return -F.logsigmoid(chosen - rejected - batch.margins.unsqueeze(1)).mean(), {
            "rewards/chosen": Mean.of(found[0]),
            "rewards/rejected": Mean.of(found[1]),
            "rewards/margins": Mean.of(found[0] - found[1]),
            "rewards/accuracies": Mean.of(preference_accuracy(*found)),
        }

    def inputs_of(self, batch: Any) -> dict[str, Any]:
        """Return ids and attention masks [B, T] of both sides, and ``margin`` [B]."""
        found: dict[str, Any] = {"return_loss": True, "margin": batch.margins}
        for side in ("chosen", "rejected"):
            sequences = getattr(batch, side)
            found[f"input_ids_{side}"] = sequences.input_ids
            found[f"attention_mask_{side}"] = sequences.attention_mask.long()
        return found

    def samples(self, dataset: Any) -> Any:
        """Return pairs of token ids with their margins."""
        needed = COLUMNS[::2][:2]
        if self._calls:
            dataset = collated(dataset, self.data_collator, COLUMNS, needed)
        return formatted(selected(dataset, COLUMNS, needed), _with_margin)

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """Return the shares of both sides [B, 2], the sides that are chosen [B], all 0, and loss and accuracy.

        Args:
            test_dataset: rows as those that are trained on.
            ignore_keys: without effect.
            metric_key_prefix: what the names of the metrics begin with.
        """
        rows, size = list(self.samples(test_dataset)), self.args.per_device_eval_batch_size
        batches = [self._predicted(rows[at : at + size]) for at in range(0, len(rows), size)]
        shares = torch.cat([found for _, found in batches])
        loss = sum(each * len(found) for each, found in batches) / len(shares)
        metrics = {"loss": loss, **compute_accuracy((shares, None))}
        named = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return PredictionOutput(shares.numpy(), np.zeros(len(shares)), named)

    @torch.no_grad()
    def _predicted(self, rows: list[Any]) -> tuple[float, Tensor]:
        with self.trainer.inference():
            batch = self.trainer.make_experience(self.trainer.read_samples(rows))
            loss, rewards = self.trainer.loss(batch)[0], self.trainer.policy(batch.both)
        return float(loss), _shares(*rewards.chunk(2)).cpu()

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False) -> Any:
        """Return the loss of a batch of pairs [], with ``return_outputs`` also the rewards [B] of both sides.

        Args:
            model: without effect: the loss is that of ``self.model``.
            inputs: ids and attention masks [B, T] of both sides, perhaps ``margin`` [B].
            return_outputs: whether the rewards are returned.
        """
        names = [name for name in COLUMNS if name in inputs]
        inputs = {name: value.reshape(len(value)) if name == "margin" else value for name, value in inputs.items()}
        rows = [dict(zip(names, row, strict=True)) for row in zip(*(inputs[name] for name in names), strict=True)]
        batch = self.trainer.make_experience(self.trainer.read_samples(rows))
        loss, metrics = self.own_loss(batch)
        self.store_metrics({name: metric.compute() for name, metric in metrics.items()})
        if not return_outputs:
            return loss
        chosen, rejected = self.trainer.policy(batch.both).chunk(2)
        return loss, {"rewards_chosen": chosen, "rewards_rejected": rejected}

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the loss of a batch of pairs [], the shares of both sides [B, 2], and the side that is chosen [B], 0.

        The shares are the softmax of the two rewards. With ``prediction_loss_only`` both are None.

        Args:
            model: without effect, as in `compute_loss`.
            inputs: those of `compute_loss`.
            prediction_loss_only: whether only the loss is returned.
            ignore_keys: without effect.
        """
        with torch.no_grad():
            loss, rewards = self.compute_loss(model, inputs, return_outputs=True)
        if prediction_loss_only:
            return loss, None, None
        shares = _shares(*rewards.values())
        return loss, shares, torch.zeros(len(shares))


class Labels(Scorer):
    """A classifier with several labels, which a scorer may not have: ``labels(sequences) -> [B, L]``."""

    has_trunk = False

    def __init__(self, model: Any) -> None:
        torch.nn.Module.__init__(self)
        self.model, self.head, self.reads_last, self.needs_mask = model, None, False, True

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the whole model."""
        return torch.nn.Module.train(self, mode)

    def forward(self, sequences: Sequences) -> Tensor:
        """Return the logits, in float32. -> [B, L]."""
        real = sequences.attention_mask
        ids = sequences.input_ids.masked_fill(~real, self.model.config.pad_token_id or 0)
        found: Tensor = self.model(input_ids=ids, attention_mask=real.long()).logits.float()
        return found


def with_heads(config: Any) -> Any:
    """Return the section ``model`` with the head among what is trained besides an adapter."""
    if config.peft_config is None:
        return config
    return config.model_copy(update={"peft_config": {"modules_to_save": ["score", "classifier"], **config.peft_config}})


def _shares(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return the softmax of the rewards of both sides, of several labels their means. [B] or [B, L] ×2 -> [B, 2]."""
    rewards = torch.stack([chosen, rejected], dim=1)
    return (rewards.mean(2) if rewards.dim() > 2 else rewards).softmax(1)


def _with_margin(row: Any) -> Any:
    """Return a row whose margin is a number, also if it was a list of one."""
    margin = row.get("margin")
    return {**row, "margin": margin[0]} if isinstance(margin, list) and len(margin) == 1 else row


__getattr__ = refusing(__name__)
