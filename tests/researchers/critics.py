"""PPO whose critic has a layer of its own, and PPO whose critic is a model of its own."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from trainkit import get_trainer, register_trainer
from trainkit.models import load_model

PPOTrainer: Any = get_trainer("ppo")


class BranchedConfig(PPOTrainer.method_class):  # type: ignore[misc,name-defined]
    """Settings of PPO."""

    name: str = "_test_branch"
    """The registered name."""


class OfItsOwnConfig(PPOTrainer.method_class):  # type: ignore[misc,name-defined]
    """Settings of PPO."""

    name: str = "_test_critic"
    """The registered name."""


@register_trainer("_test_branch")
class Branched(PPOTrainer):  # type: ignore[misc]
    """PPO with a value branch of one layer."""

    method_class = BranchedConfig

    def critic(self, model: PreTrainedModel) -> int:
        return 1


@register_trainer("_test_critic")
class OfItsOwn(PPOTrainer):  # type: ignore[misc]
    """PPO with a critic that is another model of the same kind, as in async_rlhf."""

    method_class = OfItsOwnConfig

    def critic(self, model: PreTrainedModel) -> Any:
        return load_model(self.config.model)
