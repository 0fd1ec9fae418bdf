"""The configuration of PPO."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from trainkit_migrate import refusing
from trainkit_trl.arguments import checked
from trainkit_trl.core import flatten_dict

OF_0_7 = {"learning_rate": 1e-5, "batch_size": 256, "mini_batch_size": 1}
"""Defaults of TRL 0.7.2 that 0.8 changed."""


@checked
@dataclass
class PPOConfig:
    """Settings of `PPOTrainer`, of TRL 0.7.2 and 0.8.6, with the defaults of 0.8.6.

    Those of 0.7.2 were 1e-5 for ``learning_rate``, 256 for ``batch_size`` and 1 for ``mini_batch_size``.

    Raises:
        ValueError: an argument is unknown or of another type, sizes are not multiples of each other, ``kl_penalty`` is
            unknown, or ``push_to_hub_if_best_kwargs`` has no ``repo_id``.
    """

    exp_name: str = field(default_factory=lambda: os.path.basename(sys.argv[0]).removesuffix(".py"))
    seed: int = 0
    log_with: Literal["wandb", "tensorboard"] | None = None
    task_name: str | None = None
    model_name: str | None = "gpt2"
    query_dataset: str | None = "imdb"
    reward_model: str | None = "sentiment-analysis:lvwerra/distilbert-imdb"
    remove_unused_columns: bool = True
    tracker_kwargs: dict[str, Any] = field(default_factory=dict)
    accelerator_kwargs: dict[str, Any] = field(default_factory=dict)
    project_kwargs: dict[str, Any] = field(default_factory=dict)
    tracker_project_name: str = "trl"
    push_to_hub_if_best_kwargs: dict[str, Any] = field(default_factory=dict)
    steps: int = 20000
    learning_rate: float = 1.41e-5
    adap_kl_ctrl: bool = True
    init_kl_coef: float | None = 0.2
    kl_penalty: Literal["kl", "abs", "mse", "full"] = "kl"
    target: float | None = 6
    horizon: float | None = 10000
    gamma: float = 1
    lam: float = 0.95
    cliprange: float = 0.2
    cliprange_value: float = 0.2
    vf_coef: float = 0.1
    batch_size: int = 128
    forward_batch_size: int | None = None
    mini_batch_size: int = 128
    gradient_accumulation_steps: int = 1
    world_size: int | None = None
    ppo_epochs: int = 4
    max_grad_norm: float | None = None
    optimize_cuda_cache: bool | None = None
    optimize_device_cache: bool = False
    early_stopping: bool = False
    target_kl: float = 1
    compare_steps: int = 1
    ratio_threshold: float = 10.0
    use_score_scaling: bool = False
    use_score_norm: bool = False
    score_clip: float | None = None
    whiten_rewards: bool = False
    is_encoder_decoder: bool | None = None
    is_peft_model: bool | None = None
    backward_batch_size: int | None = None
    global_backward_batch_size: int | None = None
    global_batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.kl_penalty not in ("kl", "abs", "mse", "full"):
            raise ValueError(f"kl_penalty should be kl, abs, mse or full; given {self.kl_penalty!r}")
        for name in ("batch_size", "mini_batch_size", "gradient_accumulation_steps", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} should be 1 at least; given {getattr(self, name)}")
        if self.push_to_hub_if_best_kwargs and "repo_id" not in self.push_to_hub_if_best_kwargs:
            raise ValueError("push_to_hub_if_best_kwargs has no repo_id; give it, or call push_to_hub after training")
        self.backward_batch_size = self.mini_batch_size * self.gradient_accumulation_steps
        if self.batch_size % self.backward_batch_size:
            raise ValueError(
                f"batch_size ({self.batch_size}) should be a multiple of mini_batch_size ({self.mini_batch_size}) "
                f"times gradient_accumulation_steps ({self.gradient_accumulation_steps})"
            )
        self.total_ppo_epochs = -(-self.steps // self.batch_size)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings, those of nested dictionaries under their keys joined by ``/``."""
        return flatten_dict(asdict(self))


__getattr__ = refusing(__name__)
