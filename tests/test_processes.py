"""Two processes, started by accelerate, beyond the kit's check of that name: settings, adapters, failing, resuming."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import forking
from trainkit.runs import newest_whole
from trainkit.testing.trainers import language_trainers

STEPS: dict[str, dict[str, Any]] = {
    "means over a step": {"name": "dpo", "method__loss_type": "kto_pair"},
    "ranks over a step": {"name": "dpo", "method__loss_type": "aot_unpaired"},
    "ranks of some pairs": {"name": "dpo", "method__loss_type": "aot"},
    "no weight in one process": {"name": "dpo"},
}

pytestmark = pytest.mark.slow  # each starts processes of its own

STEP = """
import json
import sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from trainkit.metrics import compute
from trainkit.testing.trainers import tiny_trainer

torch.set_num_threads(1)
out = Path(sys.argv[1])
for name, changes in json.loads(sys.argv[2]).items():
    alone = tiny_trainer(
        run_dir=out / name / "unused", train__max_grad_norm=None, train__microbatch_size=3, **changes
    )
    rank, world = alone.accelerator.process_index, alone.accelerator.num_processes
    batch = torch.load(out / name / "batch.pt", weights_only=False)
    cut = 3 * len(batch) // 8
    ragged = [torch.arange(cut), torch.arange(cut, len(batch))][rank] if world == 2 else torch.arange(len(batch))
    if name == "no weight in one process":
        batch.decided[:cut] = False
    if name == "ranks of some pairs":
        batch.decided[1::3] = False
    if "over a step" in name:
        batch.ref_chosen.mul_(1.5), batch.ref_rejected.mul_(1.5)
    alone.models.build()
    alone.optimizer.optimizer.register_step_pre_hook(
        lambda *_: save_file(
            {n: p.grad.clone() for n, p in alone.unwrapped.named_parameters()}, out / name / f"gradient-{world}-{rank}"
        )
    )
    torch.manual_seed(0)
    for parameter in alone.unwrapped.parameters():  # so that old and new policy differ
        parameter.data += 0.02 * torch.randn(parameter.shape)
    found = compute(alone.update(batch.select(ragged)), alone.reduce)
    (out / name / f"metrics-{world}-{rank}.json").write_text(json.dumps(found))
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
"""

GUARD = """
import json
import sys
from dataclasses import replace
from pathlib import Path
import torch
from trainkit.testing.trainers import tiny_trainer

torch.set_num_threads(1)
out = Path(sys.argv[1])
trainer = tiny_trainer("ppo", out / "run", method__scale_reward="running", optimizer__weight_decay=0.5)
rank, said = trainer.accelerator.process_index, {}

def scaled(*shards):
    scores = torch.tensor(shards[rank]).unsqueeze(1)
    return trainer.scaled(scores, torch.ones_like(scores, dtype=torch.bool)).squeeze(1).tolist()

said["first"], said["second"] = scaled([1.0, 2.0], [3.0]), scaled([10.0], [20.0])

trainer.collect()
batch = trainer.store.experience.select(torch.arange(4))
trainer.update(batch)
before = [p.clone() for p in trainer.unwrapped.parameters()]
bad = replace(batch, old_logprobs=batch.old_logprobs - 1000 * rank)
found = trainer.update(bad)
said["finite here"] = found["policy/ratio"].compute() < float("inf")
said["unchanged"] = all(torch.equal(a, b) for a, b in zip(before, trainer.unwrapped.parameters()))
trainer.update(batch)
said["sum"] = float(sum(p.double().sum() for p in trainer.unwrapped.parameters()))
said["moved"] = not all(torch.equal(a, b) for a, b in zip(before, trainer.unwrapped.parameters()))
(out / f"said-{rank}.json").write_text(json.dumps(said))
torch.distributed.destroy_process_group()
"""

FURTHER = """
import sys
from pathlib import Path
import torch
from trainkit.testing.trainers import tiny_trainer

