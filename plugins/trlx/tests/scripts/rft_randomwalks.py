# Rejection sampling on random walks, from a model that has seen walks, with the configuration written out
import json
import os
import sys

import trlx
from trlx.data.default_configs import (
    ModelConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainConfig,
    TRLConfig,
    default_sft_config,
)
from trlx.trainer.accelerate_rft_trainer import RFTConfig

sys.path.insert(0, os.environ["SCRIPTS"])
from walks import generate_walks

default_config = TRLConfig(
    train=TrainConfig(
        seq_length=8,
        epochs=100,
        total_steps=50,
        batch_size=50,
        checkpoint_interval=10000,
        eval_interval=25,
        pipeline="PromptPipeline",
        trainer="AccelerateRFTTrainer",
        checkpoint_dir="/tmp/ckpts",
        tracker=None,
    ),
    model=ModelConfig(model_path="CarperAI/randomwalks", num_layers_unfrozen=-1),
    tokenizer=TokenizerConfig(tokenizer_path="CarperAI/randomwalks", truncation_side="right"),
    optimizer=OptimizerConfig(name="adamw", kwargs=dict(lr=1.0e-3, betas=(0.9, 0.99), eps=1.0e-8, weight_decay=0)),
    scheduler=SchedulerConfig(name="cosine_annealing", kwargs=dict(T_max=10000, eta_min=1.0e-3)),
    method=RFTConfig(
        name="RFTConfig",
        n_generations_per_prompt=40,
        start_percentile=0.7,
        end_percentile=0.95,
        n_improve_steps=2,
        gen_kwargs=dict(max_new_tokens=6, top_k=0, top_p=1.0, temperature=1.0, do_sample=True),
    ),
)


def main(hparams={}):
    config = TRLConfig.update(default_config, hparams)
    metric_fn, prompts, walks = generate_walks(seed=config.train.seed)
    start = default_sft_config().evolve(
        train=dict(total_steps=40, epochs=100, batch_size=50, seq_length=8, eval_interval=100, tracker=None,
                   checkpoint_dir=config.train.checkpoint_dir + "_sft"),
        model=dict(model_path=config.model.model_path), tokenizer=dict(tokenizer_path=config.tokenizer.tokenizer_path),
        optimizer=dict(kwargs=dict(lr=2e-3)), scheduler=dict(kwargs=dict(eta_min=2e-3)),
        method=dict(gen_kwargs=dict(max_new_tokens=6)),
    )  # fmt: skip
    trlx.train(samples=walks, config=start).save_pretrained(config.train.checkpoint_dir + "_start")
    config.model.model_path = config.train.checkpoint_dir + "_start"

    return trlx.train(
        reward_fn=lambda samples, **kwargs: metric_fn(samples)["optimality"],
        prompts=prompts,
        eval_prompts=prompts * 8,
        metric_fn=lambda samples, **kwargs: metric_fn(samples),
        config=config,
    )


if __name__ == "__main__":
    hparams = {} if len(sys.argv) == 1 else json.loads(sys.argv[1])
    trainer = main(hparams)
