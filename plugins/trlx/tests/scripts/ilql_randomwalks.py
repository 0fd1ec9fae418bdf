# ILQL on random walks, with a configuration from a file and a dataset of walks and rewards
import json
import os
import sys

import trlx
import yaml
from transformers import GPT2Config
from trlx.data.configs import TRLConfig

sys.path.insert(0, os.environ["SCRIPTS"])
from walks import generate_walks

with open(os.path.join(os.environ["SCRIPTS"], "configs", "ilql_randomwalks.yml")) as file:
    default_config = yaml.safe_load(file)


def main(hparams={}):
    config = TRLConfig.update(default_config, hparams)
    metric_fn, eval_prompts, walks = generate_walks(seed=config.train.seed)
    rewards = metric_fn(walks)["optimality"]
    # each walk is its beginning and the rest
    walks = [[walk[:1], walk[1:]] for walk in walks]

    return trlx.train(
        model_path=GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=13),
        dataset=(walks, rewards),
        eval_prompts=eval_prompts * 4,
        metric_fn=metric_fn,
        config=config,
    )


if __name__ == "__main__":
    hparams = {} if len(sys.argv) == 1 else json.loads(sys.argv[1])
    trainer = main(hparams)
