"""What two processes do in the checks of shardings, each with a model that they divide."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.errors import NonFiniteError
from trainkit.testing.trainers import tiny_trainer
from trainkit.trainer.base import Verdict
from trainkit.trainer.sharding import whole_tensor
from trainkit_kit.checks.tools import weights

Said = dict[str, Any]
USUAL: Said = {
    "optimizer__kwargs": {"eps": 1e-4},  # weights that cannot change the loss would move by the rounding of 0
    "train__eval_interval": 3,
    "train__max_grad_norm": 0.1,
    "train__microbatch_size": 3,
}
"""Settings of every run: gradients are clipped and accumulated."""
SKIPPED, FAILED = 2, 3
"""The step that `judge` skips, and the one with a loss that is not finite, counted from 0."""


def _made(folder: Path, given: Said, place: str, entry: Any, **changes: Any) -> Any:
    settings = {**USUAL, "train__sharding": entry, **given.get("settings", {}), **changes}
    return tiny_trainer(given["method"], folder / place, **settings)


def whole(trainer: Any) -> Said:
    """Return a copy of the weights and of the optimizer's state, with whole tensors; the state on the main process."""
    state = trainer.sharding.optimizer_state(trainer.optimizer)["state"]
    found = {key: {name: copy.deepcopy(whole_tensor(x)) for name, x in each.items()} for key, each in state.items()}
    with trainer.sharding.unsharded():
        return {"weights": weights(trainer), "optimizer": found}


def ends(folder: Path, given: Said) -> Said:
    """Train each of the cases replicated and divided, and return how the runs end. `judge` skips a step.

    A case is an algorithm and settings.
    """
    found: Said = {}
    for index, (case, (method, settings)) in enumerate(given["cases"].items()):
        own, found[case] = {**given, "method": method, "settings": settings}, {}
        for place, entry in (("replicated", "none"), ("divided", given["sharding"])):
            trainer = _made(folder / str(index), own, place, entry)
            judge = trainer.judge
            trainer.judge = lambda metrics, trainer=trainer, judge=judge: (
                Verdict.SKIP if trainer.progress.step == SKIPPED else judge(metrics)
            )
            trainer.learn()
            found[case][place] = whole(trainer)["weights"]
    return found


def fails(folder: Path, given: Said) -> Said:
    """Train until the loss of the second process is not finite, and return the weights before and after that step."""
    trainer = _made(folder, given, "failing", given["sharding"])
    loss, before = trainer.loss, {}

    def spoilt(batch: Any) -> tuple[Tensor, Any]:
        value, metrics = loss(batch)
        spoils = trainer.progress.step == FAILED and trainer.accelerator.process_index == 1
        return (value * torch.nan if spoils else value), metrics

    def update(batch: Any, update: Callable[..., Any] = trainer.update) -> Any:
        before.update(whole(trainer))
        return update(batch)

    trainer.loss, trainer.update = spoilt, update
    try:
        trainer.learn()
    except NonFiniteError as error:
        return {"error": str(error), "step": trainer.progress.step, "before": before, "after": whole(trainer)}
    return {"error": ""}


def resumes(folder: Path, given: Said) -> Said:
    """Resume checkpoints of a replicated run by a divided one, and the other way round."""
    found = {}
    entries = {"replicated": "none", "divided": given["sharding"]}
    for first, then in (("replicated", "divided"), ("divided", "replicated")):
        started = _made(folder, given, first, entries[first], train__save_interval=3, train__total_steps=3)
        started.learn()
        other = _made(folder, given, first, entries[then], train__save_interval=3, train__resume="auto")
        other.begin()
        found[then] = {"written": whole(started), "read": whole(other)}
        other.learn()
        found[then]["end"] = whole(other)
    return found


def draws(folder: Path, given: Said) -> Said:
    """Let the first process draw twice and the second one once; return what they drew, replicated and divided."""
    found = {}
    for place, entry in (("replicated", "none"), ("divided", given["sharding"])):
        trainer = _made(folder, given, place, entry)
        trainer.models.build()  # all processes make it together
        with trainer.inference():
            times = 2 - trainer.accelerator.process_index
            drawn = [trainer.generate(["ab", "cde"]).sequences.input_ids for _ in range(times)]
        found[place] = drawn
    return found


WHAT: dict[str, Callable[[Path, Said], Said]] = {"ends": ends, "fails": fails, "resumes": resumes, "draws": draws}
"""What can be asked of two processes."""
