"""Train a two-layer model with new_plugin: a few seconds on a CPU, no downloads."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import trainkit
from trainkit.testing import character_tokenizer, tiny_gpt2


def reward(outputs: list[str], **_: Any) -> list[float]:
    """Return the share of the letter a in each output of 8 letters."""
    return [output.count("a") / 8 for output in outputs]


if __name__ == "__main__":
    tokenizer = character_tokenizer("abcdefgh")
    trainer = trainkit.train(
        tiny_gpt2(len(tokenizer)),
        reward,
        prompts=["b", "cd", "efg"],
        eval_prompts=["b", "cd", "efg", "h"] * 4,
        tokenizer=tokenizer,
        config={
            "method": {"name": "rloo", "kl_coef": 0.0},
            "optimizer": {"lr": 3e-3},
            "rollout": {"max_new_tokens": 8, "num_rollouts": 64},
            "train": {"batch_size": 32, "total_steps": 100, "eval_interval": 50, "trackers": []},
        },
    )
    subprocess.run([Path(sys.executable).with_name("trainkit"), "new-plugin", str(trainer.run_dir)], check=True)
