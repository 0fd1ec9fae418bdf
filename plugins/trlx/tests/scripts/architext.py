# PPO on designs with as few rooms as possible: rewards are whole numbers, and evaluations are of the prompts
import json
import os
import pathlib
import sys

import trlx
import yaml
from trlx.data.configs import TRLConfig


def reward_fn(samples, **kwargs):
    "Return minus the number of rooms of each sample"
    return [-sample.count("h") for sample in samples]


prompts = ["abc", "bcd", "acd", "bac", "cab", "dab"]

config_path = pathlib.Path(os.environ["SCRIPTS"]).joinpath("configs/ppo_config.yml")
with config_path.open() as f:
    default_config = yaml.safe_load(f)


def main(hparams={}):
    model_path = hparams.pop("model.model_path", "architext/gptj-162M")
    config = TRLConfig.update(default_config, hparams)

    return trlx.train(model_path, reward_fn=reward_fn, prompts=prompts * 8, config=config)


if __name__ == "__main__":
    hparams = {} if len(sys.argv) == 1 else json.loads(sys.argv[1])
    trainer = main(hparams)
