"""The configuration of DDPO."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from trainkit_migrate import refusing
from trainkit_trl.arguments import checked
from trainkit_trl.core import flatten_dict


@checked
@dataclass
class DDPOConfig:
    """Settings of `DDPOTrainer`, of TRL 0.7.2 and 0.8.6.

    Raises:
        ValueError: an argument is unknown or of another type.
    """

    exp_name: str = field(default_factory=lambda: os.path.basename(sys.argv[0]).removesuffix(".py"))
    run_name: str | None = ""
    seed: int = 0
    log_with: Literal["wandb", "tensorboard"] | None = None
    tracker_kwargs: dict[str, Any] = field(default_factory=dict)
    accelerator_kwargs: dict[str, Any] = field(default_factory=dict)
    project_kwargs: dict[str, Any] = field(default_factory=dict)
    tracker_project_name: str = "trl"
    logdir: str = "logs"
    num_epochs: int = 100
    save_freq: int = 1
    num_checkpoint_limit: int = 5
    mixed_precision: str | None = "fp16"
    allow_tf32: bool = True
    resume_from: str | None = ""
    sample_num_steps: int = 50
    sample_eta: float = 1.0
    sample_guidance_scale: float = 5.0
    sample_batch_size: int = 1
    sample_num_batches_per_epoch: int = 2
    train_batch_size: int = 1
    train_use_8bit_adam: bool = False
    train_learning_rate: float = 3e-4
    train_adam_beta1: float = 0.9
    train_adam_beta2: float = 0.999
    train_adam_weight_decay: float = 1e-4
    train_adam_epsilon: float = 1e-8
    train_gradient_accumulation_steps: int = 1
    train_max_grad_norm: float = 1.0
    train_num_inner_epochs: int = 1
    train_cfg: bool = True
    train_adv_clip_max: float = 5
    train_clip_range: float = 1e-4
    train_timestep_fraction: float = 1.0
    per_prompt_stat_tracking: bool = False
    per_prompt_stat_tracking_buffer_size: int = 16
    per_prompt_stat_tracking_min_count: int = 16
    async_reward_computation: bool = False
    max_workers: int = 2
    negative_prompts: str | None = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the settings, those of nested dictionaries under their keys joined by ``/``."""
        return flatten_dict(asdict(self))


__getattr__ = refusing(__name__)
