"""Runs of several processes that are compared: sharded and replicated ones, and those of other numbers of processes.

    torchrun --nproc_per_node=2 tests/sharded.py equal DIRECTORY CASES
    torchrun --nproc_per_node=N tests/sharded.py run DIRECTORY NAME SETTINGS

CASES is a JSON object: by name, the algorithm and settings of `tiny_trainer`; with ``"divided": true`` the model must
never be gathered; ``"replicated"`` are settings of the replicated run alone. ``equal`` trains each replicated and by
FSDP2, and writes the largest difference of weights and exports after six steps to DIRECTORY/equal.json. ``run`` trains
one, and writes what the processes have together at its beginning and its end to DIRECTORY/NAME-WORLD.pt.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import researchers.copying
import researchers.critics
import researchers.dapo  # noqa: F401  (registers it)
import trainkit
from trainkit.testing.trainers import Letters, tiny_trainer
from trainkit.trainer.sharding import whole_tensor

USUAL: dict[str, Any] = {
    "optimizer__lr": 1e-3,
    "optimizer__kwargs": {"eps": 1e-4},  # weights that cannot change the loss would move by the rounding of 0
    "train__eval_interval": 3,
    "train__save_interval": 3,
    "train__batch_size": 8,
}
GAME = {"reward_fn": None, "environment": Letters}


def made(name: str, place: Path, settings: dict[str, Any], **arguments: Any) -> Any:
    """A trainer."""
    changes = {**USUAL, **settings}
    if changes.pop("game", False):
        changes["arguments"] = GAME
    return tiny_trainer(name, place, **arguments, **changes)


def whole(trainer: Any) -> dict[str, torch.Tensor]:
    """A copy of the whole weights."""
    with trainer.sharding.unsharded():
        return {name: tensor.detach().clone() for name, tensor in trainer.unwrapped.state_dict().items()}


def exact(trainer: Any) -> dict[str, torch.Tensor]:
    """A copy of the whole parameters, as the optimizer steps them."""
    masters = getattr(trainer.optimizer.optimizer, "_masters", {})
    named = trainer.unwrapped.named_parameters()
    return {name: whole_tensor(masters.get(each, each).detach()).clone() for name, each in named}


def state(trainer: Any) -> dict[str, Any]:
    """A copy of weights and the optimizer's state, whole."""
    optimizer = trainer.sharding.optimizer_state(trainer.optimizer)["state"]
    found = {key: {name: copy.deepcopy(whole_tensor(x)) for name, x in each.items()} for key, each in optimizer.items()}
    return {"weights": exact(trainer), "optimizer": found}


def equal(root: Path, cases: dict[str, Any]) -> None:
    """Train each case twice."""
    found = {}
    for index, (case, (name, settings)) in enumerate(cases.items()):
        ends, exports = [], []
        keeps_sharded, whole_alone = settings.pop("divided", False), settings.pop("replicated", {})
        for sharding in ("none", "fsdp2"):
            settings |= whole_alone if sharding == "none" else dict.fromkeys(whole_alone)
            watched = sharding == "fsdp2" and not settings.get("train__gradient_checkpointing")  # gathers a block twice
            trainer = made(
                name, root / f"{index}-{sharding}", {**settings, "train__sharding": sharding},
                callbacks=[Division()] if watched else [],
            )  # fmt: skip
            gather = getattr(trainer.sharding, "_gather", None)
            if keeps_sharded and gather is not None:
                trainer.sharding._gather = refused
            trainer.learn()
            if gather is not None:
                trainer.sharding._gather = gather
            ends.append(exact(trainer) if whole_alone else whole(trainer))
            files = sorted((trainer.run_dir / "model").rglob("*.safetensors"))
            exports.append({f"{file.name} {key}": tensor for file in files for key, tensor in load_file(file).items()})
        assert exports[0].keys() == exports[1].keys() != set()
        if not whole_alone:  # exports are then of the same type
            ends = [{**end, **export} for end, export in zip(ends, exports, strict=True)]
        found[case] = max(float((ends[0][key].float() - ends[1][key].float()).abs().max()) for key in ends[0])
        if os.environ.get("RANK", "0") == "0":
            (root / "equal.json").write_text(json.dumps(found))


def refused() -> None:
    """Stand in for what gathers the model."""
    raise AssertionError("the model is gathered")


class Division:
    """Requires that blocks of all models are divided, and again when they have run, unless all are gathered."""

    @trainkit.hookimpl
    def on_train_begin(self, trainer: Any) -> None:
        def check(block: torch.nn.Module, *_: Any) -> None:
            divided = all(hasattr(each, "to_local") for each in block.parameters())
            assert divided or trainer.sharding.gathered, "a block is not divided"

        borrowing = {each.block for each in trainer.sharding._borrowed}
        for model in trainer.sharding._models:
            names = {name for each in model.modules() for name in getattr(each, "_no_split_modules", None) or ()}
            for block in model.modules():  # whose class has another name when it is divided
                if type(block).__name__.removeprefix("FSDP") in names and block not in borrowing:
                    check(block)
                    block.register_forward_hook(check)


class Beginning:
    """What the processes have when the run begins."""

    @trainkit.hookimpl
    def on_train_begin(self, trainer: Any) -> None:
        self.state = state(trainer)


def run(root: Path, name: str, settings: dict[str, Any]) -> None:
    """Train, and write what the processes have together."""
    beginning, place = Beginning(), settings.pop("place", "run")
    trainer = made(name, root / place, settings, callbacks=[beginning])
    trainer.learn()
    kept = {"begin": beginning.state, "end": state(trainer), "resumed": trainer.run.resumption.messages}
    if os.environ.get("RANK", "0") == "0":
        torch.save(kept, root / f"{name}-{os.environ.get('WORLD_SIZE', 1)}.pt")


def main(what: str, root: str, *arguments: str) -> None:
    torch.set_num_threads(1)
    if what == "equal":
        equal(Path(root), json.loads(arguments[0]))
    else:
        run(Path(root), arguments[0], json.loads(arguments[1]))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
