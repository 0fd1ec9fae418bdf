"""Kahneman-Tversky optimisation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase, TrainingArguments

from trainkit_migrate import refusing
from trainkit_trl.trainer.calling import NOT_CALLED, OF_PAIRS
from trainkit_trl.trainer.kto_config import KTOConfig
from trainkit_trl.trainer.offline import OfflineTrainer, checking, load_reference, longest, selected
from trainkit_trl.trainer.pairs import without_dropout

COLUMNS = ("prompt", "completion", "label")
LOSS = (
    "compute_loss", "prediction_step", "kto_loss", "forward", "get_batch_loss_metrics", "get_batch_logps",
    "store_metrics", "_compute_kl_logps",
)  # fmt: skip
"""Methods of TRL's loss, whose batches have samples of other prompts, which trainkit keeps in experience of its own."""

OWN = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected", "kl")
"""Metrics that TRL logs as ``train/...`` and ``eval/...``."""


class KTOTrainer(OfflineTrainer):
    """KTO on rows with ``prompt``, ``completion`` and ``label``.

    Args:
        model: a model, or its name or directory.
        ref_model: the reference, or its name or directory; None: the model as it is now, or without its adapter.
        args: the arguments of training, a `KTOConfig`.
        train_dataset: the rows.
        eval_dataset: held-out rows.
        tokenizer: the tokenizer; None: that of the model.
        data_collator: refused.
        model_init: refused, as are ``compute_metrics`` and ``preprocess_logits_for_metrics``.
        callbacks: objects with hooks of trainkit, or classes of such.
        optimizers: an optimizer and its schedule.
        preprocess_logits_for_metrics: refused.
        peft_config: the adapter that is trained.
        compute_metrics: refused.
        model_adapter_name: as in `DPOTrainer`.
        ref_adapter_name: as there.

    Raises:
        ValueError: ``args`` is a `TrainingArguments`, without the settings of the loss.
        ConfigError: a setting has no counterpart in trainkit; says what to write instead.
    """

    not_called: ClassVar[Mapping[str, str]] = {
        **NOT_CALLED,
        **OF_PAIRS,
        **dict.fromkeys(LOSS, "override loss of trainkit_kto.KTOTrainer, and train with trainkit"),
        "compute_reference_log_probs": "give another ref_model",
    }
    method: ClassVar[str] = "kto"
    section: ClassVar[str] = "KTOTrainer"
    truncated: ClassVar[str] = "outside"
    names: ClassVar[Mapping[str, str]] = {
        "rewards/desirable": "rewards/chosen",
        "rewards/undesirable": "rewards/rejected",
        "logps/desirable": "logps/chosen",
        "logps/undesirable": "logps/rejected",
        "policy/kl": "kl",
    }

    @checking
    def __init__(
        self,
        model: Any = None,
        ref_model: Any = None,
        args: KTOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        data_collator: Any = None,
        model_init: Any = None,
        callbacks: list[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Any = None,
        peft_config: Any = None,
        compute_metrics: Any = None,
        model_adapter_name: str | None = None,
        ref_adapter_name: str | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if value is not None or name in ("args", "tokenizer")}
        if type(args) is TrainingArguments:
            raise ValueError("args should be a KTOConfig, which has the settings of the loss; given TrainingArguments")
        if getattr(peft_config, "lora_dropout", None):
            given["peft_config"] = without_dropout(peft_config)
        apart = bool(getattr(args, "is_encoder_decoder", False))
        ref_model = load_reference(ref_model, getattr(args, "ref_model_init_kwargs", None), apart=apart)
        room = getattr(args, "max_length", None) or longest(model, tokenizer, 512)
        self._begin(given, reference=ref_model, changes={"train": {"seq_length": room}})

    @property
    def ref_model(self) -> Any:
        """The reference."""
        self.trainer.models.build()
        return self.trainer.reference

    def renamed(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return metrics by the names of `evaluate`; the margin is that of the mean rewards of both labels."""
        found = {
            name: value for name, value in super().renamed(metrics).items() if not name.endswith("rewards/margins")
        }
        for at in ("", "eval_"):
            if {f"{at}rewards/chosen", f"{at}rewards/rejected"} <= found.keys():
                found[f"{at}rewards/margins"] = found[f"{at}rewards/chosen"] - found[f"{at}rewards/rejected"]
        return found

    def logged(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return metrics by the names of ``state.log_history``: those of TRL are ``train/...`` and ``eval/...``."""
        places = {f"{at}{name}": f"{split}/{name}" for at, split in (("", "train"), ("eval_", "eval")) for name in OWN}
        return {places.get(name, name): value for name, value in super().logged(metrics).items()}

    def samples(self, dataset: Any) -> Any:
        """Return the labelled samples without other columns."""
        return selected(dataset, COLUMNS, needed=COLUMNS)


__getattr__ = refusing(__name__)
