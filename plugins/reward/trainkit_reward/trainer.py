"""The trainer of reward modelling: experience and loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit import AccelerateRLTrainer, Preferences, Row, TRLConfig, register_trainer
from trainkit.data import finite
from trainkit.errors import DataError
from trainkit.functional import preference_accuracy
from trainkit.metrics import Mean, Metrics
from trainkit.models import RewardModel, Scorer, load_scorer
from trainkit_reward.config import RewardConfig


@dataclass(frozen=True)
class RewardBatch(Preferences):
    """Pairs with their margins [B]; 0 if none are given."""

    margins: Tensor


def preference_loss(chosen: Tensor, rejected: Tensor, margins: Tensor, *, center_coef: float = 0.0) -> Tensor:
    """Return the loss of each pair, −log σ(r_c − r_r − margin) + c·(r_c + r_r)². [B] ×3 -> [B].

    Sources: Stiennon et al. 2020, section 3.4; for the margin, Touvron et al. 2023 (Llama 2), equation 2; for the
    centring, Eisenstein et al. 2023, equation 6.
    """
    return -F.logsigmoid(chosen - rejected - margins) + center_coef * (chosen + rejected) ** 2


@register_trainer("reward")
class RewardTrainer(AccelerateRLTrainer[RewardConfig]):
    """Trainer of reward models: loss = mean −log σ(r(prompt, chosen) − r(prompt, rejected) − margin) over pairs."""

    inputs: ClassVar[tuple[str, ...]] = ("samples", "pairs")
    columns: ClassVar[tuple[str, ...]] = ("margin",)
    generates: ClassVar[bool] = False
    encoder_decoders: ClassVar[bool] = False

    def get_arch(self, config: TRLConfig[RewardConfig]) -> Scorer:
        """Return a language model with a new score head, or a sequence classifier with its own head."""
        return load_scorer(config.model, self.live_model)

    @classmethod
    def check_samples(cls, rows: Sequence[Row], *, first: int = 0) -> None:
        """Check that either all or none of the pairs have a finite margin.

        Raises:
            DataError: only some pairs have a margin, or a margin is not a finite number.
        """
        given = [index for index, row in enumerate(rows) if row.get("margin") is not None]
        if given and len(given) < len(rows):
            raise DataError(f"{len(given)} of {len(rows)} samples have a margin; give all of them one, or none")
        for index in given:
            margin = rows[index]["margin"]
            if isinstance(margin, bool) or finite(margin) is None:
                raise DataError(f"sample {first + index}: margin should be a finite number; given {margin!r}")

    def make_experience(self, rows: list[Row]) -> RewardBatch:
        """Return the pairs as token sequences [B, T], with their margins [B]."""
        pairs = self.encode_preferences(rows)
        margins = torch.tensor([float(row.get("margin") or 0) for row in rows], device=pairs.chosen.input_ids.device)
        return RewardBatch(pairs.chosen, pairs.rejected, margins)

    @property
    def reward_model(self) -> RewardModel:
        """The current model as a reward function."""
        return RewardModel.from_pretrained(self.unwrapped, self.tokenizer, device=self.accelerator.device)

    def loss(self, batch: RewardBatch) -> tuple[Tensor, Metrics]:
        """Return the Bradley-Terry loss, a mean over pairs; both sides are in one forward pass. -> []."""
        chosen, rejected = self.policy(batch.both).split(len(batch))
        losses = preference_loss(chosen, rejected, batch.margins, center_coef=self.method.center_coef)
        return losses.mean(), {
            "rewards/chosen": Mean.of(chosen),
            "rewards/rejected": Mean.of(rejected),
            "rewards/margins": Mean.of(chosen - rejected),
            "rewards/accuracies": Mean.of(preference_accuracy(chosen, rejected)),
        }
