"""Direct preference optimisation."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedTokenizerBase, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from trainkit import Sequences
from trainkit.functional import masked_sum, preference_accuracy, token_logprobs
from trainkit_trl.trainer.offline import OfflineTrainer, count, longest, selected, single
from trainkit_trl.trainer.utils import pad_to_length

log = logging.getLogger(__name__)
COLUMNS = ("prompt", "chosen", "rejected")


class DPOTrainer(OfflineTrainer):
    """DPO and its kin on rows with ``prompt``, ``chosen`` and ``rejected``.

    Args:
        model: a model, or its name or directory.
        ref_model: the reference, or its name or directory; None: the model as it is now, or without its adapter.
        beta: β of the loss.
        label_smoothing: the share of pairs whose sides are swapped.
        loss_type: ``"sigmoid"``, ``"hinge"``, ``"ipo"`` or ``"kto_pair"``.
        args: the arguments of training.
        data_collator: refused.
        label_pad_token_id: without effect.
        padding_value: without effect.
        truncation_mode: ``"keep_end"``.
        train_dataset: the rows.
        eval_dataset: held-out rows.
        tokenizer: the tokenizer; None: that of the model.
        model_init: refused, as are ``compute_metrics``, ``optimizers`` and ``preprocess_logits_for_metrics``.
        callbacks: refused.
        optimizers: refused.
        preprocess_logits_for_metrics: refused.
        max_length: the largest number of tokens of a side; None: 512, or less if tokenizer or model allow less.
        max_prompt_length: without effect.
        max_target_length: without effect.
        peft_config: the adapter that is trained.
        is_encoder_decoder: without effect.
        disable_dropout: whether dropout is switched off.
        generate_during_eval: refused.
        compute_metrics: refused.
        precompute_ref_log_probs: without effect.
        dataset_num_proc: without effect.
        model_init_kwargs: arguments of `from_pretrained` for ``model``.
        ref_model_init_kwargs: arguments of `from_pretrained` for ``ref_model``.
        model_adapter_name: refused.
        ref_adapter_name: refused.
        reference_free: whether there is no reference.
        force_use_ref_model: without effect.

    Raises:
        TypeError: the arguments are in the order of TRL 0.7.2 and not named.
        ConfigError: a setting has no counterpart in trainkit; says what to write instead.
    """

    method: ClassVar[str] = "dpo"
    section: ClassVar[str] = "DPOTrainer"

    def __init__(
        self,
        model: Any = None,
        ref_model: Any = None,
        beta: float = 0.1,
        label_smoothing: float = 0,
        loss_type: Literal["sigmoid", "hinge", "ipo", "kto_pair"] = "sigmoid",
        args: TrainingArguments | None = None,
        data_collator: Any = None,
        label_pad_token_id: int = -100,
        padding_value: int | None = None,
        truncation_mode: str = "keep_end",
        train_dataset: Any = None,
        eval_dataset: Any = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        model_init: Any = None,
        callbacks: Any = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Any = None,
        max_length: int | None = None,
        max_prompt_length: int | None = None,
        max_target_length: int | None = None,
        peft_config: Any = None,
        is_encoder_decoder: bool | None = None,
        disable_dropout: bool = True,
        generate_during_eval: bool = False,
        compute_metrics: Any = None,
        precompute_ref_log_probs: bool = False,
        dataset_num_proc: int | None = None,
        model_init_kwargs: dict[str, Any] | None = None,
        ref_model_init_kwargs: dict[str, Any] | None = None,
        model_adapter_name: str | None = None,
        ref_adapter_name: str | None = None,
        reference_free: bool = False,
        force_use_ref_model: bool = False,
    ) -> None:
        given = {name: value for name, value in locals().items() if value is not None or name in ("args", "tokenizer")}
        if isinstance(label_smoothing, TrainingArguments):
            raise TypeError("the arguments after beta are in another order in TRL 0.8; name them: args=...")
        self.beta, self.loss_type, self.label_pad_token_id = beta, loss_type, label_pad_token_id
        given["max_length"] = max_length or longest(model, tokenizer, 512)
        if disable_dropout and getattr(peft_config, "lora_dropout", None):
            given["peft_config"] = _without_dropout(peft_config)
        if isinstance(ref_model, str):
            auto = AutoModelForSeq2SeqLM if is_encoder_decoder else AutoModelForCausalLM
            ref_model = auto.from_pretrained(ref_model, **(ref_model_init_kwargs or {}))
        rows = None if train_dataset is None else count(train_dataset)
        train, held_out = (
            None if each is None else self.samples(each) for each in (train_dataset, single(eval_dataset))
        )
        reference = None if reference_free else ref_model
        self._begin(given, train, held_out, rows=rows, reference=reference)

    @property
    def ref_model(self) -> Any:
        """The reference; None without one."""
        return self.trainer.reference if self.trainer.needs_reference else None

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

    # ------------------------------------------------------------------------------------------------------ losses

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

    def concatenated_forward(self, model: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return log π [B] and logits [B, T, V] of the chosen and the rejected sides: two and two."""
        self.trainer.policy  # noqa: B018  (it switches dropout off, and makes the reference before training)
        both = self.concatenated_inputs(batch, label_pad_token_id=self.label_pad_token_id)
        logits = model(both["concatenated_input_ids"], attention_mask=both["concatenated_attention_mask"]).logits
        average = self.loss_type == "ipo" and self.trainer.method.ipo_length_normalize
        logps = self.get_batch_logps(logits, both["concatenated_labels"], average, self.label_pad_token_id)
        return (*logps.chunk(2), *logits.chunk(2))

    def dpo_loss(
        self,
        policy_chosen_logps: Tensor,
        policy_rejected_logps: Tensor,
        reference_chosen_logps: Tensor,
        reference_rejected_logps: Tensor,
        reference_free: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the losses and the implicit rewards of both sides. [B] ×4 -> [B] ×3.

        The loss of ``"kto_pair"`` is the mean of both sides, where TRL returns both one after the other.
        """
        free = reference_free or self.trainer.method.reference_free
        chosen, rejected = (
            policy if free else policy - reference.to(policy.device)
            for policy, reference in (
                (policy_chosen_logps, reference_chosen_logps),
                (policy_rejected_logps, reference_rejected_logps),
            )
        )
        step = SimpleNamespace(chosen_kl=chosen.mean().expand_as(chosen), rejected_kl=rejected.mean().expand_as(chosen))
        losses = self.trainer.losses(chosen, rejected, step)
        return losses, (self.beta * chosen).detach(), (self.beta * rejected).detach()

    def get_batch_loss_metrics(
        self, model: Any, batch: dict[str, Any], train_eval: Literal["train", "eval"] = "train"
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the mean loss [] of a batch, and its metrics by TRL's names.

        Args:
            model: computes log π.
            batch: ids, attention masks and labels of both sides, perhaps ``reference_chosen_logps`` and
                ``reference_rejected_logps``.
            train_eval: with ``"eval"``, the names of metrics begin with ``eval_``.
        """
        chosen, rejected, chosen_logits, rejected_logits = self.concatenated_forward(model, batch)
        losses, good, bad = self.dpo_loss(chosen, rejected, *self._reference_logps(batch))
        prefix = "eval_" * (train_eval == "eval")
        found = {
            "rewards/chosen": good,
            "rewards/rejected": bad,
            "rewards/accuracies": preference_accuracy(good, bad),
            "rewards/margins": good - bad,
            "logps/chosen": chosen,
            "logps/rejected": rejected,
            "logits/chosen": chosen_logits,
            "logits/rejected": rejected_logits,
        }
        return losses.mean(), {f"{prefix}{name}": value.detach().mean().cpu() for name, value in found.items()}

    get_batch_metrics = get_batch_loss_metrics

    @torch.no_grad()
    def _reference_logps(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        if not self.trainer.needs_reference:
            return torch.zeros(()), torch.zeros(())
        if "reference_chosen_logps" in batch:
            return batch["reference_chosen_logps"], batch["reference_rejected_logps"]
        both = self.concatenated_inputs(batch, label_pad_token_id=self.label_pad_token_id)
        mask = both["concatenated_labels"] != self.label_pad_token_id
        real = both["concatenated_attention_mask"].bool()
        outputs = self.trainer.reference(Sequences(both["concatenated_input_ids"], real, mask))
        chosen, rejected = self.trainer.logps(outputs.logprobs, mask).chunk(2)
        return chosen, rejected

    # ---------------------------------------------------------------------------------------------------- evaluation

    def get_batch_samples(self, model: Any, batch: dict[str, Tensor]) -> tuple[list[str], list[str]]:
        """Sample a response to each prompt of a batch from the policy and from the reference; texts with the prompt.

        Args:
            model: without effect: the policy is ``self.model``.
            batch: ids, attention masks and labels of both sides; the prompt is what has no labels.
        """
        prompt = (batch["chosen_labels"] == self.label_pad_token_id) & batch["chosen_attention_mask"].bool()
        prompts = [ids[mask].tolist() for ids, mask in zip(batch["chosen_input_ids"], prompt, strict=True)]
        limit = self.trainer.limit or self.trainer.config.rollout.max_new_tokens
        room = max(limit - max(map(len, prompts)), 1)
        own, others = (
            self.trainer.generate(prompts, reference=reference and self.trainer.needs_reference, max_new_tokens=room)
            for reference in (False, True)
        )
        return own.samples, others.samples

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


def _without_dropout(peft_config: Any) -> Any:
    """Return an adapter's configuration without dropout, which TRL switches off in adapters, too."""
    log.warning("lora_dropout is %s, and disable_dropout switches it off, as in TRL", peft_config.lora_dropout)
    found = copy.deepcopy(peft_config)
    found.lora_dropout = 0.0
    return found
