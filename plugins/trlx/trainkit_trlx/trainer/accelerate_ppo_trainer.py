"""PPO with the interface of trlX."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from trainkit import get_trainer
from trainkit_trlx.data.configs import TRLConfig
from trainkit_trlx.models.modeling_ppo import AutoModelForCausalLMWithValueHead, AutoModelForSeq2SeqLMWithValueHead
from trainkit_trlx.trainer import register_trainer
from trainkit_trlx.trainer.accelerate_base_trainer import Online

Trainer: Any = get_trainer("ppo")


@register_trainer
class AcceleratePPOTrainer(Online, Trainer):  # type: ignore[misc]
    """Trainer of PPO."""

    def __init__(self, config: TRLConfig, **kwargs: Any) -> None:
        method = config.method
        self._value_layers = int(getattr(method, "num_value_layers_unfrozen", 0))
        super().__init__(config, **kwargs)
        if self.method.scale_reward == "ref" and getattr(method, "ref_std", None) is not None:
            self.ref_std = float(method.ref_std)  # type: ignore[attr-defined]

    @staticmethod
    def from_checkpoint(path: str, seq2seq: bool) -> Any:
        """Return the model that trlX has saved in a directory, with its value head."""
        made = AutoModelForSeq2SeqLMWithValueHead if seq2seq else AutoModelForCausalLMWithValueHead
        return made.from_pretrained(path, is_trainable=True)

    def critic(self, model: Any) -> int | None:
        """Return how many layers of its own the critic has."""
        return self._value_layers or None

    def get_arch(self, config: Any) -> Any:
        """Return the policy, with the critic's layers of a checkpoint of trlX."""
        saved = getattr(self.live_model, "critic", None)
        if saved is not None:
            self._value_layers = saved.layers
        policy = super().get_arch(config)
        if saved is not None:
            policy.critic.load_state_dict(saved.state_dict())
        return policy

    @cached_property
    def model(self) -> Any:
        """The language model with the value head, which are trained."""
        policy = self.unwrapped
        seq2seq = policy.model.config.is_encoder_decoder
        made = (AutoModelForSeq2SeqLMWithValueHead if seq2seq else AutoModelForCausalLMWithValueHead)(policy.model)
        made.v_head = policy.value_head
        if policy.critic is not None:
            made.critic = policy.critic
        return made