torch.set_num_threads(1)

def told(outputs, **_):
    rank = trainer.accelerator.process_index
    own = {"first": [3.0] * len(outputs)} if rank == 0 else {"second": ["a word"] * len(outputs)}
    return {"score": [1.0] * len(outputs), "both": [rank or None] * len(outputs), **own}

settings = {"train__total_steps": 2, "train__timeout": 30, "arguments": {"reward_fn": told}}
trainer = tiny_trainer("ppo", Path(sys.argv[1]) / "run", **settings)
trainer.learn()
torch.distributed.destroy_process_group()
"""

FAIL = """
import json, os, signal, sys, time
from pathlib import Path
import torch
import trainkit
from trainkit.testing.trainers import tiny_trainer
from trainkit.runs import checkpoint

torch.set_num_threads(1)
out, what = Path(sys.argv[1]), sys.argv[2]

class Away:
    @trainkit.hookimpl
    def log_metrics(self, step):  # which only the main process calls
        if step == 3:
            now()
            raise TimeoutError("the tracker is away")

callbacks = [Away()] if what == "observer" else []
settings = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
trainer = tiny_trainer("ppo", out / "run", callbacks=callbacks, train__save_interval=1, **settings)
rank, honest_loss, honest_write = trainer.accelerator.process_index, trainer.loss, checkpoint.write_state

def now(): (out / "since").write_text(str(time.time()))

def judge(**given):
    now()
    raise TimeoutError("the judge is away")

def hang(**given):
    now()
    time.sleep(600)

def loss(batch):
    value, found = honest_loss(batch)
    if trainer.progress.step == 2:
        now()
        value = value * torch.nan
    return value, found

def write(directory, name, state):
    if trainer.progress.step == 2:
        now()
        raise OSError(28, "No space left on device")
    honest_write(directory, name, state)

class Signals:
    @trainkit.hookimpl
    def on_step(self, step):
        if step == 3:
            now()
            os.kill(os.getpid(), {"killed": signal.SIGKILL, "terminated": signal.SIGTERM}[what])

if rank == 1 and what == "reward": trainer.reward_fn = judge
if what == "slow": trainer.models.build()  # nothing else is exchanged at the beginning then
if rank == 1 and what == "slow":
    honest_acquire = trainer.run._acquire
    trainer.run._acquire = lambda *given: (honest_acquire(*given), time.sleep(3))
if rank == 1 and what == "hang": trainer.reward_fn = hang
if rank == 1 and what == "nan": trainer.loss = loss
if rank == 1 and what == "disk": checkpoint.write_state = write
if rank == 1 and what in ("killed", "terminated"): trainer.hooks.register(Signals())
trainer.learn()
"""


PARTS = """
import json
import sys
from pathlib import Path
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from trainkit import get_trainer
from trainkit.data import batches
from trainkit.testing import tiny_gpt2, tiny_t5
from trainkit.testing.trainers import tiny_trainer

torch.set_num_threads(1)
batches.PASS_COST["cpu"] = batches.PassCost(1)  # ranks make different numbers of passes
out, said = Path(sys.argv[1]), {}
parts = {"layers": {"model__num_layers_unfrozen": 1}, "adapter": {"model__peft_config": {"r": 2}}}
t5 = {"t5": {"model": tiny_t5(10)}, "t5 layers": {"model": tiny_t5(10), "model__num_layers_unfrozen": 1}}
for name in sys.argv[2:]:
    watched = {"train__eval_interval": 2, "train__save_best": "reward_fn" in get_trainer(name).inputs}
    for what, changes in {**parts, **(t5 if name in ("ppo", "rloo", "sft") else {})}.items():
        run = out / f"{name}-{what}"
        tiny_trainer(name, run, **changes, **watched, train__save_interval=2, train__total_steps=4).learn()
        trainer = tiny_trainer(name, run, **changes, **watched, train__save_interval=2, train__resume="auto")
        trainer.learn()
        trained = [p for p in trainer.unwrapped.parameters() if p.requires_grad]
        said[f"{name} {what}"] = [p.double().sum().item().hex() for p in trained]
