"""Measures the health monitor: which planted faults it finds, and that it finds nothing in the shipped examples.

``python benchmarks/health.py`` trains with one fault at a time, on seeds 1 to 3, and prints which checks have found
something, and after how many steps; runs without a fault are among them. It exits with 1 unless at least 90 % of the
faults are found by a check that fits, and nothing is found without a fault. ``--examples`` runs all shipped examples on
the same seeds instead, and exits with 1 if a check has found something in any of them. It takes more than an hour;
``--keep DIRECTORY`` keeps the runs, and those that are there already are not made again.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

import trainkit
from trainkit import TRLConfig
from trainkit.plugins import get_trainer, load_file
from trainkit.rollouts import Weights
from trainkit.testing import character_tokenizer, tiny_gpt2
from trainkit_kit.copying import CopyingEngine

ARITHMETIC = Path(__file__).parents[1] / "examples" / "rloo_arithmetic"
GOAL = 0.9
Changes = dict[str, Any]
console = Console(highlight=False, soft_wrap=True)
task = load_file(ARITHMETIC / "task.py")


@dataclass(frozen=True)
class Fault:
    """A fault, and the checks that fit it; without checks it is none.

    ``changes`` are settings over those of the task, ``arguments`` those of `trainkit.train` that differ for a seed, and
    ``broken`` is where a method is replaced while the run is made.
    """

    name: str
    checks: tuple[str, ...]
    method: str = "ppo"
    changes: Changes = field(default_factory=dict)
    arguments: Callable[[int], Changes] = lambda _: {}
    broken: Callable[[], AbstractContextManager[object]] = nullcontext


# ------------------------------------------------------------------------------------------------------- the tasks

USUAL: Changes = {
    "optimizer.lr": 7e-4,
    "optimizer.kwargs": {"betas": [0.9, 0.95]},
    "rollout.max_new_tokens": 3,
    "rollout.num_rollouts": 256,
    "rollout.batch_size": 256,
    "rollout.eval_kwargs": {"temperature": 0},
    "train.batch_size": 128,
    "train.total_steps": 80,
    "train.eval_interval": 0,
    "train.save_interval": 0,
    "train.trackers": [],
}
"""Settings of the task: sums of two numbers, with the share of correct digits as reward."""
METHODS: dict[str, Changes] = {
    "ppo": {"method.init_kl_coef": 0.05, "method.ppo_epochs": 2},
    "rloo": {"method.rloo_k": 4, "method.kl_coef": 0.05},
    "grpo": {"method.group_size": 4},
    "sft": {},
    "dpo": {},
}


@cache
def fine_tuned(seed: int, out: Path) -> str:
    """Run SFT on a few sums, and return the directory of its export."""
    changes = {"train.seed": seed, "train.run_dir": str(out / f"start-{seed}"), "train.trackers": []}
    trainkit.train(config=TRLConfig.load_yaml(ARITHMETIC / "sft.yaml").update(changes), **task.sft(seed))
    return str(out / f"start-{seed}" / "model")


def run(fault: Fault, seed: int, out: Path) -> list[dict[str, Any]]:
    """Train with a fault, and return what the monitor has found."""
    run_dir = out / f"{fault.name.replace(' ', '-')}-{seed}"
    given = {"model_path": fine_tuned(seed, out), **task.rloo(seed), **fault.arguments(seed)}
    changes = {**USUAL, **METHODS[fault.method], "train.seed": seed, "train.run_dir": str(run_dir), **fault.changes}
    with fault.broken():
        trainkit.train(config=TRLConfig(method=fault.method).update(changes), **given)
    return verdicts(run_dir)


def verdicts(run_dir: Path) -> list[dict[str, Any]]:
    """Return what the monitor has found in a run."""
    path = run_dir / "health.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


# ------------------------------------------------------------------------------------------------------ the faults


def replaced(method: str, name: str, change: Callable[..., Any]) -> Callable[[], AbstractContextManager[object]]:
    """Return what replaces a method of an algorithm's trainer by one that changes its result."""
    cls = get_trainer(method)
    own = getattr(cls, name)

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(own(self, *args, **kwargs), *args)

    return lambda: patch.object(cls, name, broken)


