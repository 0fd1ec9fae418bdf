# Summarisation in three stages: fine-tuning, a reward model on comparisons, PPO with rewards relative to the summary
# that a person wrote. A post is letters; its good summary is its first letter, a bad one another letter.
import json
import os
import sys

import torch
import torch.nn as nn
import trlx
from transformers import AutoModelForCausalLM, AutoTokenizer
from trlx.data.default_configs import default_ppo_config, default_sft_config

hparams = json.loads(sys.argv[1])
MODEL_PATH = hparams["model_path"]
OUT = hparams["out"]
SFT_PATH = os.path.join(OUT, "sft")

posts = [first + second + third for first in "abcd" for second in "efgh" for third in "efgh"]
train_posts = [{"prompt": post + "\n", "label": post[0]} for post in posts]
comparisons = [
    {"prompt": row["prompt"], "chosen": row["label"], "rejected": wrong}
    for row in train_posts
    for wrong in "abcd"
    if wrong != row["label"]
]


class GPTRewardModel(nn.Module):
    def __init__(self, model_path):
        super().__init__()
        model = AutoModelForCausalLM.from_pretrained(model_path)
        self.transformer = model.transformer
        self.v_head = nn.Linear(model.config.n_embd, 1, bias=False)

    def forward(self, input_ids):
        return self.v_head(self.transformer(input_ids)[0])[:, -1, 0]


def train_sft():
    config = default_sft_config().evolve(
        train=dict(
            seq_length=16,
            batch_size=16,
            total_steps=10,
            epochs=100,
            eval_interval=100,
            checkpoint_interval=1000,
            checkpoint_dir=os.path.join(OUT, "ckpts_sft"),
            save_best=False,
            tracker=None,
        ),
        model=dict(model_path=MODEL_PATH),
        tokenizer=dict(tokenizer_path=MODEL_PATH),
        optimizer=dict(kwargs=dict(lr=2e-3)),
        scheduler=dict(kwargs=dict(eta_min=2e-3)),
        method=dict(gen_kwargs=dict(max_new_tokens=1, do_sample=False)),
    )
    trainer = trlx.train(samples=[(row["prompt"], row["label"]) for row in train_posts], config=config)
    trainer.save_pretrained(SFT_PATH)


def train_reward_model(tokenizer):
    torch.manual_seed(0)
    model = GPTRewardModel(SFT_PATH)
    model.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    chosen = tokenizer([row["prompt"] + row["chosen"] for row in comparisons], return_tensors="pt")["input_ids"]
    rejected = tokenizer([row["prompt"] + row["rejected"] for row in comparisons], return_tensors="pt")["input_ids"]
    for _ in range(200):
        margins = model(chosen) - model(rejected)
        loss = -nn.functional.logsigmoid(margins).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, (margins > 0).float().mean().item()


def train_ppo(reward_model, tokenizer):
    config = default_ppo_config().evolve(
        train=dict(
            seq_length=16,
            batch_size=32,
            total_steps=160,
            epochs=400,
            eval_interval=40,
            checkpoint_interval=1000,
            checkpoint_dir=os.path.join(OUT, "ckpts_ppo"),
            save_best=True,
            tracker=None,
        ),
        model=dict(model_path=SFT_PATH, num_layers_unfrozen=1),
        tokenizer=dict(tokenizer_path=SFT_PATH, truncation_side="right"),
        optimizer=dict(kwargs=dict(lr=3e-3)),
        scheduler=dict(kwargs=dict(eta_min=3e-3)),
        method=dict(
            num_rollouts=64,
            chunk_size=32,
            ppo_epochs=4,
            init_kl_coef=0.01,
            target=None,
            scale_reward=None,
            gen_kwargs=dict(max_new_tokens=1, top_k=0, top_p=1.0, do_sample=True),
        ),
    )

    @torch.no_grad()
    def get_scores(samples):
        ids = tokenizer(samples, return_tensors="pt", padding=True)["input_ids"]
        return reward_model(ids)

    post_summary_dict = {row["prompt"].strip(): row["label"] for row in train_posts}

    def reward_fn(samples, prompts, outputs, **kwargs):
        original_samples = [prompt + post_summary_dict[prompt.strip()] for prompt in prompts]
        outputs = [output.replace(tokenizer.eos_token, "").strip() for output in outputs]
        written = [prompt + (output or "h")[0] for prompt, output in zip(prompts, outputs)]
        return get_scores(written) - get_scores(original_samples)

    prompts = [row["prompt"] for row in train_posts]
    return trlx.train(reward_fn=reward_fn, prompts=prompts, eval_prompts=prompts, config=config)


if __name__ == "__main__":
    train_sft()
    tokenizer = AutoTokenizer.from_pretrained(SFT_PATH)
    reward_model, accuracy = train_reward_model(tokenizer)
    trainer = train_ppo(reward_model, tokenizer)
