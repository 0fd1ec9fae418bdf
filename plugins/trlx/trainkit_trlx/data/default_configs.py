"""The default configurations of trlX."""

from __future__ import annotations

from trainkit_trlx.data.configs import (
    ModelConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainConfig,
    TRLConfig,
)
from trainkit_trlx.models.modeling_ilql import ILQLConfig
from trainkit_trlx.models.modeling_ppo import PPOConfig
from trainkit_trlx.trainer.accelerate_rft_trainer import RFTConfig
from trainkit_trlx.trainer.accelerate_sft_trainer import SFTConfig

__all__ = [
    "ILQLConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PPOConfig",
    "RFTConfig",
    "SFTConfig",
    "SchedulerConfig",
    "TRLConfig",
    "TokenizerConfig",
    "TrainConfig",
    "default_ilql_config",
    "default_nemo_1_3b_config",
    "default_nemo_2b_config",
    "default_nemo_20b_config",
    "default_ppo_config",
    "default_rft_config",
    "default_sft_config",
]


def _optimizer(lr: float) -> tuple[OptimizerConfig, SchedulerConfig]:
    """Return AdamW and a constant rate, which trlX writes as a cosine of endless period."""
    kwargs = {"lr": lr, "betas": (0.9, 0.95), "eps": 1.0e-8, "weight_decay": 1.0e-6}
    schedule = SchedulerConfig("cosine_annealing", {"T_max": 1e12, "eta_min": lr})
    return OptimizerConfig("adamw", kwargs), schedule


def default_ppo_config() -> TRLConfig:
    """Return the configuration of PPO on sentiments of film reviews."""
    optimizer, scheduler = _optimizer(3e-5)
    return TRLConfig(
        train=TrainConfig(
            seq_length=1024, epochs=100, total_steps=10000, batch_size=32, checkpoint_interval=10000, eval_interval=100,
            pipeline="PromptPipeline", trainer="AcceleratePPOTrainer",
        ),
        model=ModelConfig("lvwerra/gpt2-imdb", num_layers_unfrozen=2),
        tokenizer=TokenizerConfig("gpt2", truncation_side="right"),
        optimizer=optimizer,
        scheduler=scheduler,
        method=PPOConfig(
            name="PPOConfig", num_rollouts=128, chunk_size=128, ppo_epochs=4, init_kl_coef=0.001, target=None,
            horizon=10000, gamma=1, lam=0.95, cliprange=0.2, cliprange_value=0.2, vf_coef=1, scale_reward="ignored",
            ref_mean=None, ref_std=None, cliprange_reward=10,
            gen_kwargs={"max_new_tokens": 40, "top_k": 0, "top_p": 1.0, "do_sample": True},
        ),
    )  # fmt: skip


def default_ilql_config() -> TRLConfig:
    """Return the configuration of ILQL on sentiments of film reviews."""
    optimizer, scheduler = _optimizer(5e-5)
    return TRLConfig(
        train=TrainConfig(
            seq_length=64, epochs=100, total_steps=1000, batch_size=128, checkpoint_interval=1000, eval_interval=100,
            pipeline="PromptPipeline", trainer="AccelerateILQLTrainer",
        ),
        model=ModelConfig("gpt2", num_layers_unfrozen=-1),
        tokenizer=TokenizerConfig("gpt2", truncation_side="right"),
        optimizer=optimizer,
        scheduler=scheduler,
        method=ILQLConfig(
            name="ilqlconfig", tau=0.7, gamma=0.99, cql_scale=0.1, awac_scale=1, alpha=0.001, beta=0,
            steps_for_target_q_sync=5, two_qs=True,
            gen_kwargs={"max_new_tokens": 56, "top_k": 20, "beta": 1, "temperature": 1.0},
        ),
    )  # fmt: skip


def default_sft_config() -> TRLConfig:
    """Return the configuration of supervised fine-tuning."""
    optimizer, scheduler = _optimizer(1e-4)
    return TRLConfig(
        train=TrainConfig(
            seq_length=1024, epochs=100, total_steps=1000, batch_size=8, checkpoint_interval=10000, eval_interval=100,
            pipeline="PromptPipeline", trainer="AccelerateSFTTrainer",
        ),
        model=ModelConfig("gpt2", num_layers_unfrozen=-1),
        tokenizer=TokenizerConfig("gpt2", truncation_side="right"),
        optimizer=optimizer,
        scheduler=scheduler,
        method=SFTConfig(
            name="sftconfig", gen_kwargs={"max_new_tokens": 40, "top_k": 0, "top_p": 1.0, "do_sample": True}
        ),
    )  # fmt: skip


def default_rft_config() -> TRLConfig:
    """Return the configuration of rejection sampling, which trlX has in its example on random walks."""
    config = default_sft_config()
    config.train.trainer = "AccelerateRFTTrainer"
    config.method = RFTConfig(
        name="RFTConfig", n_generations_per_prompt=32, start_percentile=0.7, end_percentile=0.95, n_improve_steps=4,
        gen_kwargs={"max_new_tokens": 40, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "do_sample": True},
    )  # fmt: skip
    return config


def default_nemo_20b_config() -> TRLConfig:
    """Raise an error: trainkit has no NeMo."""
    raise NotImplementedError(
        "trainkit has no NeMo: take default_ppo_config() or default_ilql_config(), and divide the model with "
        "train.sharding of trainkit (docs/distributed.md)"
    )


default_nemo_2b_config = default_nemo_1_3b_config = default_nemo_20b_config
