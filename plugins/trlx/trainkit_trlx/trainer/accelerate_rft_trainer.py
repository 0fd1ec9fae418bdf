"""RFT with the interface of trlX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from trainkit import get_trainer
from trainkit.metrics import Mean
from trainkit_trlx.data.configs import say_once
from trainkit_trlx.data.method_configs import MethodConfig, register_method
from trainkit_trlx.trainer import register_trainer
from trainkit_trlx.trainer.accelerate_sft_trainer import SFT
from trainkit_trlx.trainer.computed import Computed
from trainkit_trlx.trainer.names import OWN
from trainkit_trlx.trainer.offline import Samples

Trainer: Any = get_trainer("rft")


@dataclass
@register_method
class RFTConfig(MethodConfig):
    """Settings of RFT."""

    gen_kwargs: dict[str, Any]
    start_percentile: float = 0.7
    end_percentile: float = 0.95
    n_improve_steps: int = 4
    n_generations_per_prompt: int = 32


class RFT(Samples, Trainer):  # type: ignore[misc]
    """trainkit's RFT for trlX's."""

    as_trlx = SFT.as_trlx

    def improve(self, queries: list[str]) -> list[tuple[str, str]]:
        """Return the responses that are trained on, and record their number and the mean of all scores."""
        kept: list[tuple[str, str]] = super().improve(queries)
        scores = [score for query in queries for score in self.pools[query].values()]
        found = {"scores_mean": scores, "len_samples_selected": [len(kept)]}
        self.record({OWN + name: Mean.of(torch.tensor(numbers).double()) for name, numbers in found.items()})
        return kept


@register_trainer
class AccelerateRFTTrainer(Computed):
    """Trainer of RFT."""

    trainer_class, algorithm = RFT, "rft"
    refused: ClassVar[dict[str, str]] = {
        "make_experience": "change reward_fn, or the loss; trainkit samples and chooses by itself"
    }

    def make_experience(self) -> None:
        """Do nothing: `learn` samples by itself."""
        say_once(
            "make_experience() has no effect: learn() samples by itself, method.n_generations_per_prompt at a time"
        )
