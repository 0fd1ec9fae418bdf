"""Direct preference optimisation."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TrainingArguments

from trainkit import Sequences
from trainkit.errors import ConfigError
from trainkit_migrate import refusing
from trainkit_trl.trainer.calling import NOT_CALLED, OF_PAIRS
from trainkit_trl.trainer.offline import checking, load_reference, longest
from trainkit_trl.trainer.pairs import PairTrainer, averaged, measured, without_dropout


class DPOTrainer(PairTrainer):
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
        truncation_mode: what prompts that are too long keep: ``"keep_end"`` or ``"keep_start"``; see `Truncation`.
        train_dataset: the rows.
        eval_dataset: held-out rows.
        tokenizer: the tokenizer; None: that of the model.
        model_init: refused, as are ``compute_metrics`` and ``preprocess_logits_for_metrics``.
        callbacks: objects with hooks of trainkit, or classes of such.
        optimizers: an optimizer and its schedule.
        preprocess_logits_for_metrics: refused.
        max_length: the largest number of tokens of a side; None: 512, or less if tokenizer or model allow less.
        max_prompt_length: the tokens that they keep; None: 128.
        max_target_length: the most tokens of an output of an encoder-decoder; None: 128.
        peft_config: the adapter that is trained.
        is_encoder_decoder: without effect.
        disable_dropout: whether dropout is switched off.
        generate_during_eval: whether evaluations sample responses to the prompts of a batch (``samples.jsonl``).
        compute_metrics: refused.
        precompute_ref_log_probs: without effect.
        dataset_num_proc: without effect.
        model_init_kwargs: arguments of `from_pretrained` for ``model``.
        ref_model_init_kwargs: arguments of `from_pretrained` for ``ref_model``.
        model_adapter_name: of a `peft.PeftModel` with several adapters, the one that is trained; None: the active one,
            or with ``ref_adapter_name`` the one called ``"default"``.
        ref_adapter_name: the adapter with which the model is the reference; None: the model without adapters.
        reference_free: whether there is no reference.
        force_use_ref_model: without effect.

    Raises:
        ConfigError: the arguments are in the order of TRL 0.7.2 and not named, or a setting has no counterpart in
            trainkit; says what to write instead.
    """

    not_called: ClassVar[Mapping[str, str]] = {
        **NOT_CALLED,
        **OF_PAIRS,
        "compute_reference_log_probs": "override concatenated_forward, or give another ref_model",
        "null_ref_context": "give another ref_model",
        "_prepare_deepspeed": "trainkit divides the models itself; remove it",
    }
    of_loss: ClassVar[tuple[str, ...]] = (*PairTrainer.of_loss, "dpo_loss")
    method: ClassVar[str] = "dpo"
    section: ClassVar[str] = "DPOTrainer"

    @checking
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
        callbacks: list[Any] | None = None,
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
            raise ConfigError("the arguments after beta are in another order in TRL 0.8; name them: args=...")
        self.beta, self.loss_type, self.label_pad_token_id = beta, loss_type, label_pad_token_id
        given["max_length"] = max_length or longest(model, tokenizer, 512)
        if disable_dropout and getattr(peft_config, "lora_dropout", None):
            given["peft_config"] = without_dropout(peft_config)
        ref_model = load_reference(ref_model, ref_model_init_kwargs, apart=bool(is_encoder_decoder))
        self._begin(given, reference=None if reference_free else ref_model)

    @property
    def ref_model(self) -> Any:
        """The reference; None without one."""
        if not self.trainer.needs_reference:
            return None
        self.trainer.models.build()
        return self.trainer.reference

    # ------------------------------------------------------------------------------------------------------ losses

    def concatenated_forward(self, model: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return log π [B] and logits [B, T, V] of the chosen and the rejected sides: two and two."""
        self.trainer.models.build()  # it switches dropout off, and makes the reference before training
        both = self._both(batch)
        logits = model(both["concatenated_input_ids"], attention_mask=both["concatenated_attention_mask"]).logits
        average = self.loss_type == "ipo" and self.trainer.method.ipo_length_normalize
        logps = self._logps(logits, both["concatenated_labels"], average)
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
        """Do what the base class says; a batch may have ``reference_chosen_logps`` and ``reference_rejected_logps``."""
        chosen, rejected, chosen_logits, rejected_logits = self.concatenated_forward(model, batch)
        losses, good, bad = self.dpo_loss(chosen, rejected, *self._reference_logps(batch))
        found = measured(good, bad, chosen, rejected, chosen_logits, rejected_logits)
        return losses.mean(), averaged(found, train_eval)

    def inputs_of(self, batch: Any) -> dict[str, Tensor]:
        """Return ids, attention masks and labels [B, T] of both sides, and log π_ref [B] of both, if that is known."""
        known = {f"reference_{side}_logps": getattr(batch, f"ref_{side}", None) for side in ("chosen", "rejected")}
        return {**super().inputs_of(batch), **{name: value for name, value in known.items() if value is not None}}

    @torch.no_grad()
    def _reference_logps(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        if not self.trainer.needs_reference:
            return torch.zeros(()), torch.zeros(())
        if "reference_chosen_logps" in batch:
            return batch["reference_chosen_logps"], batch["reference_rejected_logps"]
        self.trainer.models.build()
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


__getattr__ = refusing(__name__)
