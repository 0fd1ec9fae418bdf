"""Measures what older weights cost: learning on random walks at several values of `rollout.staleness`.

``python benchmarks/staleness.py`` trains with PPO, RLOO, GRPO and online DPO, with the settings of the examples: three
seeds at staleness 0 and 1, and one seed at 4, with and without a correction where the algorithm supports one; PPO also
at 2 and 8. It prints mean optimality (sampled walks, all start nodes; the maximum is 1) and how far the sampler was
from the policy. It exits with 1 if an algorithm's mean over seeds at staleness 1 is lower than at 0 by more than two
standard errors of the difference, and by more than 0.02.

All runs use the engine ``local``: the engine does not change the result.

``--time`` measures speed instead, on a larger model with random weights, one system after another: sampling and
training in turns with one thread, with two threads and in two processes, and with the engine ``ray`` at staleness 1,
where the actor and the training have one thread each. Online DPO trains on the best and the worst of eight responses,
so that sampling takes longer than training; RLOO trains on all of four, after it has computed their log-probabilities
with the newest weights. It prints seconds per collection, the median of those after the first two, and ratios to the
first system. It exits with 1 if online DPO with Ray is less than 1.4 times as fast. It needs two cores and Ray.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import trainkit
from trainkit import TRLConfig
from trainkit.plugins import load_file
from trainkit.testing import character_tokenizer, tiny_gpt2

EXAMPLES = Path(__file__).parents[1] / "examples"
CONFIGS = {
    "ppo": EXAMPLES / "randomwalks" / "ppo.yaml",
    "rloo": EXAMPLES / "randomwalks" / "rloo.yaml",
    "grpo": EXAMPLES / "randomwalks" / "grpo.yaml",
    "online_dpo": EXAMPLES / "online_dpo_randomwalks" / "online_dpo.yaml",
}
CORRECTED = {"ppo", "rloo", "grpo"}
SMALL = 0.02
"""A difference of optimality that counts as none."""
SYSTEMS = {
    "in turns, one thread": {"threads": 1, "processes": 1},
    "ray, staleness 1": {"threads": 1, "processes": 1, "rollout.engine": "ray", "rollout.staleness": 1},
    "in turns, two threads": {"threads": 2, "processes": 1},
    "in turns, two processes": {"threads": 1, "processes": 2},
}
"""What is timed, by name: threads of torch per process, processes, and settings."""
TIMED: dict[str, dict[str, Any]] = {
    "online_dpo": {
        "method": {"name": "online_dpo", "k": 8},
        "rollout.num_rollouts": 128,
        "train.batch_size": 16,
    },
    "rloo": {"method": {"name": "rloo", "rloo_k": 4}, "rollout.num_rollouts": 64, "train.batch_size": 64},
}
"""The settings with which each algorithm is timed: 16 prompts and one optimizer step per collection."""
COLLECTIONS, FASTER = 12, 1.4
console = Console(highlight=False, soft_wrap=True)


@dataclass
class Run:
    """One run, and what was measured."""

    method: str
    staleness: int
    correction: str
    seed: int
    curve: list[tuple[int, float]] = field(default_factory=list)
    """(step, mean optimality) of each evaluation."""
    sampler_kl: float = 0.0
    """Mean divergence of the sampler from the policy per token, in nats."""
    sample_size: float = 1.0
    """Mean effective sample size, as a fraction."""
    seconds: float = 0.0

    @property
    def end(self) -> float:
        """Mean optimality at the end."""
        return self.curve[-1][1]


class Watch:
    """A callback that keeps evaluations, and the metrics about the sampler of each step."""

    def __init__(self) -> None:
        self.curve: list[tuple[int, float]] = []
        self.found: dict[str, list[float]] = {}

    @trainkit.hookimpl
    def log_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Keep what is measured."""
        if "eval/optimality" in metrics:
            self.curve.append((step, metrics["eval/optimality"]))
        for name in ("policy/sampler_kl", "rollout/effective_sample_size"):
            if name in metrics:
                self.found.setdefault(name, []).append(metrics[name])

    def mean(self, name: str, default: float) -> float:
        """Return the mean of a metric over the steps that logged it."""
        return statistics.fmean(self.found[name]) if name in self.found else default


