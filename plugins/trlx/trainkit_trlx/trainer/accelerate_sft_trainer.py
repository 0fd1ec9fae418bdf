"""SFT with the interface of trlX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers import BatchEncoding

from trainkit import get_trainer
from trainkit_trlx.data.method_configs import MethodConfig, register_method
from trainkit_trlx.pipeline.offline_pipeline import IGNORED, DialogStore, tokenize_dialogue
from trainkit_trlx.trainer import register_trainer
from trainkit_trlx.trainer.offline import Offline, Samples

Trainer: Any = get_trainer("sft")

if TYPE_CHECKING:
    from trainkit import Sequences


@dataclass
@register_method
class SFTConfig(MethodConfig):
    """Settings of SFT."""

    gen_kwargs: dict[str, Any]


class SFT(Samples, Trainer):  # type: ignore[misc]
    """trainkit's SFT for trlX's."""

    def as_trlx(self, batch: Sequences) -> BatchEncoding:
        """Return ids, mask and labels [B, T]; the label of what is not trained on is -100."""
        ids, mask = batch.input_ids, batch.attention_mask.long()
        labels = ids.masked_fill(~batch.response_mask, IGNORED)
        return BatchEncoding({"input_ids": ids, "attention_mask": mask, "labels": labels})


@register_trainer
class AccelerateSFTTrainer(Offline):
    """Trainer of SFT."""

    trainer_class, algorithm = SFT, "sft"

    def make_experience(self, samples: Any, seq_length: int | None = None) -> None:
        """Set the samples to train on: strings or dialogues, of at most ``seq_length`` tokens."""
        self.set_samples(samples, None, seq_length)

    def new_store(self, samples: list[Any], rewards: Any, max_length: int | None) -> DialogStore:
        """Return the samples, tokenised as they are trained on: strings without a beginning token, and with EOS."""
        room = max_length or self.max_length
        alone = [isinstance(each, str) for each in samples]
        dialogues = (
            tokenize_dialogue(each, self.tokenizer, room + first)[first:]
            for each, first in zip(samples, alone, strict=True)
        )
        return DialogStore([*dialogues], self.tokenizer)
