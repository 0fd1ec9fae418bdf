# PPO on translation with an encoder-decoder: the word of a letter is its capital. Rewards are of whole sentences, found
# by the decoded prompt; the metrics are those of the corpus, one number each
import json
import sys

import trlx
from transformers import AutoTokenizer
from trlx.data.default_configs import TRLConfig, default_ppo_config

default_config = default_ppo_config().evolve(
    train=dict(seq_length=16, epochs=100, total_steps=80, batch_size=16, checkpoint_interval=10000, eval_interval=40,
               save_best=False, tracker=None),
    model=dict(model_path="t5-large", model_arch_type="seq2seq", num_layers_unfrozen=-1),
    tokenizer=dict(tokenizer_path="t5-large", truncation_side="right"),
    optimizer=dict(kwargs=dict(lr=3e-3, betas=[0.9, 0.999])),
    scheduler=dict(kwargs=dict(eta_min=3e-3)),
    method=dict(num_rollouts=32, chunk_size=32, ppo_epochs=4, init_kl_coef=0.0, target=None, gamma=0.99,
                scale_reward=None, gen_kwargs=dict(max_new_tokens=2),
                gen_experience_kwargs=dict(max_new_tokens=2, do_sample=True, temperature=1.0, top_k=0)),
)  # fmt: skip

PREFIX = "bbb"


def main(hparams={}):
    config = TRLConfig.update(default_config, hparams)
    pairs = [("h", "H"), ("a", "A")]
    tokenizer = AutoTokenizer.from_pretrained(config.tokenizer.tokenizer_path)
    tokenizer.padding_side = "left"
    max_length = config.train.seq_length - config.method.gen_kwargs["max_new_tokens"]
    translation_map = {}
    for source, target in pairs:
        ids = tokenizer(PREFIX + source, truncation=True, max_length=max_length, add_special_tokens=False)["input_ids"]
        translation_map[tokenizer.decode(ids, skip_special_tokens=True).strip()] = {"src": source, "tgt": target}

    def hits(prompts, outputs):
        originals = [translation_map[prompt.strip()] for prompt in prompts]
        return [output.strip().count(each["tgt"]) / 2 for each, output in zip(originals, outputs)]

    def reward_fn(samples: list[str], prompts: list[str], outputs: list[str]) -> list[float]:
        return hits(prompts, outputs)

    def metric_fn(samples: list[str], prompts: list[str], outputs: list[str]):
        found = hits(prompts, outputs)
        return {"bleu": sum(found) / len(found), "longest": max(map(len, outputs))}

    prompts = [PREFIX + source for source, _ in pairs] * 16
    return trlx.train(
        reward_fn=reward_fn, metric_fn=metric_fn, prompts=prompts, eval_prompts=prompts[:16], config=config
    )


if __name__ == "__main__":
    hparams = {} if len(sys.argv) == 1 else json.loads(sys.argv[1])
    trainer = main(hparams)