@trainkit.register_engine("old_weights")
class OldWeights(CopyingEngine):
    """An engine that keeps the first weights, and says that it has the newest."""

    exact = False
    first: list[tuple[str, torch.Tensor]] | None = None

    def load(self, weights: Weights) -> None:
        """Load the first weights as if they were these."""
        if self.first is None:
            self.first = [(name, tensor.clone()) for name, tensor in weights.tensors()]
        first = self.first
        super().load(replace(weights, tensors=lambda: first))


def noise(seed: int) -> Changes:
    """Return rewards that have nothing to do with the responses."""
    drawn = torch.Generator().manual_seed(seed)
    return {"reward_fn": lambda outputs, **_: torch.randn(len(outputs), generator=drawn).tolist()}


def changing(_: int) -> Changes:
    """Return a reward that, after some collections, pays for zeros only."""
    calls = {"all": 0}

    def reward(outputs: list[str], answer: list[str], **_: Any) -> list[float]:
        calls["all"] += 1
        right = task.reward(outputs, answer)
        if calls["all"] <= 60:
            return list(right)
        return [0.5 + 0.5 * output.count("0") for output in outputs]

    return {"reward_fn": reward}


def repeating(_: int) -> Changes:
    """Return a task in which the letter a is paid, and a model with random weights."""
    return {
        "model_path": tiny_gpt2(10, n_positions=64),
        "tokenizer": character_tokenizer("abcdefgh"),
        "prompts": ["a", "bc", "def", "ghab"] * 16,
        "eval_prompts": None,
        "metric_fn": None,
        "reward_fn": lambda outputs, **_: [float(output.count("a")) for output in outputs],
    }


def few_samples(seed: int) -> Changes:
    """Return forty sums to learn by heart, and others held out."""
    held_out, shown, _ = task.split(seed)
    pairs = [[(row["prompt"], row["answer"]) for row in rows] for rows in (shown[:40], held_out)]
    return {**OFFLINE, "samples": pairs[0], "eval_samples": pairs[1]}


def few_pairs(seed: int) -> Changes:
    """Return pairs of a right and a wrong answer, of which half are swapped, and right ones held out."""
    held_out, shown, _ = task.split(seed)

    def pairs(rows: list[dict[str, str]]) -> list[dict[str, str]]:
        return [
            {"prompt": row["prompt"], "chosen": row["answer"], "rejected": other["answer"]}
            for row, other in zip(rows, rows[1:] + rows[:1], strict=True)
            if row["answer"] != other["answer"]
        ]

    own = pairs(shown)
    for pair in own[::2]:
        pair["chosen"], pair["rejected"] = pair["rejected"], pair["chosen"]
    return {**OFFLINE, "samples": own, "eval_samples": pairs(held_out)}


