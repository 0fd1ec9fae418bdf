"""The system trainkit: `trainkit.train`, and `trainer.generate` for generation, timed by a callback."""

from __future__ import annotations

from typing import Any

from work import OFFLINE, PACKED, Turns, Work, reward, serve

import trainkit
from trainkit.config import ModelConfig

FROZEN = "num_layers_unfrozen"
"""The setting of ``trainkit-frozen``, in which only 2 layers are trained."""
PASSES = ("trainkit-joined", "trainkit-padded")
"""Systems whose rows are run without padding, or with it, on any device."""
METHODS: dict[str, dict[str, Any]] = {
    "generate": {"name": "sft"},
    "sft-packed": {"name": "sft", "packing": True},
    "online-dpo": {"name": "online_dpo"},
    "rft": {"name": "rft", "n_improve_steps": 1},
}
"""The methods of cases of another name. Every collection of RFT samples; the others would train on its pools."""
GROUPS = {"rloo": "rloo_k", "grpo": "group_size", "online-dpo": "k", "rft": "rft_k"}
"""The settings for the number of responses to a prompt."""


class Alternation:
    """A callback that ends the turn after every collection; offline after every ``epochs`` steps."""

    def __init__(self, turns: Turns, work: Work) -> None:
        self.turns, self.work = turns, work

    @trainkit.hookimpl
    def on_train_begin(self, trainer: Any) -> None:
        """Time the phases, and wait for the first turn."""
        turns = self.turns
        if trainer.online:
            turns.time(trainer.sampling.engine, "submit", "generate")
            turns.time(trainer, "behaviour", "old logprobs")
            if trainer.needs_reference:
                turns.time(type(trainer.reference), "__call__", "reference")
        turns.time(trainer, "loss", "forward")
        turns.time(trainer.accelerator, "backward", "backward")
        turns.time(trainer.optimizer, "step", "optimizer")
        turns.ready()

    @trainkit.hookimpl
    def on_step(self, trainer: Any, step: int) -> None:
        """End the turn, if its last optimizer step was made."""
        if trainer.online and trainer.progress.epoch < trainer.passes:
            return
        if not trainer.online and step % self.work.epochs:
            return
        if self.work.case == "dpo":
            self.read_with_reference(trainer)
        self.turns.end()

    def read_with_reference(self, trainer: Any) -> None:
        """Repeat the reference's pass over the rows, which a run of DPO makes once, before its first step."""
        with self.turns.phase("reference"), trainer.inference():
            trainer.make_experience(trainer.pipeline.take(0, self.work.rows, rank=0, world=1))


def settings(work: Work) -> dict[str, Any]:
    """Return the config: the sizes of the work, no trackers, evaluations or saves, all else at its default."""
    frozen = {FROZEN: 2} if work.system == "trainkit-frozen" else {}
    method = METHODS.get(work.case, {"name": work.case})
    group = {GROUPS[work.case]: work.samples} if work.case in GROUPS else {}
    trained = {"online-dpo": work.rows // work.samples, "rft": work.rows // 2}  # a pair of each prompt, and the best
    trained |= {"sft-packed": work.rows // PACKED}
    train = {"batch_size": trained.get(work.case, work.rows), "total_steps": 10**6, "trackers": []}
    train |= {"seq_length": PACKED * work.longest} if work.case == "sft-packed" else {}
    train |= {"share_prompts": False} if work.system == "trainkit-separate" else {}
    train |= {"padding_free": work.system == "trainkit-joined"} if work.system in PASSES else {}
    train |= {"mixed_precision": "bf16"} if work.precision == "bf16" else {}
    train |= {"microbatch_size": work.microbatch} if work.microbatch else {}
    return {
        "method": {**method, **group},
        "model": frozen,
        "rollout": {"max_new_tokens": work.new, "min_new_tokens": work.new, "num_rollouts": work.rows},
        "train": {**train, "eval_interval": 0, "save_interval": 0, "run_dir": f"run-{work.system}"},
    }


def data(work: Work) -> dict[str, Any]:
    """Return the arguments of `trainkit.train` that are the data."""
    if work.case not in OFFLINE:
        return {"prompts": work.texts(256, work.prompt), "reward_fn": reward}
    if work.case in ("dpo", "reward"):
        return {"samples": work.pairs_of_a_step()}
    samples = work.samples_of_a_step()
    if work.case == "ilql":
        halves = [(sample[: len(sample) // 2], sample[len(sample) // 2 :]) for sample in samples]
        return {"samples": halves, "rewards": reward(outputs=samples)}
    return {"samples": samples}


def run(work: Work, turns: Turns) -> None:
    """Make steps forever."""
    if work.system == "trainkit-frozen" and FROZEN not in ModelConfig.model_fields:
        return turns.say(skip=f"this trainkit has no setting model.{FROZEN}")
    config, tokenizer = trainkit.TRLConfig.from_dict(settings(work)), work.tokenizer(ends=True)
    if work.case != "generate":
        callbacks = [Alternation(turns, work)]
        trainkit.train(work.network(), config=config, tokenizer=tokenizer, callbacks=callbacks, **data(work))
    config = config.evolve(model={"model_path": work.fields})
    trainer = trainkit.get_trainer("sft")(config, tokenizer=tokenizer)
    trainer.models.build()
    turns.time(trainer.sampling.engine, "submit", "generate")
    prompts = work.texts(work.rows, work.prompt)
    turns.ready()
    while True:
        trainer.generate(prompts)
        turns.end()


if __name__ == "__main__":
    serve(run)
