"""ILQL with the interface of trlX."""

from __future__ import annotations

from typing import Any

from trainkit import get_trainer
from trainkit_trlx.trainer import register_trainer
from trainkit_trlx.trainer.accelerate_base_trainer import Offline

Trainer: Any = get_trainer("ilql")


@register_trainer
class AccelerateILQLTrainer(Offline, Trainer):  # type: ignore[misc]
    """Trainer of ILQL."""

    def make_experience_seq2seq(self, samples: Any, rewards: Any, max_length: int = 2048) -> None:
        """Set the samples to train on, as `make_experience`: trainkit knows whether the model is an encoder-decoder."""
        self.make_experience(samples, rewards, max_length)