def planned(methods: list[str], seeds: list[int]) -> list[Run]:
    """Return the runs of the benchmark."""
    runs = []
    for method in methods:
        runs += [Run(method, staleness, "auto", seed) for staleness in (0, 1) for seed in seeds]
        runs.append(Run(method, 4, "auto", seeds[0]))
        if method in CORRECTED:
            runs += [Run(method, staleness, "none", seeds[0]) for staleness in (1, 4)]
        if method == "ppo":
            runs += [Run(method, staleness, how, seeds[0]) for staleness in (2, 8) for how in ("auto", "none")]
    return runs


def fine_tuned(task: Any, seed: int, out: Path) -> str:
    """Return the directory of the model that SFT made for a seed, training it the first time."""
    place = out / f"sft-{seed}"
    if not (place / "model").exists():
        changes = {"train.seed": seed, "train.run_dir": str(place), "train.trackers": []}
        config = TRLConfig.load_yaml(EXAMPLES / "randomwalks" / "sft.yaml").update(changes)
        trainkit.train(config=config, **task.sft(seed))
    return str(place / "model")


def measure(run: Run, task: Any, out: Path) -> None:
    """Train, and note the results in ``run``."""
    watch = Watch()
    changes = {
        "train.seed": run.seed,
        "train.run_dir": str(out / f"{run.method}-{run.staleness}-{run.correction}-{run.seed}"),
        "train.trackers": [],
        "train.save_interval": 0,
        "model.model_path": fine_tuned(task, run.seed, out),
        "rollout.staleness": run.staleness,
        "rollout.correction": run.correction,
    }
    config = TRLConfig.load_yaml(CONFIGS[run.method]).update(changes)
    trainer = trainkit.train(config=config, callbacks=[watch], **task.ppo(run.seed))
    run.curve, run.seconds = watch.curve, trainer.progress.seconds
    run.sampler_kl = watch.mean("policy/sampler_kl", 0.0)
    run.sample_size = watch.mean("rollout/effective_sample_size", 1.0)


def show(runs: list[Run]) -> None:
    """Print a table with a line for each method, staleness and correction."""
    table = Table("method", "staleness", "correction", "seeds", "before", "end", "KL(sampler‖policy)", "sample size")
    for key in dict.fromkeys((run.method, run.staleness, run.correction) for run in runs):
        same = [run for run in runs if (run.method, run.staleness, run.correction) == key]
        how = "none" if not (key[1] and key[0] in CORRECTED) else {"auto": "decoupled"}.get(key[2], key[2])
        ends = " ".join(f"{run.end:.3f}" for run in same)
        gap = f"{statistics.fmean(run.sampler_kl for run in same):.4f}" if key[1] else ""
        size = f"{statistics.fmean(run.sample_size for run in same):.3f}" if how == "decoupled" else ""
        before = " ".join(f"{run.curve[0][1]:.3f}" for run in same)
        table.add_row(key[0], str(key[1]), how, str(len(same)), before, ends, gap, size)
    console.print(table)


def costs(runs: list[Run], method: str) -> bool:
    """Return whether staleness 1 ends lower than 0 by more than noise."""
    ends = [
        [run.end for run in runs if (run.method, run.staleness, run.correction) == (method, s, "auto")] for s in (0, 1)
    ]
    if min(map(len, ends)) < 2:
        return False
    fresh, stale = ends
    error = sum(statistics.variance(values) / len(values) for values in ends) ** 0.5
    lower = statistics.fmean(fresh) - statistics.fmean(stale)
    console.print(f"{method}: staleness 1 ends lower by {lower:+.3f} (standard error {error:.3f})")
    return lower > max(2 * error, SMALL)


