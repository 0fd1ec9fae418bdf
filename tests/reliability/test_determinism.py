"""A: equal seeds give equal runs, and a run that is resumed ends as one that was never stopped."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import trainkit
from killed import digest
from runs import USUAL, full, resumed_at, snapshot
from trainkit.data import Sequences
from trainkit.models.loading import load_model
from trainkit.models.policy import CausalPolicy
from trainkit.testing import tiny_gpt2, tiny_llama
from trainkit.testing.trainers import language_trainers, tiny_trainer

Figure = Callable[[str], None]
TESTS = Path(__file__).parents[1]


@pytest.fixture
def names(full: bool, drawn: int) -> list[str]:
    """PPO, RLOO, SFT and one more that is drawn; all algorithms with ``--full``."""
    every = trainkit.available_trainers()
    others = [name for name in every if name not in USUAL]
    return every if full else [*USUAL, random.Random(drawn).choice(others)]


class Stream:
    """A dataset that is read row by row."""

    def __iter__(self) -> Any:
        yield from ({"prompt": "abcdefgh"[index % 8], "completion": "ab" * (index % 3 + 1)} for index in range(32))


CASES: dict[str, dict[str, Any]] = {
    "dropout, micro-batches, partial epochs": {},
    "an adapter": {"model__peft_config": {"r": 2, "lora_dropout": 0.1}},
    "a stream": {},
}


def of_case(name: str, case: str, run_dir: Path, **changes: Any) -> Any:
    """A trainer of one of the cases."""
    trainer = full(name, run_dir, **CASES[case], **changes)
    if case == "a stream":
        trainer.add_samples(Stream())
    return trainer


def cases_of(name: str) -> list[str]:
    """The cases that an algorithm can have."""
    if name not in language_trainers():
        return ["dropout, micro-batches, partial epochs"]
    return [*CASES] if name == "sft" else [*CASES][:2]


ANOTHER = """
import json
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
sys.path[:0] = sys.argv[1:3]
from killed import digest
from test_determinism import cases_of, of_case
from runs import full

root, what = Path(sys.argv[3]), sys.argv[4]
for name in sys.argv[5:]:
    for case in cases_of(name) if what == "resumed" else [""]:
        if what == "again":
            trainer = full(name, root / "again" / name)
        else:
            trainer = of_case(name, case, root / what / name / case, train__resume="auto")
        trainer.learn()
        print("digest", json.dumps([name, case, digest(trainer), trainer.run.resumption.messages]))
"""


def another_process(root: Path, what: str, names: list[str]) -> list[tuple[str, str, str, list[str]]]:
    """Runs of a new process: algorithm, case, digest, and what it said of resuming."""
    command = [sys.executable, "-c", ANOTHER, str(TESTS), str(Path(__file__).parent), str(root), what, *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [tuple(json.loads(line[7:])) for line in done.stdout.splitlines() if line.startswith("digest ")]


def test_a1_a_new_process_ends_with_the_same_bits(names: list[str], figure: Figure, tmp_path: Path) -> None:
    """Equal seed, new process: weights and optimizer have equal SHA-256."""
    here = {}
    for name in names:
        trainer = full(name, tmp_path / name)
        trainer.learn()
        here[name] = digest(trainer)
    there = {name: found for name, _, found, _ in another_process(tmp_path, "again", names)}
    figure(f"{sum(there[name] == found for name, found in here.items())} of {len(here)} algorithms equal")
    assert there == here


def test_a2_stopped_after_a_collection_and_resumed(names: list[str], figure: Figure, tmp_path: Path) -> None:
    """Stopped, resumed by a new process: bit-equal; with dropout, micro-batches, partial epochs, LoRA, a stream."""
    straight: dict[tuple[str, str], str] = {}
    for name in names:
        for case in cases_of(name):
            trainer = of_case(name, case, tmp_path / "straight" / name / case)
            trainer.learn()
            straight[name, case] = digest(trainer)
            stopped = of_case(name, case, tmp_path / "resumed" / name / case, train__total_steps=6)
            stopped.learn()
            assert name not in USUAL or not stopped.progress.position, "six steps are whole passes"
    found = another_process(tmp_path, "resumed", names)
    equal = [straight[name, case] == bits and "at step 6" in said[0] for name, case, bits, said in found]
    figure(f"{sum(equal)} of {len(straight)} runs equal")
    assert all(equal)
    assert len(equal) == len(straight)


def test_a3_resumed_at_every_step(names: list[str], figure: Figure, tmp_path: Path) -> None:
    """Resumed at every optimizer step of twelve: bit-equal."""
    resumed = {name: resumed_at(name, range(1, 13), tmp_path / name) for name in names}
    figure(f"{sum(resumed.values())} of {12 * len(names)} steps, {len(names)} algorithms")
    assert set(resumed.values()) == {12}


FINISHED = """
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)
sys.path[:0] = sys.argv[1:3]
from test_determinism import finished_run

