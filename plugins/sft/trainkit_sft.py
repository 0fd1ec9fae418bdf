"""SFT: supervised fine-tuning, the likelihood of the outputs of samples."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from trainkit import AccelerateRLTrainer, MethodConfig, Row, Sequences, TRLConfig, register_trainer
from trainkit.functional import nll
from trainkit.metrics import Mean, Metrics
from trainkit.models import CausalPolicy, load_model


class SFTConfig(MethodConfig):
    """SFT has no numbers of its own."""

    section_defaults: ClassVar[dict[str, Any]] = {"optimizer": {"lr": 2e-5}}

    name: str = "sft"
    """The registered name."""


@register_trainer("sft")
class SFTTrainer(AccelerateRLTrainer[SFTConfig]):
    """loss = −mean log π(y_t | prompt, y_<t) over output tokens, EOS included; prompts are read, not trained."""

    inputs: ClassVar[tuple[str, ...]] = ("samples",)

    def get_arch(self, config: TRLConfig[SFTConfig]) -> CausalPolicy:
        """The language model; trained at temperature 1 whatever the sampling's is."""
        return CausalPolicy(load_model(config.model, self.live_model))

    def make_experience(self, rows: list[Row]) -> Sequences:
        """Samples as sequences."""
        return self.encode_samples(rows)

    def loss(self, batch: Sequences) -> tuple[Tensor, Metrics]:
        """Negative log-likelihood, a mean over output tokens. -> []."""
        logprobs = self.policy(batch).logprobs
        return nll(logprobs, batch.response_mask), {"loss/nll": Mean.of(-logprobs, batch.response_mask)}