def timed() -> int:
    """Print seconds per collection of all systems; return 1 if Ray is not fast enough, else 0."""
    table = Table("method", "system", "seconds per collection", "speed")
    speed = {}
    for method in TIMED:
        found = {name: statistics.median(_timed(method, name)) for name in SYSTEMS}
        first = found["in turns, one thread"]
        speed[method] = first / found["ray, staleness 1"]
        for name, seconds in found.items():
            table.add_row(method, name, f"{seconds:.3f}", f"{first / seconds:.2f}")
    console.print(table)
    return int(speed["online_dpo"] < FASTER)


def _timed(method: str, name: str) -> list[float]:
    """Return the seconds of each collection of a system, which is started."""
    system = SYSTEMS[name]
    command = [sys.executable, __file__, "--timed", json.dumps({**system, **TIMED[method]})]
    if system["processes"] == 2:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(system["threads"]), "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{method}, {name} failed:\n{done.stderr[-2000:]}")
    seconds: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    console.print(f"{method}, {name}: {statistics.median(seconds):.3f} s per collection")
    return seconds


class Stamps:
    """A callback that notes when each step ended; a collection is one step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    @trainkit.hookimpl
    def on_step(self) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())


def time_one(system: dict[str, Any]) -> None:
    """Train with one system, and print the seconds between the steps as JSON."""
    torch.set_num_threads(system["threads"])
    tokenizer, stamps = character_tokenizer("abcdefgh"), Stamps()
    settings = {key: value for key, value in system.items() if "." in key}
    config: TRLConfig[Any] = TRLConfig.from_dict(
        {
            "method": system["method"],
            "model": {"model_path": tiny_gpt2(len(tokenizer), n_layer=6, n_embd=256, n_head=4, n_positions=256)},
            "rollout": {"max_new_tokens": 64, "batch_size": 64},
            "train": {"total_steps": COLLECTIONS, "eval_interval": 0, "save_interval": 0},
        }
    )
    with tempfile.TemporaryDirectory() as out:
        trainkit.train(
            config=config.update({**settings, "train.trackers": [], "train.run_dir": f"{out}/run"}),
            tokenizer=tokenizer,
            prompts=["abcdefgh" * 4] * 16,
            reward_fn=lambda outputs, **_: [float(output.count("a")) for output in outputs],
            callbacks=[stamps],
        )
    seconds = [after - before for before, after in zip(stamps.times[2:], stamps.times[3:], strict=False)]
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(seconds))


def main() -> int:
    """Make the runs; return 1 if staleness 1 costs more than noise, or Ray is too slow, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=list(CONFIGS), default=list(CONFIGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures to this file, after every run")
    parser.add_argument("--out", type=Path, help="the directory of the runs (default: a temporary directory)")
    parser.add_argument("--time", action="store_true", help="measure speed instead")
    parser.add_argument("--timed", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.timed:
        time_one(options.timed)
        return 0
    if options.time:
        return timed()
    torch.set_num_threads(options.threads)
    versions = {"trainkit": trainkit.__version__, **{name: version(name) for name in ("torch", "transformers")}}
    task, runs = load_file(EXAMPLES / "randomwalks" / "task.py"), planned(options.methods, options.seeds)
    with tempfile.TemporaryDirectory() as temporary:
        for index, run in enumerate(runs):
            measure(run, task, options.out or Path(temporary))
            console.print(f"{run.method} staleness {run.staleness} {run.correction} seed {run.seed}: {run.end:.3f}")
            if options.json:
                made = {"versions": versions, "runs": [asdict(made) for made in runs[: index + 1]]}
                options.json.write_text(json.dumps(made, indent=1), encoding="utf-8")
    show(runs)
    return int(any([costs(runs, method) for method in options.methods]))


if __name__ == "__main__":
    sys.exit(main())
