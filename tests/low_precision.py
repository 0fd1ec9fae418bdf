"""Trains weights of bfloat16 in some processes, and writes what they are on each to a directory.

torchrun --nproc_per_node=2 tests/low_precision.py DIRECTORY
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from trainkit.testing.trainers import tiny_trainer


def main(root: Path) -> None:
    """Train, and write weights and float32 copies."""
    trainer = tiny_trainer(
        "sft",
        root / f"run-{os.environ.get('WORLD_SIZE', '1')}",
        model__dtype="bfloat16",
        optimizer__name="sgd",
        optimizer__lr=0.1,
    )
    trainer.learn()
    found = {"weights": trainer.unwrapped.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    count, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
    torch.save(found, root / f"{count}-{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