trainer = finished_run(sys.argv[4], Path(sys.argv[3]))
trainer.learn()
assert trainer.progress.step == 3
"""


def finished_run(name: str, run_dir: Path) -> Any:
    """A run of three steps with every kind of file."""
    changes = {"train__trackers": ["tensorboard"], "train__eval_interval": 2, "train__total_steps": 3}
    return full(name, run_dir, **changes, train__resume="auto")


def test_a4_a_finished_run_is_left_as_it_is(names: list[str], figure: Figure, tmp_path: Path) -> None:
    """Resuming a finished run makes no step and no file, and exits with 0."""
    files = 0
    for name in names:
        first = finished_run(name, tmp_path / name)
        first.learn()
        bits, before = digest(first), snapshot(tmp_path / name)
        again = finished_run(name, tmp_path / name)
        again.learn()
        assert digest(again) == bits
        assert snapshot(tmp_path / name) == before, name
        files += len(before)
    command = [sys.executable, "-c", FINISHED, str(TESTS), str(Path(__file__).parent), str(tmp_path / name), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert snapshot(tmp_path / name) == before
    figure(f"{len(names)} runs, {files} files unchanged; exit code {done.returncode}")


class Looks:
    """An observer that draws from the generators of everybody, and evaluates."""

    @trainkit.hookimpl
    def on_step(self, trainer: Any, step: int) -> None:
        random.random()
        torch.rand(3)
        if step == 4:
            trainer.evaluate()


OBSERVED: dict[str, dict[str, Any]] = {
    "evaluations": {"train__eval_interval": 1},
    "evaluations, less often": {"train__eval_interval": 5},
    "checkpoints": {"train__save_interval": 1},
    "checkpoints, fewer": {"train__save_interval": 4, "train__keep_checkpoints": 1},
    "checkpoints beside": {"train__save_interval": 2, "train__save_async": True},
    "the best": {"train__save_best": True, "train__eval_interval": 2},
    "a tracker": {"train__trackers": ["tensorboard"]},
    "an observer": {"callbacks": [Looks()]},
    "everything": {
        "train__eval_interval": 1,
        "train__save_interval": 1,
        "train__save_best": True,
        "train__trackers": ["tensorboard"],
        "callbacks": [Looks()],
    },
}


def test_a5_observing_changes_nothing(names: list[str], figure: Figure, tmp_path: Path) -> None:
    """Evaluations, checkpoints, trackers and observers, on or off and at any interval: weights bit-equal."""
    differing = []
    for name in names:
        quiet = full(name, tmp_path / name / "quiet", train__save_interval=0, train__eval_interval=0)
        quiet.learn()
        for what, changes in OBSERVED.items():
            given = {"train__save_interval": 0, "train__eval_interval": 0, **changes}
            if "reward_fn" not in trainkit.get_trainer(name).inputs:  # there is no best one
                given["train__save_best"] = False
            seen = full(name, tmp_path / name / what, **given)
            seen.learn()
            differing += [(name, what)] if digest(seen) != digest(quiet) else []
    figure(f"{len(names)} x {len(OBSERVED)} runs, {len(differing)} different")
    assert differing == []


def test_a6_micro_batches_change_nothing(names: list[str], figure: Figure, tmp_path: Path) -> None:
    """However a batch of eight is split into micro-batches, weights after six steps are within 1e-5.

    With Adam's usual eps, weights that cannot change the loss, such as biases of keys, move by the rounding of 0 / 0.
    """
    largest = 0.0
    for name in names:
        ends = []
        for size in (None, 1, 2, 3, 4, 8):
            changes = {"train__microbatch_size": size, "optimizer__kwargs": {"eps": 1e-4}}
            trainer = tiny_trainer(name, tmp_path / name / str(size), **changes)
            trainer.learn()
            assert trainer.progress.step == 6
            ends.append({key: tensor.clone() for key, tensor in trainer.unwrapped.state_dict().items()})
        for end in ends[1:]:
            largest = max(largest, *(float((end[key] - tensor).abs().max()) for key, tensor in ends[0].items()))
    figure(f"{len(names)} x 6 splits, largest difference {largest:.1e}")
    assert largest <= 1e-5


ids = st.lists(st.integers(0, 11), min_size=1, max_size=6)


def test_a7_logprobs_of_a_row_are_its_own(figure: Figure, drawn: int) -> None:
    """Log-probabilities depend on padding side, padding length and batch mates by 1e-5 at most; GPT-2 and Llama."""
    policies = {}
    for make in (tiny_gpt2, tiny_llama):
        config = trainkit.default_config("sft").update({"model.model_path": make(12)})
        policies[make.__name__] = CausalPolicy(load_model(config.model), value_head=True)
    found = {name: 0 for name in policies}
    largest = 0.0

    @seed(drawn)
    @settings(max_examples=100, derandomize=False, database=None)
    @given(st.sampled_from([*policies]), ids, ids, st.lists(st.tuples(ids, ids), max_size=3), st.integers(0, 9), ids)
    def check(name: str, prompt: Any, response: Any, mates: Any, padding: int, junk: list[int]) -> None:
        nonlocal largest
        policy, start, size = policies[name], len(prompt), len(prompt) + len(response)
        row = Sequences.from_lists([prompt], [response])
        alone = policy(row)
        others = [Sequences.from_lists([a], [b]) for a, b in mates]
        fill = torch.tensor([[junk[i % len(junk)] for i in range(padding)]], dtype=torch.long).reshape(1, padding)
        off = torch.zeros((1, padding), dtype=torch.bool)
        both = (row.attention_mask, row.response_mask)
        left = Sequences(torch.cat([fill, row.input_ids], 1), *(torch.cat([off, mask], 1) for mask in both))
        right = Sequences(torch.cat([row.input_ids, fill], 1), *(torch.cat([mask, off], 1) for mask in both))
        for batch, shift in ((Sequences.cat([row, *others]), 0), (left, padding), (Sequences.cat([right, *others]), 0)):
            output = policy(batch)
            for numbers, own in ((output.logprobs, alone.logprobs), (output.values, alone.values)):
                apart = numbers[0, start + shift : size + shift] - own[0, start:size]
                largest = max(largest, float(apart.abs().max()))
        found[name] += 1
        assert largest <= 1e-5

    with torch.no_grad():
        check()
    figure(f"{sum(found.values())} examples ({found}), largest difference {largest:.1e}")
    assert min(found.values()) > 10
