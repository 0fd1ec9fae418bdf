"""The system trainkit: `trainkit.train`, and `trainer.generate` for generation, timed by a callback."""

from __future__ import annotations

from typing import Any

from work import LENGTH, Turns, Work, reward, serve

import trainkit
from trainkit.config import ModelConfig

FROZEN = "num_layers_unfrozen"
"""The setting of ``trainkit-frozen``, in which only 2 layers are trained."""


class Alternation:
    """A callback that ends the turn after every ``updates`` optimizer steps."""

    def __init__(self, turns: Turns, updates: int) -> None:
        self.turns, self.updates = turns, updates

    @trainkit.hookimpl
    def on_train_begin(self, trainer: Any) -> None:
        """Time the phases, and wait for the first turn."""
        turns = self.turns
        if trainer.online:
            turns.time(trainer.engine, "submit", "generate")
            turns.time(trainer, "behaviour", "old logprobs")
            turns.time(type(trainer.reference), "__call__", "reference")
        turns.time(trainer, "loss", "forward")
        turns.time(trainer.accelerator, "backward", "backward")
        turns.time(trainer.optimizer, "step", "optimizer")
        turns.ready()

    @trainkit.hookimpl
    def on_step(self, step: int) -> None:
        """End the turn, if its last optimizer step was made."""
        if step % self.updates == 0:
            self.turns.end()


def settings(work: Work) -> dict[str, Any]:
    """Return the config: the sizes of the work, no trackers, evaluations or saves, all else at its default."""
    sft = work.case == "sft"
    frozen = {FROZEN: 2} if work.system == "trainkit-frozen" else {}
    train = {"batch_size": work.sft_rows if sft else work.rows, "total_steps": 10**6, "trackers": []}
    return {
        "method": "sft" if work.case == "generate" else work.case,
        "model": {"model_path": work.fields, **frozen},
        "rollout": {"max_new_tokens": work.new, "num_rollouts": work.rows},
        "train": {**train, "eval_interval": 0, "save_interval": 0, "run_dir": f"run-{work.system}"},
    }


def run(work: Work, turns: Turns) -> None:
    """Make steps forever."""
    if work.system == "trainkit-frozen" and FROZEN not in ModelConfig.model_fields:
        return turns.say(skip=f"this trainkit has no setting model.{FROZEN}")
    config, tokenizer = trainkit.TRLConfig.from_dict(settings(work)), work.tokenizer()
    if work.case == "generate":
        trainer = trainkit.get_trainer("sft")(config, tokenizer=tokenizer)
        turns.time(trainer.engine, "submit", "generate")
        prompts = work.texts(work.rows, work.prompt)
        turns.ready()
        while True:
            trainer.generate(prompts)
            turns.end()
    callbacks = [Alternation(turns, work.epochs if work.case == "ppo" else 1)]
    if work.case == "sft":
        trainkit.train(config=config, samples=work.texts(64, LENGTH), tokenizer=tokenizer, callbacks=callbacks)
    prompts = work.texts(256, work.prompt)
    return trainkit.train(config=config, prompts=prompts, reward_fn=reward, tokenizer=tokenizer, callbacks=callbacks)


if __name__ == "__main__":
    serve(run)