rank = trainer.accelerator.process_index
torch.manual_seed(rank)  # a live model that is another in each process
trainer = tiny_trainer("ppo", out / "live")
trainer.live_model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_gpt2(10)))
trainer.collect()
said["live"] = [trainer.recorder.pending["policy/kl"].compute(), trainer.identity.start]
(out / f"said-{rank}.json").write_text(json.dumps(said))
torch.distributed.destroy_process_group()
"""

ENDED = """
import json
import logging
import sys
from pathlib import Path
import torch
from trainkit import hookimpl, register_hooks, register_tracker
from trainkit.testing.trainers import tiny_trainer

torch.set_num_threads(1)
out, said = Path(sys.argv[1]), {}

class Stops:
    def __init__(self, at):
        self.at = at

    @hookimpl
    def on_step(self, trainer):
        if rank == 1 and trainer.progress.step == self.at:
            trainer.stop("process 1 says so")

@register_tracker("keeps")
class Keeps:
    def __init__(self):
        self.steps = []

    @hookimpl
    def log_metrics(self, step):
        self.steps.append(step)

@register_hooks("counts")
class Counts:
    def __init__(self):
        self.counted = 0

    @hookimpl
    def on_step(self):
        self.counted += 1

    def state_dict(self):
        return {"counted": self.counted}

    def load_state_dict(self, state):
        self.counted = state["counted"]

def run(name, **changes):
    run = {"train__save_interval": 10, "train__eval_interval": 10, "train__trackers": ["keeps"], "plugins": ["counts"]}
    return tiny_trainer("ppo", out / name, **{**run, **changes})

trainer = run("run")
rank = trainer.accelerator.process_index
x = torch.tensor([[1, 5], [7, 2]])[rank]
numbers = [x, x.double() / 3, x > 4, x[0], torch.tensor([float("nan"), 1.0][rank]), torch.empty(0)]
said["min"] = [[str(found.dtype), found.tolist()] for found in map(trainer.min, numbers)]
said["max"] = [[str(found.dtype), found.tolist()] for found in map(trainer.max, numbers)]
trainer.hooks.register(Stops(3))
trainer.learn()
said["ended"] = [trainer.progress.step, trainer.progress.evaluated, trainer.progress.stop_reason]
said["trackers"] = [made.steps for name, made in trainer.hooks.made.items() if name == "keeps"]
trainer = run("run", train__resume="auto")
trainer.learn()
said["again"] = [trainer.progress.step, trainer.progress.stop_reason]
longer = run("run", train__resume="auto", train__total_steps=8)
longer.learn()
straight = run("straight", train__total_steps=8)
straight.learn()
for name, trainer in (("longer", longer), ("straight", straight)):
    weights = [p.double().sum().item().hex() for p in trainer.unwrapped.parameters()]
    said[name] = [trainer.progress.step, trainer.hooks.made["counts"].counted, weights]
sick = tiny_trainer(
    "grpo", out / "sick", arguments={"reward_fn": lambda outputs, **given: [1.0] * len(outputs)},
    train__total_steps=10, train__health="stop",
)
sick.learn()
said["health"] = [sick.progress.step, sick.progress.stop_reason, sick.health.state_dict()]
told = []
note = logging.Handler()
note.emit = lambda record: told.append(record.getMessage())
logging.getLogger("trainkit").addHandler(note)
odd = tiny_trainer("sft", out / "odd", train__total_steps=1, train__batch_size=4)
odd.add_samples([{"prompt": "a", "completion": letter, "id": 1} for letter in "bcd"])
odd.learn()
said["told"] = told
(out / f"said-{rank}.json").write_text(json.dumps(said))
torch.distributed.destroy_process_group()
"""

RESUMED = """
import json
import sys
from pathlib import Path
import torch
from trainkit.testing.trainers import SAMPLES, tiny_trainer

