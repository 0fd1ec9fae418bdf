"""PPO with the interface of trlX."""

from __future__ import annotations

from typing import Any

from trainkit import get_trainer
from trainkit_trlx.data.configs import TRLConfig
from trainkit_trlx.trainer import register_trainer
from trainkit_trlx.trainer.accelerate_base_trainer import OfTrlx

Trainer: Any = get_trainer("ppo")


@register_trainer
class AcceleratePPOTrainer(OfTrlx, Trainer):  # type: ignore[misc]
    """Trainer of PPO."""

    def __init__(self, config: TRLConfig, **kwargs: Any) -> None:
        method = config.method
        self._value_layers = int(getattr(method, "num_value_layers_unfrozen", 0))
        super().__init__(config, **kwargs)
        if self.method.scale_reward == "ref" and getattr(method, "ref_std", None) is not None:
            self.ref_std = float(method.ref_std)  # type: ignore[attr-defined]

    def critic(self, model: Any) -> int | None:
        """Return how many layers of its own the critic has."""
        return self._value_layers or None