OFFLINE: Changes = {"prompts": None, "reward_fn": None, "eval_prompts": None, "metric_fn": None}
EVERY: Changes = {"train.eval_interval": 10}
FAULTS = (
    Fault("none, PPO", ()),
    Fault("none, RLOO", (), "rloo"),
    Fault("none, GRPO", (), "grpo"),
    Fault(
        "log-probabilities of another temperature",
        ("off_policy",),
        broken=replaced("ppo", "behaviour", lambda found, *_: found._replace(logprobs=found.logprobs * 1.05)),
    ),
    Fault(
        "log-probabilities of the next token",
        ("off_policy",),
        "rloo",
        broken=replaced("rloo", "behaviour", lambda found, *_: found._replace(logprobs=found.logprobs.roll(1, 1))),
    ),
    Fault(
        "dropout in the updates",
        ("off_policy",),
        "grpo",
        {"model.disable_dropout": False, "model.kwargs": {"resid_pdrop": 0.1}},
    ),
    Fault("a high learning rate, PPO", ("update_size", "divergence", "entropy"), "ppo", {"optimizer.lr": 2e-2}),
    Fault("a high learning rate, RLOO", ("update_size", "divergence", "entropy"), "rloo", {"optimizer.lr": 2e-2}),
    Fault(
        "forty passes over each collection",
        ("update_size",),
        "ppo",
        {"method.ppo_epochs": 40, "optimizer.lr": 2e-3, "train.total_steps": 320},
    ),
    Fault(
        "noise for a reward, no KL penalty",
        ("divergence", "entropy", "update_size"),
        "rloo",
        {"method.kl_coef": 0.0, "optimizer.lr": 3e-3, "train.total_steps": 160},
        noise,
    ),
    Fault(
        "an entropy bonus of the wrong sign",
        ("entropy",),
        "ppo",
        {"method.ent_coef": 1e-9, "train.total_steps": 120},
        noise,
        lambda: patch.object(get_trainer("ppo"), "loss", wrong_entropy),
    ),
    Fault(
        "one reward for all responses",
        ("signal",),
        arguments=lambda _: {"reward_fn": lambda outputs, **_: [1.0] * len(outputs)},
    ),
    Fault(
        "a reward of the prompt alone",
        ("signal",),
        "rloo",
        arguments=lambda _: {"reward_fn": lambda prompts, **_: [float(len(set(prompt))) for prompt in prompts]},
    ),
    Fault(
        "prompts that are too hard",
        ("signal",),
        "grpo",
        arguments=lambda _: {"reward_fn": lambda outputs, **_: [float(output == "never") for output in outputs]},
    ),
    Fault("a limit without room for EOS", ("truncation",), "ppo", {"rollout.max_new_tokens": 2}),
    Fault(
        "a reward for repetition",
        ("repetition",),
        "rloo",
        {
            "rollout.max_new_tokens": 24,
            "rollout.num_rollouts": 64,
            "method.kl_coef": 0.0,
            "train.batch_size": 64,
            "optimizer.lr": 3e-3,
        },
        repeating,
    ),
    Fault(
        "advantages of zero",
        ("gradient",),
        "grpo",
        broken=replaced(
            "grpo", "prepare_experience", lambda found, *_: replace(found, advantages=found.advantages * 0)
        ),
    ),
    Fault("no loss of the values", ("value_function",), "ppo", {"method.vf_coef": 0.0, "train.total_steps": 120}),
    Fault(
        "values of other rows",
        ("value_function",),
        "ppo",
        {"train.total_steps": 120},
        broken=replaced("ppo", "experience", lambda found, *_: replace(found, values=2 * found.values.roll(1, 0) + 1)),
    ),
    Fault(
        "an engine without new weights",
        ("sampler",),
        "ppo",
        {"rollout.engine": "old_weights", "train.total_steps": 160},
    ),
    Fault(
        "few prompts, learnt by heart",
        ("held_out",),
        "rloo",
        {**EVERY, "method.kl_coef": 0.0, "train.total_steps": 200, "rollout.num_rollouts": 128},
        lambda seed: {"prompts": task.split(seed)[2][:8]},
    ),
    Fault(
        "a reward that becomes wrong",
        ("held_out",),
        "rloo",
        {**EVERY, "train.total_steps": 200},
        changing,
    ),
    Fault("few samples, learnt by heart", ("overfitting",), "sft", {**EVERY, "train.batch_size": 20}, few_samples),
    Fault("pairs of which half are swapped", ("overfitting",), "dpo", {**EVERY, "train.batch_size": 20}, few_pairs),
)


def wrong_entropy(self: Any, batch: Any) -> Any:
    """Return the loss of PPO, with a penalty on entropy."""
    loss, found = PPO_LOSS(self, batch)
    outputs = self.policy(batch.sequences, entropy=True)
    mask = batch.sequences.response_mask
    return loss + 0.5 * (outputs.entropy * mask).sum() / mask.sum(), found


PPO_LOSS = get_trainer("ppo").loss


