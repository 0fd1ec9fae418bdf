"""The settings of DDPO."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from trainkit import MethodConfig


class DDPOConfig(MethodConfig):
    """Settings of DDPO. The defaults are those of Black et al. 2023, appendix D, and of TRL's trainer."""

    section_defaults: ClassVar[dict[str, Any]] = {
        "optimizer": {"lr": 1e-5, "weight_decay": 1e-4},
        "rollout": {"num_rollouts": 256, "batch_size": 8},
        "train": {"batch_size": 3200},
    }

    name: str = "ddpo"
    """The registered name."""
    num_steps: int = Field(50, ge=1)
    """S: denoising steps from noise to an image."""
    eta: float = Field(1.0, gt=0, le=1)
    """η: scale of the noise that a step adds; 1 adds as much as DDPM. It must be above 0, because a deterministic step
    cannot be trained."""
    guidance_scale: float = Field(5.0, ge=1)
    """g: scale of classifier-free guidance, in sampling and training; 1 turns it off, which halves the computation."""
    negative_prompt: str = ""
    """The negative prompt of guidance; empty: the unconditional prediction."""
    ddpo_epochs: int = Field(1, ge=1)
    """Passes over each collection."""
    cliprange: float = Field(1e-4, gt=0)
    """ε of the surrogate, for ratios of log-probabilities that are means over the dimensions of a latent."""
    adv_clip_max: float = Field(5.0, gt=0)
    """Advantages are clipped to ± this value."""
    timestep_fraction: float = Field(1.0, gt=0, le=1)
    """Share of an image's steps that are trained on, sampled separately for each image."""
    buffer_size: int = Field(16, ge=0)
    """Latest rewards stored per prompt; their mean and deviation standardise its rewards. 0: the mean and deviation of
    the collection are used for all prompts."""
    min_count: int = Field(16, ge=1)
    """Rewards that a prompt needs before its own mean and deviation are used instead of the collection's; at most
    ``buffer_size``, unless that is 0."""
    reward_workers: int = Field(0, ge=0)
    """Threads that call the reward function while further images are sampled. 0: it is called between batches."""

    @model_validator(mode="after")
    def _remembers_enough(self) -> Self:
        if 0 < self.buffer_size < self.min_count:
            raise ValueError(
                f"buffer_size {self.buffer_size} is below min_count {self.min_count}, so no prompt would ever use its "
                "own mean and deviation; lower min_count to buffer_size or less, or set buffer_size to 0 to use those "
                "of the collection"
            )
        return self
