"""On-policy distillation: a divergence from a teacher on the student's own responses (Agarwal et al. 2023).

The plugin in plugins/distill does the same with the run's reference; here the teacher is a setting, by `frozen`.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Rollouts, Sequences, TRLConfig, register_trainer
from trainkit.functional import masked_mean
from trainkit.metrics import Mean, Metrics
from trainkit.testing import Declaration, tiny_gpt2

KIT = Declaration(
    arguments={"config": {"method": {"teacher": tiny_gpt2(10, initializer_range=0.5)}}},
    contexts={"teacher": {"method.teacher": tiny_gpt2(10, initializer_range=0.2)}},
)


class DistillationConfig(MethodConfig):
    """Settings of on-policy distillation."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 1e-5}, "train": {"total_steps": 1000}}

    name: str = "_test_distillation"
    """The registered name."""
    teacher: str | dict[str, Any]
    """The teacher: a hub id, a directory, or the fields of a model config."""
    divergence: Literal["reverse", "forward", "jensen_shannon"] = "reverse"
    """The divergence of the student from the teacher."""


@register_trainer("_test_distillation")
class DistillationTrainer(AccelerateRLTrainer[DistillationConfig]):
    """Trainer of on-policy distillation: loss = mean D(π ‖ teacher) over the tokens of sampled responses."""

    inputs: ClassVar[tuple[str, ...]] = ("prompts",)
    encoder_decoders = False
    images = False  # the teacher reads text alone

    def __init__(self, config: TRLConfig[DistillationConfig], **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self.teacher = self.frozen(self.method.teacher)

    def experience(self, rollouts: Rollouts, scores: Tensor) -> Sequences:
        """Return the sampled responses [B, T]."""
        return rollouts.sequences

    def loss(self, batch: Sequences) -> tuple[Tensor, Metrics]:
        """Return the divergence from the teacher, a mean over response tokens. -> []."""
        found = self.policy(batch, reference=self.teacher, divergence=self.method.divergence).divergence
        return masked_mean(found, batch.response_mask), {"policy/divergence": Mean.of(found, batch.response_mask)}
