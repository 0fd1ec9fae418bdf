"""A run of two processes of which one is out of memory with more than two rows.

    torchrun --nproc_per_node=2 tests/scarce.py DIRECTORY

It writes the weights of a run with micro-batches of two rows, and of one that finds them, to DIRECTORY.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from trainkit.testing.trainers import tiny_trainer

FULL = "DefaultCPUAllocator: can't allocate memory"


def main(root: Path) -> None:
    """Train both."""
    for name, size in (("fixed", 2), ("scarce", "auto")):
        trainer = tiny_trainer("sft", root / name, train__microbatch_size=size)
        scarce = name == "scarce" and trainer.accelerator.process_index == 1

        def fail(_: Any, __: Any, kwargs: Any, scarce: bool = scarce) -> None:
            if scarce and len(kwargs["input_ids"]) > 2:
                raise RuntimeError(FULL)

        trainer.models.load_policy().model.base_model.register_forward_pre_hook(fail, with_kwargs=True)
        trainer.learn()
        found = {key: tensor.detach().clone() for key, tensor in trainer.unwrapped.state_dict().items()}
        found["rows"] = trainer.gather([trainer.progress.microbatch])
        if trainer.accelerator.is_main_process:
            torch.save(found, root / f"{name}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
