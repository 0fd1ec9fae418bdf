"""Claims the name of trainkit's PPO."""

from trainkit import AccelerateRLTrainer, MethodConfig, register_trainer


class OtherConfig(MethodConfig):
    """Settings of the plugin: none."""

    name: str = "ppo"
    """The registered name."""


@register_trainer("ppo")
class OtherTrainer(AccelerateRLTrainer[OtherConfig]):
    """A trainer that is never used."""