def detection(seeds: list[int], out: Path, chosen: str) -> bool:
    """Print what is found of each fault; return whether enough is, and nothing without a fault."""
    table = Table("fault", "method", "found by (after steps), seed by seed", "seconds")
    found, planted, alarms = 0, 0, 0
    for fault in FAULTS:
        if chosen not in fault.name:
            continue
        cells, started = [], time.perf_counter()
        for seed in seeds:
            seen = run(fault, seed, out)
            hit = any(verdict["check"] in fault.checks for verdict in seen)
            planted, found = planted + bool(fault.checks), found + hit
            alarms += bool(seen) and not fault.checks
            told = ", ".join(f"{verdict['check']} ({verdict['step']})" for verdict in seen) or "nothing"
            cells.append(told if hit or not fault.checks else f"MISSED: {told}")
        table.add_row(fault.name, fault.method, "; ".join(cells), f"{time.perf_counter() - started:.0f}")
        console.print(f"{fault.name}, {fault.method}: {'; '.join(cells)}", markup=False)
    console.print(table)
    console.print(f"found: {found} of {planted} planted faults; without a fault: {alarms} alarms")
    return alarms == 0 and found >= GOAL * planted


# ---------------------------------------------------------------------------------------------------- the examples

EXAMPLES: dict[str, list[list[str]]] = {
    "randomwalks": [["--method", method] for method in ("ppo", "rloo", "grpo", "rft")],
    "rloo_arithmetic": [[]],
    "async_arithmetic": [["--method", method] for method in ("rloo", "ppo", "online_dpo")],
    "environments": [["--game", game] for game in ("guess", "calculator")],
    "online_dpo_randomwalks": [[], ["--method", "best_of_k"]],
    "dpo_randomwalks": [[], ["--method", "kto"]],
    "ddpo_digits": [["--reward", reward] for reward in ("digit", "compressibility")],
    **{name: [[]] for name in ("distill_randomwalks", "ilql_randomwalks", "ppo_t5_copy", "reward_then_ppo")},
    **{name: [[]] for name in ("rlhf_pipeline", "sft_dialogue", "word_problems")},
}
"""The shipped examples, each with the options of its variants."""


def example(name: str, options: list[str], seed: int, out: Path) -> tuple[int, list[str]]:
    """Run an example, unless it was, and return how many runs it makes and what was found in them."""
    place = out / "-".join([name, *(option.removeprefix("--") for option in options), str(seed)])
    if not (place / "done").exists():
        command = ["examples", "run", name, *options, "--seed", str(seed), "--run-dir", str(place)]
        subprocess.run([sys.executable, "-m", "trainkit.cli", *command], check=True, stdout=subprocess.DEVNULL)
        (place / "done").touch()
    runs = sorted(path.parent for path in place.rglob("metrics.jsonl"))
    found = [f"{run.name}: {v['check']} ({v['step']})" for run in runs for v in verdicts(run)]
    return len(runs), found


def false_alarms(seeds: list[int], out: Path, chosen: str, processes: int) -> bool:
    """Print what is found in the shipped examples; return whether nothing is."""
    cases = [(name, options) for name, variants in EXAMPLES.items() for options in variants if chosen in name]
    table, alarms, runs = Table("example", "runs", "found"), 0, 0
    with ThreadPoolExecutor(processes) as pool:
        for name, options in cases:
            done = list(pool.map(lambda seed, n=name, o=options: example(n, o, seed, out), seeds))
            made, found = sum(number for number, _ in done), [line for _, lines in done for line in lines]
            alarms, runs = alarms + len(found), runs + made
            table.add_row(" ".join([name, *options]), str(made), "; ".join(found) or "nothing")
            console.print(f"{name} {' '.join(options)}: {made} runs, {'; '.join(found) or 'nothing'}", markup=False)
    console.print(table)
    console.print(f"{alarms} alarms in {runs} runs")
    return alarms == 0


def main() -> None:
    """Read the options, measure, and exit with 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", action="store_true", help="run the shipped examples instead of planted faults")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--only", default="", help="run those whose name contains this")
    parser.add_argument("--keep", type=Path, help="directory in which the runs are kept")
    parser.add_argument("--processes", type=int, default=1, help="examples at the same time (default: 1)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("trainkit").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) if options.keep is None else options.keep
        if options.examples:
            passed = false_alarms(options.seeds, out, options.only, options.processes)
        else:
            passed = detection(options.seeds, out, options.only)
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
