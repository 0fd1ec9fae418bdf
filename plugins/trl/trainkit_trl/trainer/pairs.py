"""What the trainers of TRL that learn from pairs have in common."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from trainkit import Preferences, Sequences
from trainkit.errors import ConfigError
from trainkit.functional import masked_sum, preference_accuracy, token_logprobs
from trainkit.metrics import Mean, Metrics
from trainkit.models import TokenOutputs
from trainkit_trl.trainer.calling import NOT_CALLED, OF_PAIRS, named_sequences
from trainkit_trl.trainer.offline import OfflineTrainer, checking, longest, selected
from trainkit_trl.trainer.utils import pad_to_length

log = logging.getLogger(__name__)
COLUMNS = ("prompt", "chosen", "rejected")


class PairTrainer(OfflineTrainer):
    """A trainer on rows with ``prompt``, ``chosen`` and ``rejected``."""

    not_called: ClassVar[Mapping[str, str]] = {**NOT_CALLED, **OF_PAIRS}
    of_loss: ClassVar[tuple[str, ...]] = (
        "compute_loss", "prediction_step", "get_batch_loss_metrics", "get_batch_metrics", "concatenated_forward",
        "concatenated_inputs", "get_batch_logps", "_get_batch_logps", "store_metrics",
    )  # fmt: skip
    label_pad_token_id = -100
    truncated: ClassVar[str] = "within"

    def inputs_of(self, batch: Preferences) -> dict[str, Tensor]:
        """Return ids, attention masks and labels [B, T] of both sides."""
        if self.trainer.model_config.is_encoder_decoder:
            raise ConfigError(
                f"{type(self).__name__} overrides a part of the loss, which is called for decoder-only models alone"
            )
        found = dict[str, Tensor]()
        for side in COLUMNS[1:]:
            named = named_sequences(getattr(batch, side), ignored=self.label_pad_token_id)
            found |= {f"{side}_{name}": value for name, value in named.items()}
        return found

    def changes(self) -> dict[str, Any]:
        """Return the methods that take the place of trainkit's: the loss has the means of logits besides."""
        return {"loss": lambda _, batch: self.own_loss(batch), **super().changes()}

    def own_loss(self, batch: Any) -> tuple[Tensor, Metrics]:
        """Return the loss of trainkit, with the means of the policy's logits over all tokens of each side."""
        models, found = self.trainer.models, list[tuple[Tensor, Tensor]]()
        policy, apart = models.policy, self.trainer.text.is_encoder_decoder

        def reading(sequences: Sequences, **kwargs: Any) -> TokenOutputs:
            outputs: TokenOutputs = policy(sequences, mean_logits=True, **kwargs)
            mask = sequences.response_mask if apart else sequences.attention_mask
            found.extend(zip(outputs.mean_logits.chunk(2), mask.chunk(2), strict=True))
            return outputs

        models.policy = reading
        try:
            loss, metrics = super().own_loss(batch)
        finally:
            models.policy = policy
        means = {f"logits/{side}": Mean.of(*each) for side, each in zip(COLUMNS[1:], found, strict=True)}
        return loss, {**metrics, **means}

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False) -> Any:
        """Return the loss of a batch of pairs [], with ``return_outputs`` also its metrics by TRL's names.

        Args:
            model: computes log π.
            inputs: ids, attention masks and labels of both sides.
            return_outputs: whether the metrics are returned.
        """
        loss, metrics = self._batch_metrics(model, inputs, "train")
        self.store_metrics(metrics)
        return (loss, metrics) if return_outputs else loss

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor, Any, Any]:
        """Return the loss of a batch of held-out pairs [], and None in the place of logits and labels."""
        with torch.no_grad():
            loss, metrics = self._batch_metrics(model, inputs, "eval")
        self.store_metrics(metrics, train_eval="eval")
        return loss, None, None

    def _batch_metrics(self, model: Any, inputs: dict[str, Any], which: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Call the method of TRL 0.8.6, or that of 0.7.2 if a script overrides it."""
        old = self.overrides("get_batch_metrics")
        found: tuple[Tensor, dict[str, Tensor]] = (self.get_batch_metrics if old else self.get_batch_loss_metrics)(
            model, inputs, train_eval=which
        )
        return found

    def get_batch_metrics(
        self, model: Any, batch: dict[str, Any], train_eval: Literal["train", "eval"] = "train"
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what `get_batch_loss_metrics` does; its name in TRL 0.7.2."""
        return self.get_batch_loss_metrics(model, batch, train_eval)

    @property
    def _padding(self) -> dict[str, Any]:
        """What differs from the defaults of methods in each version of TRL."""
        return {} if self.label_pad_token_id == -100 else {"label_pad_token_id": self.label_pad_token_id}

    def _both(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        return self.concatenated_inputs(batch, **self._padding)

    def _logps(self, logits: Tensor, labels: Tensor, average: bool) -> Tensor:
        read = self._get_batch_logps if self.overrides("_get_batch_logps") else self.get_batch_logps
        return read(logits, labels, average_log_prob=average, **self._padding)

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
            yield self.inputs_of(self.trainer.encode_preferences(rows[start : start + size]))

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

        Raises:
            ValueError: logits and labels have different numbers of rows or tokens.
        """
        if logits.shape[:-1] != labels.shape:
            raise ValueError(f"logits are of {tuple(logits.shape[:-1])} tokens, and labels {tuple(labels.shape)}")
        if not is_encoder_decoder:
            logits, labels = logits[:, :-1], labels[:, 1:]
        mask = labels != label_pad_token_id
        picked = token_logprobs(logits.flatten(0, 1), labels.masked_fill(~mask, 0).flatten()).view_as(labels)
        sums = masked_sum(picked, mask, dim=1)
        return sums / mask.sum(1) if average_log_prob else sums

    _get_batch_logps = get_batch_logps

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
        model_init: refused, as are ``compute_metrics`` and ``preprocess_logits_for_metrics``.
        callbacks: objects with hooks of trainkit, or classes of such.
        optimizers: an optimizer and its schedule.
        preprocess_logits_for_metrics: refused.
        peft_config: the adapter that is trained.
        compute_metrics: refused.

    Raises:
        ConfigError: a setting has no counterpart in trainkit; says what to write instead.
    """

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
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Any = None,
        peft_config: Any = None,
        compute_metrics: Any = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if value is not None or name in ("args", "tokenizer")}
        if getattr(args, "disable_dropout", True) and getattr(peft_config, "lora_dropout", None):
            given["peft_config"] = without_dropout(peft_config)
        room = getattr(args, "max_length", None) or longest(model, tokenizer, 512)
        self._begin(given, changes={"train": {"seq_length": room}})

    @property
    def averages(self) -> bool:
        """Whether log π of a side is a mean over its tokens, and not a sum."""
        return False

    def preference_loss(self, chosen: Tensor, rejected: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, float]]:
        """Return what is added to the likelihood and the rewards of both sides, [B] ×2 -> [B] ×3, and metrics."""
        raise NotImplementedError

    def concatenated_forward(self, model: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return log π [B] and logits [B, T, V] of the chosen and the rejected sides, and the likelihood loss [].

        The last is −log π of the chosen sides, a mean over the tokens of each and then over sides.

        Args:
            model: computes the logits.
            batch: ids, attention masks and labels of both sides.
        """
        self.trainer.models.build()  # it switches dropout off
        both = self._both(batch)
        logits = model(both["concatenated_input_ids"], attention_mask=both["concatenated_attention_mask"]).logits
        labels = both["concatenated_labels"]
        means = self._logps(logits, labels, True)
        logps = means if self.averages else self._logps(logits, labels, False)
        return (*logps.chunk(2), *logits.chunk(2), -means.chunk(2)[0].mean())

    def get_batch_loss_metrics(
        self, model: Any, batch: dict[str, Any], train_eval: Literal["train", "eval"] = "train"
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what `PairTrainer.get_batch_loss_metrics` should."""
        chosen, rejected, chosen_logits, rejected_logits, likelihood = self.concatenated_forward(model, batch)
        losses, good, bad, further = self.preference_loss(chosen, rejected)
        found = measured(good, bad, chosen, rejected, chosen_logits, rejected_logits)
        found |= {"nll_loss": likelihood, **{name: torch.tensor(value) for name, value in further.items()}}
        return losses.mean() + likelihood, averaged(found, train_eval)


def measured(
    good: Tensor, bad: Tensor, chosen: Tensor, rejected: Tensor, chosen_logits: Tensor, rejected_logits: Tensor
) -> dict[str, Tensor]:
    """Return the metrics of pairs by TRL's names, from rewards [B], log π [B] and logits [B, T, V] of both sides."""
    return {
        "rewards/chosen": good,
        "rewards/rejected": bad,
        "rewards/accuracies": preference_accuracy(good, bad),
        "rewards/margins": good - bad,
        "logps/chosen": chosen,
        "logps/rejected": rejected,
        "logits/chosen": chosen_logits,
        "logits/rejected": rejected_logits,
    }


def averaged(found: Mapping[str, Tensor], train_eval: str) -> dict[str, Tensor]:
    """Return the means of metrics, whose names begin with ``eval_`` for held-out pairs."""
    prefix = "eval_" * (train_eval == "eval")
    return {f"{prefix}{name}": value.detach().mean().cpu() for name, value in found.items()}


def without_dropout(peft_config: Any) -> Any:
    """Return an adapter's configuration without dropout, which TRL switches off in adapters, too."""
    log.warning("lora_dropout is %s, and disable_dropout switches it off, as in TRL", peft_config.lora_dropout)
    found = copy.deepcopy(peft_config)
    found.lora_dropout = 0.0
    return found
