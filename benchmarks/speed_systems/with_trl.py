"""The system TRL: its trainers, in their own environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)
from work import OFFLINE, Turns, Work, reward, serve

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
STEPS = 64
"""Steps of one pass over a dataset of samples."""


class Alternation(TrainerCallback):
    """A callback that ends the turn after every ``epochs`` optimizer steps."""

    def __init__(self, turns: Turns, work: Work) -> None:
        self.turns, self.epochs = turns, work.epochs

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Wait for the first turn."""
        self.turns.ready()

    def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        """End the turn, if its last optimizer step was made."""
        if state.global_step % self.epochs == 0:
            self.turns.end()


def arguments(work: Work) -> dict[str, Any]:
    """Return the arguments of all trainers: no logging or saving, and no end of training."""
    order = {"train_sampling_strategy": "sequential"} if work.case in OFFLINE else {}
    rows = work.rows // work.samples if work.case == "online-dpo" else work.rows
    passes = rows // work.microbatch if work.microbatch else 1
    return {
        **order,
        "output_dir": f"run-{work.system}",
        "use_cpu": work.device == "cpu",
        "bf16": work.precision == "bf16",
        "gradient_checkpointing": work.system == "trl-recompute",
        "per_device_train_batch_size": rows // passes,
        "gradient_accumulation_steps": passes,
        "max_steps": 10**6,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "model_init_kwargs": {"dtype": "float32"},
    }


def grouped(trainer_class: Any, config_class: Any) -> Callable[[Work, Turns, str], Any]:
    """Return a function that creates a trainer with one collection per step."""

    def create(work: Work, turns: Turns, model: str) -> Any:
        sizes = {"num_generations": work.samples, "max_completion_length": work.new}
        trainer = trainer_class(
            model=model,
            reward_funcs=reward,
            args=config_class(**arguments(work), **sizes),
            train_dataset=Dataset.from_dict({"prompt": work.texts(256, work.prompt)}),
            processing_class=work.tokenizer(),
        )
        turns.time(trainer, "_generate", "generate")
        turns.time(trainer, "_get_per_token_logps_and_entropies", phase_of(trainer))
        return trainer

    return create


def phase_of(trainer: Any) -> Callable[..., str]:
    """Return a function that tells from the model which phase a pass is of."""

    def phase(network: Any, *_: Any, **__: Any) -> str:
        return "reference" if network is trainer.ref_model else "forward" if torch.is_grad_enabled() else "old logprobs"

    return phase


def online_dpo(work: Work, turns: Turns, model: str) -> Any:
    """Create the trainer of online DPO, with two responses to each prompt."""
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    if work.samples != 2:
        raise ValueError(f"TRL's online DPO samples 2 responses to each prompt, not {work.samples}")
    sizes = {"max_new_tokens": work.new, "max_length": work.prompt + work.new, "temperature": 1.0}
    trainer = OnlineDPOTrainer(
        model=model,
        reward_funcs=reward,
        args=OnlineDPOConfig(**arguments(work), **sizes),
        train_dataset=Dataset.from_dict({"prompt": work.texts(256, work.prompt)}),
        processing_class=work.tokenizer(),
    )
    turns.time(trainer, "_generate", "generate")
    turns.time(trainer, "_forward", phase_of(trainer))
    return trainer


def on_samples(trainer_class: Any, config_class: Any) -> Callable[[Work, Turns, str], Any]:
    """Return a function that creates a trainer whose steps all train on the same rows."""

    def create(work: Work, turns: Turns, model: str) -> Any:
        rows: list[dict[str, Any]] = work.pairs_of_a_step() if trainer_class is not SFTTrainer else []
        if trainer_class is SFTTrainer:
            eos = work.tokenizer().eos_token_id
            ids = work.ids(work.rows, work.longest).tolist()
            rows = [{"input_ids": [*row[:length], eos]} for row, length in zip(ids, work.lengths(), strict=True)]
        trainer = trainer_class(
            model=model,
            args=config_class(**arguments(work), max_length=work.longest),
            train_dataset=Dataset.from_list(rows * STEPS),
            processing_class=work.tokenizer(),
        )
        if getattr(trainer, "ref_model", None) is not None:
            turns.time(trainer.ref_model, "forward", "reference")
        return trainer

    return create


TRAINERS: dict[str, Callable[[Work, Turns, str], Any]] = {
    "rloo": grouped(RLOOTrainer, RLOOConfig),
    "grpo": grouped(GRPOTrainer, GRPOConfig),
    "online-dpo": online_dpo,
    "sft": on_samples(SFTTrainer, SFTConfig),
    "dpo": on_samples(DPOTrainer, DPOConfig),
    "reward": on_samples(RewardTrainer, RewardConfig),
}


def run(work: Work, turns: Turns) -> None:
    """Make steps forever."""
    directory = str(Path(f"model-{work.system}").absolute())
    work.network().save_pretrained(directory)
    trainer = TRAINERS[work.case](work, turns, directory)
    turns.time(trainer, "compute_loss", "forward")
    turns.time(trainer.accelerator, "backward", "backward")
    trainer.create_optimizer_and_scheduler(10**6)
    turns.time(trainer.optimizer, "step", "optimizer")
    trainer.add_callback(Alternation(turns, work))
    trainer.train()


if __name__ == "__main__":
    serve(run)