torch.set_num_threads(1)
out, said = Path(sys.argv[1]), {}

class Stream:
    def __iter__(self):
        yield from SAMPLES * 3

def packed(where, steps, **changes):
    trainer = tiny_trainer(
        "sft", out / where, method__packing=True, train__seq_length=16, train__batch_size=2, rollout__num_rollouts=4,
        train__total_steps=steps, train__save_interval=1, **changes,
    )
    trainer.add_samples(Stream())
    trainer.learn()
    return trainer

def uneven(where, steps, **changes):
    trainer = tiny_trainer(
        "rft", out / "rft" / where, method__rft_k=2, method__n_improve_steps=2, rollout__num_rollouts=8,
        rollout__batch_size=2, optimizer__lr=1e-2, train__batch_size=4, train__total_steps=steps,
        train__save_interval=1, **changes,
    )
    trainer.add_prompt_pipeline(list("abcde"))
    trainer.learn()
    return trainer

def resumed(run, stop, end):
    straight = run("straight", end)
    run("stopped", stop)
    both = {"straight": straight, "resumed": run("stopped", end, train__resume="auto")}
    for which, trainer in both.items():
        weights = [p.double().sum().item().hex() for p in trainer.unwrapped.parameters()]
        said[f"{run.__name__} {which}"] = weights
    return straight

resumed(uneven, 5, 8)
straight = resumed(packed, 3, 5)
rank = straight.accelerator.process_index
rows = [straight.pipeline.take(0, 6, rank=r, world=2) for r in (0, 1)]
said["rows"] = rows[rank]
said["all"] = straight.pipeline.take(0, 6)
(out / f"said-{rank}.json").write_text(json.dumps(said))
torch.distributed.destroy_process_group()
"""

AGREED = """
import json
import sys
from pathlib import Path
import torch
from trainkit.errors import RewardError
from trainkit.testing.trainers import count_first_letters, tiny_trainer

torch.set_num_threads(1)
out, said = Path(sys.argv[1]), {}
settings = {"rollout__batch_size": 2, "train__save_interval": 100, "train__eval_interval": 3, "method__ppo_epochs": 1}

def made(place, **changes):
    trainer = tiny_trainer("ppo", out / place, **settings, **changes)
    trainer.add_eval_pipeline(["a", "b", "c"])  # one process has two of them
    return trainer

def ended(trainer):
    trainer.learn()
    return [p.double().sum().item().hex() for p in trainer.unwrapped.parameters()]

straight = ended(made("straight"))
for what in ("collection", "evaluation"):
    trainer = made(what)
    rank = trainer.accelerator.process_index

    def fails(outputs, **given):
        at = trainer.progress
        if rank == 1 and (at.step == 3 and len(outputs) == 1 if what == "evaluation" else at.collection == 1):
            raise ValueError("not today")
        return count_first_letters(outputs)

    trainer.reward_fn = fails
    try:
        trainer.learn()
    except RewardError as error:
        said[what] = str(error)
    said[what + " saved"] = sorted(path.name for path in (out / what / "checkpoints").glob("*"))
    said[what + " equal"] = ended(made(what, train__resume="auto")) == straight
