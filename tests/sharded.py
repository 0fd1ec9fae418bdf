"""Runs of several processes that are compared: sharded and replicated ones, and those of other numbers of processes.

    torchrun --nproc_per_node=2 tests/sharded.py equal DIRECTORY CASES
    torchrun --nproc_per_node=N tests/sharded.py run DIRECTORY NAME SETTINGS

CASES is a JSON object: by name, the algorithm and settings of `tiny_trainer`. ``equal`` trains each replicated and by
FSDP2, and writes the largest difference of the weights after six steps to DIRECTORY/equal.json. ``run`` trains one, and
writes its whole weights and the optimizer's state to DIRECTORY/NAME-WORLD.pt.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from trainkit.testing.trainers import Letters, tiny_trainer

USUAL: dict[str, Any] = {
    "optimizer__lr": 1e-3,
    "optimizer__kwargs": {"eps": 1e-4},  # weights that cannot change the loss would move by the rounding of 0
    "train__eval_interval": 3,
    "train__save_interval": 3,
    "train__batch_size": 8,
}
GAME = {"reward_fn": None, "environment": Letters}


def trained(name: str, place: Path, settings: dict[str, Any]) -> Any:
    """A trainer after its run."""
    changes = {**USUAL, **settings}
    if changes.pop("game", False):
        changes["arguments"] = GAME
    trainer = tiny_trainer(name, place, **changes)
    trainer.learn()
    return trainer


def whole(trainer: Any) -> dict[str, torch.Tensor]:
    """A copy of the whole weights."""
    with trainer.sharding.whole():
        return {name: tensor.detach().clone() for name, tensor in trainer.unwrapped.state_dict().items()}


def equal(root: Path, cases: dict[str, Any]) -> None:
    """Train each case twice."""
    found = {}
    for index, (case, (name, settings)) in enumerate(cases.items()):
        ends = [
            whole(trained(name, root / f"{index}-{sharding}", {**settings, "train__sharding": sharding}))
            for sharding in ("none", "fsdp2")
        ]
        found[case] = max(float((ends[0][key].float() - ends[1][key].float()).abs().max()) for key in ends[0])
        if os.environ["RANK"] == "0":
            (root / "equal.json").write_text(json.dumps(found))


def run(root: Path, name: str, settings: dict[str, Any]) -> None:
    """Train, and write what the processes have together."""
    place = settings.pop("place", "run")
    trainer = trained(name, root / place, settings)
    weights, optimizer = whole(trainer), trainer.sharding.optimizer_state(trainer.optimizer)
    if os.environ["RANK"] == "0":
        kept = {"weights": weights, "optimizer": optimizer["state"], "resumed": trainer.resumed}
        torch.save(kept, root / f"{name}-{os.environ['WORLD_SIZE']}.pt")


def main(what: str, root: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    if what == "equal":
        equal(Path(root), json.loads(arguments[0]))
    else:
        run(Path(root), arguments[0], json.loads(arguments[1]))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
