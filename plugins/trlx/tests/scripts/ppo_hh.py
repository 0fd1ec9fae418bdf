# PPO on dialogues: prompts with the answer of a dataset, rewards relative to that answer's
import json
import sys

import trlx
from trlx.data.default_configs import TRLConfig, default_ppo_config

default_config = default_ppo_config().evolve(
    train=dict(seq_length=24, batch_size=16, epochs=100, total_steps=60, eval_interval=30, checkpoint_interval=1000,
               save_best=False, tracker=None),
    model=dict(num_layers_unfrozen=2),
    tokenizer=dict(truncation_side="left"),
    optimizer=dict(name="adamw", kwargs=dict(lr=3e-3, betas=(0.9, 0.95), eps=1.0e-8, weight_decay=1.0e-6)),
    scheduler=dict(name="cosine_annealing", kwargs=dict(T_max=10000, eta_min=3e-3)),
    method=dict(num_rollouts=32, chunk_size=16, ppo_epochs=4, init_kl_coef=0.0, target=None, horizon=10000, gamma=1,
                lam=0.95, cliprange=0.2, cliprange_value=0.2, vf_coef=1, scale_reward="running",
                cliprange_reward=10, gen_kwargs=dict(max_new_tokens=6, top_k=0, top_p=1.0, do_sample=True)),
)  # fmt: skip

dialogues = [("HbcA", "aag"), ("HdA", "a"), ("HecdA", "gg")]


def main(hparams={}):
    config = TRLConfig.update(default_config, hparams)
    prompts = [{"prompt": prompt, "original_output": chosen} for prompt, chosen in dialogues * 8]

    def helpful(outputs):
        return [output.count("a") - output.count("g") for output in outputs]

    def reward_fn(samples, prompts, outputs, original_output, tokenizer, **kwargs):
        assert all(sample.startswith(prompt) for sample, prompt in zip(samples, prompts))
        original = helpful(original_output)
        return [float(one - other) for one, other in zip(helpful(outputs), original)]

    return trlx.train(
        prompts=prompts,
        eval_prompts=prompts[:12],
        reward_fn=reward_fn,
        metric_fn=lambda outputs, original_output, **kwargs: {
            "longer": [float(len(one) > len(other)) for one, other in zip(outputs, original_output)]
        },
        config=config,
        stop_sequences=["H", "A"],
    )


if __name__ == "__main__":
    hparams = {} if len(sys.argv) == 1 else json.loads(sys.argv[1])
    trainer = main(hparams)
