"""The system trlX: its PPO, in an environment of its own.

A turn is an epoch of its loop, which makes the updates of a collection and then samples the next one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import trlx
from trlx.data.default_configs import default_ppo_config
from trlx.trainer.accelerate_ppo_trainer import AcceleratePPOTrainer
from work import Turns, Work, reward, serve


def end_turns(turns: Turns) -> None:
    """Let every epoch of trlX's loop end a turn; before the first turn it makes one."""
    inner, made = AcceleratePPOTrainer.post_epoch_callback, []

    def ended(self: Any, *args: Any) -> None:
        inner(self, *args)
        turns.end() if made else turns.ready()
        made.append(True)

    AcceleratePPOTrainer.post_epoch_callback = ended


def run(work: Work, turns: Turns) -> None:
    """Make steps forever."""
    directory = str(Path(f"model-{work.system}").absolute())
    work.network().save_pretrained(directory)
    work.tokenizer(ends=True).save_pretrained(directory)  # EOS outside the vocabulary would reach its embedding
    sampling = {"max_new_tokens": work.new, "min_new_tokens": work.new, "do_sample": True, "top_k": 0, "top_p": 1.0}
    never = 10**6
    config = default_ppo_config().evolve(
        train={
            "seq_length": work.prompt + work.new,
            "batch_size": work.rows,
            "total_steps": never,
            "epochs": never,
            "eval_interval": never,
            "checkpoint_interval": never,
            "checkpoint_dir": f"run-{work.system}",
            "save_best": False,
            "tracker": None,
        },
        model={"model_path": directory, "num_layers_unfrozen": -1},
        tokenizer={"tokenizer_path": directory},
        method={
            "num_rollouts": work.rows,
            "chunk_size": work.rows,
            "ppo_epochs": work.epochs,
            "gen_kwargs": sampling,
        },
    )
    end_turns(turns)
    prompts = work.texts(256, work.prompt)
    trlx.train(reward_fn=reward, prompts=prompts, eval_prompts=prompts[: work.rows], config=config)


if __name__ == "__main__":
    serve(run)
