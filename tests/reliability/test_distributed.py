"""G: two processes, started by accelerate, that talk through gloo."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch

import trainkit
from runs import USUAL
from test_processes import FAIL, launch, succeed
from trainkit.runs import checkpoint
from trainkit.testing import tiny_gpt2
from trainkit.testing.trainers import language_trainers

Figure = Callable[[str], None]


def since(place: Path) -> float:
    """Seconds since one process failed."""
    return time.time() - float((place / "since").read_text())


COMMAND = """
import sys
from trainkit.cli import app

out, what = sys.argv[1:]
sys.argv = ["trainkit", "train", f"{out}/config.yaml", "--task", f"{out}/task.py:{what}", f"train.run_dir={out}/{what}"]
app()
"""

TASK = """
import os
import time
from pathlib import Path

from trainkit.testing import character_tokenizer

def now():
    Path(__file__).with_name("since").write_text(str(time.time()))

def judge(outputs, **given):
    if os.environ["RANK"] == "1":
        now()
        raise TimeoutError("the judge is away")
    return [0.0] * len(outputs)

def short(outputs, **given):
    if os.environ["RANK"] == "1":
        now()
        return [0.0] * (len(outputs) - 1)
    return [0.0] * len(outputs)

def task_of(reward_fn):
    return lambda: {"prompts": list("abcd"), "reward_fn": reward_fn, "tokenizer": character_tokenizer("abcdefgh")}

raises, returns_short = task_of(judge), task_of(short)
"""


def test_g1_one_process_that_fails_ends_both(figure: Figure, tmp_path: Path) -> None:
    """One process raises, or a reward function returns too little: both end within 30 s, the error is shown once."""
    said = {
        "raises": "RewardError: after step 0: judge .* raised TimeoutError: the judge is away",
        "returns_short": r"RewardError: after step 0: short .* returned \d scores",
    }
    train = {"total_steps": 4, "batch_size": 4, "trackers": []}
    rollout = {"num_rollouts": 8, "batch_size": 4, "max_new_tokens": 4}
    config = {"method": "rloo", "model": {"model_path": tiny_gpt2(10)}, "rollout": rollout, "train": train}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    (tmp_path / "task.py").write_text(TASK)
    lasted = []
    for what, message in said.items():
        done = launch(COMMAND, 2, str(tmp_path), what)
        lasted.append(since(tmp_path))
        both = done.stderr + done.stdout
        assert done.returncode != 0
        assert len(re.findall(message, both)) == both.count("RewardError: ") == 1, both[-3000:]
        (tmp_path / "since").unlink()
    figure(f"{len(said)} failures, both processes ended after at most {max(lasted):.1f} s")
    assert max(lasted) < 30


def test_g2_one_process_that_hangs_ends_both(figure: Figure, tmp_path: Path) -> None:
    """One process hangs: both end soon after ``train.timeout``, with the stacks of both.

    The process that waits says so; the one that hangs ends at the launcher's SIGTERM, not by SIGKILL 30 s later.
    """
    settings = {"train__timeout": 5.0, "train__sharding": "fsdp2"}
    done = launch(FAIL, 2, str(tmp_path), "hang", json.dumps(settings))
    lasted, said = since(tmp_path), done.stderr + done.stdout
    figure(f"ended {lasted - 5:.1f} s after a timeout of 5 s, {said.count('Timeout (0:00:05)!')} stacks")
    assert 5 <= lasted < 5 + 25
    assert done.returncode != 0
    assert "ProcessError: process 0 waited for another process after step 0" in said
    assert "made no progress for 5 s (train.timeout)" in said
    assert said.count("Timeout (0:00:05)!") == 2
    assert "in hang" in said


TOGETHER = """
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path[:0] = [sys.argv[2]]
import trainkit
from killed import digest
from trainkit.testing.trainers import tiny_trainer

torch.set_num_threads(1)
out, said = Path(sys.argv[1]), {}

class Notes:
    def __init__(self):
        self.rows = []

    @trainkit.hookimpl
    def on_experience(self, experience):
        for row in range(len(experience)) if not self.rows else ():
            flat = experience.select(torch.tensor([row])).flatten()
            self.rows.append([x.tolist() for name, x in flat.items() if name.endswith("input_ids")])

for name in sys.argv[3:]:
    notes, changes = Notes(), {"train__batch_size": 8, "optimizer__kwargs": {"eps": 1e-4}}
    trainer = tiny_trainer(name, out / f"{name}-{sys.argv[3:].index(name)}", callbacks=[notes], **changes)
    rank, world = trainer.accelerator.process_index, trainer.accelerator.num_processes
    trainer.learn()
    said[name] = {"digest": digest(trainer), "steps": trainer.progress.step, "rows": notes.rows}
    weights = {key: tensor.contiguous().clone() for key, tensor in trainer.unwrapped.state_dict().items()}
    if rank == 0:
        torch.save(weights, out / f"{name}-{world}.pt")
(out / f"said-{world}-{rank}.json").write_text(json.dumps(said))
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""


def test_g3_two_processes_are_one_run(full: bool, drawn: int, figure: Figure, tmp_path: Path) -> None:
    """Two processes end bit-equal, on rows of their own, within 1e-5 of one process; SIGTERM to one saves for both."""
    every = trainkit.available_trainers()
    names = every if full else [*USUAL, random.Random(drawn).choice([name for name in every if name not in USUAL])]
    for processes in (1, 2):
        (tmp_path / str(processes)).mkdir()
        succeed(TOGETHER, processes, str(tmp_path / str(processes)), str(Path(__file__).parents[1]), *names)
    (alone,) = (json.loads(path.read_text()) for path in (tmp_path / "1").glob("said-1-*.json"))
    first, second = (json.loads((tmp_path / "2" / f"said-2-{rank}.json").read_text()) for rank in (0, 1))
    largest = 0.0
    for name in names:
        assert first[name]["digest"] == second[name]["digest"]
        assert first[name]["steps"] == alone[name]["steps"] == 6
        if name in language_trainers():
            assert first[name]["rows"] != second[name]["rows"]
            assert sorted(first[name]["rows"] + second[name]["rows"]) == sorted(alone[name]["rows"])
        one, two = (torch.load(tmp_path / str(count) / f"{name}-{count}.pt") for count in (1, 2))
        largest = max(largest, *(float((two[key] - tensor).abs().max()) for key, tensor in one.items()))
    assert largest <= 1e-5
    (tmp_path / "ended").mkdir()
    done = launch(FAIL, 2, str(tmp_path / "ended"), "terminated")
    lasted = since(tmp_path / "ended")
    assert lasted < 30
    assert done.returncode != 0
    assert re.search("stopped by SIGTERM after step 3; saved .*step_00000003", done.stderr + done.stdout)
    newest = checkpoint.newest_whole(tmp_path / "ended" / "run" / "checkpoints")
    assert newest is not None
    assert newest.name == "step_00000003"
    stores = sorted(path.name for path in newest.glob("store-*.json"))
    assert stores == ["store-00000.json", "store-00001.json"]
    figure(f"{len(names)} algorithms, largest difference to one process {largest:.1e}; {len(stores)} parts saved")
