# PPO on an encoder-decoder, with every section of the configuration written out
import json
import sys

import trlx
from trlx.data.configs import (
    ModelConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainConfig,
    TRLConfig,
)
from trlx.models.modeling_ppo import PPOConfig

default_config = TRLConfig(
    train=TrainConfig(
        seq_length=24,
        epochs=100,
        total_steps=80,
        batch_size=16,
        checkpoint_interval=10000,
        eval_interval=40,
        pipeline="PromptPipeline",
        trainer="AcceleratePPOTrainer",
        save_best=False,
        tracker=None,
    ),
    model=ModelConfig(model_path="lvwerra/t5-imdb", num_layers_unfrozen=-1, model_arch_type="seq2seq"),
    tokenizer=TokenizerConfig(tokenizer_path="lvwerra/t5-imdb", padding_side="right", truncation_side="right"),
    optimizer=OptimizerConfig(
        name="adamw", kwargs={"lr": 3.0e-3, "betas": [0.9, 0.999], "eps": 1.0e-8, "weight_decay": 1.0e-6}
    ),
    scheduler=SchedulerConfig(name="cosine_annealing", kwargs={"T_max": 100000, "eta_min": 3.0e-3}),
    method=PPOConfig(
        name="PPOConfig",
        num_rollouts=32,
        chunk_size=16,
        ppo_epochs=2,
        init_kl_coef=0.0,
        target=None,
        horizon=10000,
        gamma=0.99,
        lam=0.95,
        cliprange=0.2,
        cliprange_value=0.2,
        vf_coef=1,
        scale_reward=None,
        ref_mean=None,
        ref_std=None,
        cliprange_reward=10,
        gen_kwargs={"max_new_tokens": 6, "do_sample": True, "top_k": 0, "top_p": 1, "eos_token_id": -1},
    ),
)


def get_positive_score(output):
    return float(output.count("a"))


def main(hparams={}):
    config = TRLConfig.update(default_config.to_dict(), hparams)

    def reward_fn(samples, prompts, outputs, **kwargs):
        return [get_positive_score(output) for output in outputs]

    return trlx.train(
        reward_fn=reward_fn,
        prompts=["bc", "cde", "d", "ef"] * 8,
        eval_prompts=["bc", "d"] * 8,
        config=config,
    )


if __name__ == "__main__":
    hparams = {} if len(sys.argv) == 1 else json.loads(sys.argv[1])
    trainer = main(hparams)