(out / f"said-{rank}.json").write_text(json.dumps(said))
torch.distributed.destroy_process_group()
"""


def launch(script: str, processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script in several processes by a real launcher, which ends all when one fails."""
    # on CPUs accelerate starts several only if told that they were GPUs
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", f"--num_processes={processes}"]
    command += ["--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    path = Path(arguments[0]) / "script.py"
    path.write_text(script, encoding="utf-8")
    command += [str(path), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


def succeed(script: str, processes: int, *arguments: str) -> None:
    """Run a script in several processes that must end without an error."""
    path = Path(arguments[0]) / "script.py"
    path.write_text(script, encoding="utf-8")
    forking.run(path, processes, *arguments)


@pytest.fixture(scope="module")
def gradients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One step on the same rows, by one process and by two that hold three and five eighths of them."""
    from trainkit.testing.trainers import tiny_trainer

    out = tmp_path_factory.mktemp("step")
    for name, changes in STEPS.items():
        trainer = tiny_trainer(run_dir=out / name / "source", **changes)
        trainer.collector.fill()
        (out / name).mkdir(exist_ok=True)
        torch.save(trainer.store.experience, out / name / "batch.pt")
    for processes in (1, 2):
        succeed(STEP, processes, str(out), json.dumps(STEPS))
    return out


@pytest.mark.parametrize("name", STEPS)
def test_two_processes_have_the_gradient_of_one(name: str, gradients: Path) -> None:
    alone = load_file(gradients / name / "gradient-1-0")
    first, second = (load_file(gradients / name / f"gradient-2-{rank}") for rank in (0, 1))
    for key, gradient in alone.items():
        assert torch.equal(first[key], second[key])
        torch.testing.assert_close(first[key], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", STEPS)
def test_two_processes_have_the_metrics_of_one(name: str, gradients: Path) -> None:
    """Whatever the lengths of their rows, and however many each holds."""
    alone, *both = (
        json.loads((gradients / name / f"metrics-{which}.json").read_text()) for which in ("1-0", "2-0", "2-1")
    )
    assert {"loss/total", "train/grad_norm"} <= set(alone)
    if STEPS[name]["name"] == "dpo":
        assert {"rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected"} <= set(alone)
    assert both == [pytest.approx(alone, rel=1e-4, abs=1e-5)] * 2


def test_two_processes_train_upper_layers_or_an_adapter_and_end_bit_equal(tmp_path: Path) -> None:
    """Resumed half-way; with frozen layers run once, and rows of like length going through together; T5 too."""
    names = language_trainers()
    succeed(PARTS, 2, str(tmp_path), *names)
    first, second = (json.loads((tmp_path / f"said-{rank}.json").read_text()) for rank in (0, 1))
    assert len(first) == 2 * len(names) + 2 * len({"ppo", "rloo", "sft"} & {*names}) + 1
    assert all(first.values())
    assert first == second
    assert (tmp_path / "ppo-layers" / "best").is_dir()
    assert first["live"][0] == 0.0, "the reference is made of the weights that all processes begin with"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes saw of scaled scores, and of a step whose ratio is infinite in the second only."""
    out = tmp_path_factory.mktemp("guard")
    succeed(GUARD, 2, str(out))
    return [json.loads((out / f"said-{rank}.json").read_text()) for rank in (0, 1)]


def test_a_ratio_that_is_infinite_in_one_process_leaves_the_weights_of_both_alone(
    guarded: list[dict[str, Any]],
) -> None:
    """One decision, on numbers of all processes; the step after it is made by both, and alike."""
    assert [said["finite here"] for said in guarded] == [True, False]
    assert all(said["unchanged"] and said["moved"] for said in guarded)
    assert guarded[0]["sum"] == guarded[1]["sum"]
    assert math.isfinite(guarded[0]["sum"])


def test_two_processes_scale_scores_as_one_does(guarded: list[dict[str, Any]]) -> None:
    """Golden 10.7: the std of [1, 2, 3] is 1, with [10, 20] it is 7.981228, whoever holds which of them."""
    assert [said["first"] for said in guarded] == [[1.0, 2.0], [3.0]]
    assert [said["second"] for said in guarded] == [[pytest.approx(10 / 7.981228)], [pytest.approx(20 / 7.981228)]]


@pytest.mark.slow
def test_processes_may_have_different_numbers_besides_scores(tmp_path: Path) -> None:
    """Metrics are summed in the order of their names, so both processes need the same names."""
    succeed(FURTHER, 2, str(tmp_path))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    collected = next(line for line in lines if "reward/mean" in line)
    assert {name: collected.get(f"reward_fn/{name}") for name in ("first", "second", "both")} == {
        "first": 3.0, "second": None, "both": 1.0
    }  # fmt: skip


@pytest.mark.parametrize(
    ("what", "said", "checkpoints"),
    [
        ("nan", "NonFiniteError: step 3: the loss is nan", 2),
        ("disk", "CheckpointError: cannot save a checkpoint under .*No space left on device", 1),
        ("observer", "HookError: the hook log_metrics of callback Away failed at step 3: TimeoutError: the tracker", 2),
        ("killed", "exitcode: -9", 2),
    ],
)
def test_what_ends_one_process_ends_both_within_30_seconds(
    what: str, said: str, checkpoints: int, tmp_path: Path
) -> None:
    """The newest checkpoint is whole, also where only one process could not write its part."""
    done = launch(FAIL, 2, str(tmp_path), what)
    assert time.time() - float((tmp_path / "since").read_text()) < 30
    assert done.returncode != 0
    assert re.search(said, done.stderr + done.stdout), done.stderr[-3000:]
    newest = newest_whole(tmp_path / "run" / "checkpoints")
    assert (newest and newest.name) == (f"step_{checkpoints:08d}" if checkpoints else None)


def test_an_error_of_one_process_in_scoring_is_that_of_both_which_save_and_resume_to_the_same_bits(
    tmp_path: Path,
) -> None:
    succeed(AGREED, 2, str(tmp_path))
    first, second = (json.loads((tmp_path / f"said-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    for what, step in (("collection", 2), ("evaluation", 3)):
        assert re.match(rf"after step {step}: fails .* raised ValueError: not today", first[what])
        assert first[f"{what} saved"] == [f"step_{step:08d}"]
        assert first[f"{what} equal"] is True


def test_a_slow_process_does_not_take_the_directory_for_that_of_another_run(tmp_path: Path) -> None:
    done = launch(FAIL, 2, str(tmp_path), "slow", json.dumps({"train__total_steps": 1}))
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("what", ["killed", "reward"])
def test_an_error_of_one_process_in_shards_ends_both_and_comes_first(what: str, tmp_path: Path) -> None:
    done = launch(FAIL, 2, str(tmp_path), what, json.dumps({"train__sharding": "fsdp2"}))
    assert time.time() - float((tmp_path / "since").read_text()) < 30
    assert done.returncode != 0
    said = done.stderr + done.stdout
    # of a killed process, the other one says so, unless the launcher has ended it before
    own = {"killed": "exitcode: -9", "reward": "RewardError: "}
    assert own[what] in said
    if what == "reward":
        assert said.index("RewardError: ") < said.find("ProcessError: ") or "ProcessError: " not in said


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes ends with, in a run that the second alone stops, and when it is resumed."""
    out = tmp_path_factory.mktemp("ended")
    succeed(ENDED, 2, str(out))
    return [json.loads((out / f"said-{rank}.json").read_text()) for rank in (0, 1)]


def test_minimum_and_maximum_are_of_both_processes_and_keep_dtype_and_shape(ended: list[dict[str, Any]]) -> None:
    """Of [1, 5] and [7, 2]; a tensor without dimensions, one that is NaN in one process, and one without elements."""
    for said in ended:
        assert [found for _, found in said["min"][:4]] == [[1, 2], [1 / 3, 2 / 3], [False, False], 1]
        assert [found for _, found in said["max"][:4]] == [[7, 5], [7 / 3, 5 / 3], [True, True], 7]
        for of in ("min", "max"):
            assert [dtype for dtype, _ in said[of][:4]] == ["torch.int64", "torch.float64", "torch.bool", "torch.int64"]
            assert math.isnan(said[of][4][1])
            assert said[of][5][1] == []


def test_one_process_that_stops_the_run_ends_both_after_the_same_step(ended: list[dict[str, Any]]) -> None:
    for said in ended:
        assert said["ended"] == [3, 3, "process 1 says so"]
        assert said["again"] == [3, "process 1 says so"]
        assert said["longer"] == said["straight"] == [8, 8, ended[0]["longer"][2]]


def test_what_health_finds_ends_both_after_the_same_step(ended: list[dict[str, Any]]) -> None:
    step, reason, _ = ended[0]["health"]
    assert ended[1]["health"] == ended[0]["health"]
    assert (step, reason[:8]) == (5, "health: ")


def test_a_tracker_is_made_on_the_main_process_only(ended: list[dict[str, Any]]) -> None:
    assert [said["trackers"] for said in ended] == [[[0, 1, 2, 3, 3]], []]


def test_rows_that_are_used_twice_and_unread_columns_are_told_by_the_main_process(ended: list[dict[str, Any]]) -> None:
    assert [said["told"] for said in ended] == [
        [
            "sft does not read the column 'id' of the samples",
            "1 of 3 rows of the dataset are used twice in every epoch: 2 processes need equally many",
        ],
        [],
    ]


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes ends with, in runs that were stopped and in runs that were not."""
    out = tmp_path_factory.mktemp("resumed")
    succeed(RESUMED, 2, str(out))
    return [json.loads((out / f"said-{rank}.json").read_text()) for rank in (0, 1)]


def test_two_processes_that_sample_unequally_often_resume_as_if_they_had_not_stopped(
    resumed: list[dict[str, Any]],
) -> None:
    """RFT samples for prompts at a growth step only; of five prompts, four to a collection, each process has others."""
    first, second = resumed
    assert first["uneven straight"] == first["uneven resumed"]
    assert second["uneven straight"] == second["uneven resumed"]
    assert first["uneven straight"] == second["uneven straight"]


def test_two_processes_share_a_stream_of_packed_rows_and_resume_it(resumed: list[dict[str, Any]]) -> None:
    first, second = resumed
    assert first["packed straight"] == second["packed straight"] == first["packed resumed"] == second["packed resumed"]
    assert [first["rows"][i // 2] if i % 2 == 0 else second["rows"][i // 2] for i in range(6)] == first["all"]


SHARED = """
import json
import sys
from dataclasses import replace
from pathlib import Path
import torch
from trainkit import register_engine
from trainkit.errors import EngineError
from trainkit.rollouts import Weights
from trainkit.testing.trainers import tiny_trainer
from trainkit_kit.copying import CopyingEngine, registered

torch.set_num_threads(1)
out, rank, said = Path(sys.argv[1]), None, {}

@register_engine("_shared")
class Shared(CopyingEngine):
    shared = "machine"
    faults = ""

    def __init__(self, config, served):
        if served.address is None and self.faults == "start":
            raise RuntimeError("no room")
        self.address, self.tensors, self.versions = served.address or str(out / "weights.pt"), [], []
        if served.address is None:
            torch.save(served.model, self.address)
        super().__init__(config, replace(served, model=torch.load(self.address, weights_only=False)))

    def load(self, weights):
        tensors = list(weights.tensors())
        self.tensors.append(len(tensors))
        self.versions.append(weights.version)
        if self.served.address is None:
            if self.faults == "load" and len(self.versions) == 2:
                raise RuntimeError("no memory")
            torch.save((weights.version, tensors), self.address)

    def submit(self, request):
        version, tensors = torch.load(self.address)
        assert version == self.versions[-1], "the other process has loaded them before"
        self.replica.load(Weights(version, lambda: tensors))
        return super().submit(request)

uneven = {"method__rft_k": 2, "method__n_improve_steps": 2, "rollout__num_rollouts": 8, "rollout__batch_size": 2}
for name, changes in {
    "ppo": {}, "rft": uneven, "rloo": {"rollout__staleness": 1}, "grpo": {"train__sharding": "fsdp2"}
}.items():
    ends = []
    for engine in ("_shared", registered()):
        trainer = tiny_trainer(name, out / name / engine, rollout__engine=engine, train__total_steps=6, **changes)
        if name == "rft":
            trainer.add_prompt_pipeline(list("abcde"))
        trainer.learn()
        trainer.generate(["a"])
        with trainer.sharding.unsharded():
            ends.append([p.detach().clone() for p in trainer.unwrapped.parameters()])
        if engine == "_shared":
            rank, made = trainer.parallel.rank, trainer.sampling.engine
            said[name] = [trainer.sampling.joins, made.versions, made.tensors]
    said[name].append(all(map(torch.equal, *ends)))
for faults in ("start", "load"):
    Shared.faults = faults
    trainer = tiny_trainer("rloo", out / faults, rollout__engine="_shared")
    try:
        trainer.learn()
    except EngineError as error:
        said[faults] = str(error)
(out / f"said-{rank}.json").write_text(json.dumps(said))
torch.distributed.destroy_process_group()
"""


def test_processes_share_an_engine_that_one_of_them_gives_the_weights(tmp_path: Path) -> None:
    """A run ends with the bits of one in which each process has an engine; errors of the one are those of both."""
    succeed(SHARED, 2, str(tmp_path))
    first, other = (json.loads((tmp_path / f"said-{rank}.json").read_text()) for rank in (0, 1))
    for name in ("ppo", "rft", "rloo", "grpo"):
        (owns, versions, tensors, equal), (joins, *others) = first[name], other[name]
        assert (owns, joins) == (False, True)
        assert len(versions) > 1, name
        assert all(tensors), name
        assert others == [versions, [0] * len(versions), equal], "as often, without tensors"
        assert equal, name
    assert first["start"] == other["start"] == "the engine '_shared' could not be started: RuntimeError: no room"
    assert first["load"] == other["load"] == "the engine Shared could not load the weights: RuntimeError: no memory"


OWN_STATE = """
import json
import sys
from pathlib import Path
import torch
from trainkit.plugins import get_trainer
from trainkit.testing.trainers import tiny_trainer

torch.set_num_threads(1)
cls = get_trainer(sys.argv[2])
cls.remembers = {**cls.remembers, "count": float, "seen": lambda: torch.zeros(2)}
make = cls.prepare_experience

def prepare(self, experience):
    self.count += 1 + self.accelerator.process_index
    self.seen = self.seen + self.accelerator.process_index
    return make(self, experience)

cls.prepare_experience = prepare
for changes in json.loads(sys.argv[3]):
    trainer = tiny_trainer(sys.argv[2], Path(sys.argv[1]) / "run", train__save_interval=1, **changes)
    try:
        trainer.begin()
        begun = [trainer.count, trainer.seen.tolist()]
        trainer.learn()
        said = [begun, [trainer.count, trainer.seen.tolist()]]
    except Exception as error:
        said = str(error)
if torch.distributed.is_initialized():
    torch.distributed.destroy_process_group()
(Path(sys.argv[1]) / f"said-{trainer.accelerator.process_index}.json").write_text(json.dumps(said))
"""


@pytest.mark.parametrize(("name", "later"), [("rloo", False), ("rft", True)])
def test_each_process_resumes_with_its_own_state(name: str, later: bool, tmp_path: Path) -> None:
    longer = {"train__total_steps": 8, "train__resume": "auto"}
    runs = [{"train__total_steps": 4, "train__save_async": later}, longer]
    succeed(OWN_STATE, 2, str(tmp_path), name, json.dumps(runs))
    one, other = (json.loads((tmp_path / f"said-{rank}.json").read_text()) for rank in (0, 1))
    (count, _), (last, _) = one
    assert last > count > 0
    assert other == [[2 * count, [count, count]], [2 * last, [last, last]]]
    succeed(OWN_STATE, 1, str(tmp_path), name, json.dumps([{**longer, "train__total_steps": 9}]))
    said = json.loads((tmp_path / "said-0.json").read_text())
    assert "for each of 2 processes, which 1 cannot share; resume with 2" in said
