"""The system TRL: its RLOO and SFT trainers, in their own environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer
from work import LENGTH, Turns, Work, reward, serve


class Alternation(TrainerCallback):
    """A callback that ends the turn after every optimizer step."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Wait for the first turn."""
        self.turns.ready()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """End the turn."""
        self.turns.end()


def arguments(work: Work) -> dict[str, Any]:
    """Return the arguments of both trainers: float32 on the CPU, no logging or saving, and no end of training."""
    return {
        "output_dir": f"run-{work.system}",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": work.system == "trl-recompute",
        "per_device_train_batch_size": work.sft_rows if work.case == "sft" else work.rows,
        "max_steps": 10**6,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "model_init_kwargs": {"dtype": "float32"},
    }


def rloo(work: Work, turns: Turns, model: str) -> RLOOTrainer:
    """Create the RLOO trainer, with one collection per step."""
    sizes = {"num_generations": work.samples, "max_completion_length": work.new}
    trainer = RLOOTrainer(
        model=model,
        reward_funcs=reward,
        args=RLOOConfig(**arguments(work), **sizes),
        train_dataset=Dataset.from_dict({"prompt": work.texts(256, work.prompt)}),
        processing_class=work.tokenizer(),
    )

    def phase(network: Any, *_: Any, **__: Any) -> str:
        return "reference" if network is trainer.ref_model else "forward" if torch.is_grad_enabled() else "old logprobs"

    turns.time(trainer, "_generate", "generate")
    turns.time(trainer, "_get_per_token_logps_and_entropies", phase)
    return trainer


def sft(work: Work, model: str) -> SFTTrainer:
    """Create the SFT trainer, on rows without padding."""
    return SFTTrainer(
        model=model,
        args=SFTConfig(**arguments(work), max_length=LENGTH),
        train_dataset=Dataset.from_dict({"input_ids": work.ids(64, LENGTH).tolist()}),
        processing_class=work.tokenizer(),
    )


def run(work: Work, turns: Turns) -> None:
    """Make steps forever."""
    directory = str(Path(f"model-{work.system}").absolute())
    work.network().save_pretrained(directory)
    trainer = rloo(work, turns, directory) if work.case == "rloo" else sft(work, directory)
    turns.time(trainer, "compute_loss", "forward")
    turns.time(trainer.accelerator, "backward", "backward")
    trainer.create_optimizer_and_scheduler(10**6)
    turns.time(trainer.optimizer, "step", "optimizer")
    trainer.add_callback(Alternation(turns))
    trainer.train()


if __name__ == "__main__":
    serve(run)
