"""Claims the name of trainkit's PPO."""

from trainkit import AccelerateRLTrainer, MethodConfig, register_trainer


class OtherConfig(MethodConfig):
    """No numbers."""

    name: str = "ppo"
    """The registered name."""


@register_trainer("ppo")
class OtherTrainer(AccelerateRLTrainer[OtherConfig]):
    """Is never used."""
