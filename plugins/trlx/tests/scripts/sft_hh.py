# Fine-tuning on whole dialogues that are strings, with rewards of another function as a metric at evaluations
import json
import re
import sys

import trlx
from trlx.data.default_configs import TRLConfig, default_sft_config


def split_dialog(dialog):
    dialog = re.split(r"(H|A)", dialog)[1:]
    return ["".join(dialog[:-1]), dialog[-1]]


def create_reward_fn():
    def reward_fn(samples, prompts, outputs, **kwargs):
        return [float(output.count("a")) for output in outputs]

    return reward_fn


def main(hparams={}):
    default = default_sft_config().evolve(
        train=dict(seq_length=24, batch_size=16, total_steps=60, eval_interval=30, tracker=None),
        tokenizer=dict(truncation_side="left"),
        optimizer=dict(kwargs=dict(lr=3e-3)),
        scheduler=dict(kwargs=dict(eta_min=3e-3)),
        method=dict(gen_kwargs=dict(max_new_tokens=4, top_k=20, top_p=1.0, do_sample=True)),
    )
    config = TRLConfig.update(default, hparams)
    chosen = ["HbcAaa", "HdAaaHbAaa", "HecdAaa"] * 16
    reward_fn = create_reward_fn()
    return trlx.train(
        samples=chosen,
        config=config,
        eval_prompts=[split_dialog(sample)[0] for sample in chosen[:16]],
        metric_fn=lambda **kwargs: {"reward": reward_fn(**kwargs)},
        stop_sequences=["H", "A"],
    )


if __name__ == "__main__":
    hparams = {} if len(sys.argv) == 1 else json.loads(sys.argv[1])
    trainer = main(hparams)
