"""Compares the speed and memory of trainkit with TRL, transformers and "bare", a hand-written baseline in plain torch.

A step of RLOO (8 prompts × 4 responses), of PPO (4 epochs, 1 minibatch) and of generation makes 32 responses of exactly
64 tokens to prompts of 32 tokens. A step of SFT reads 8 rows × 256 tokens. The reward is trivial, and all numbers are
float32. Model S has the shape of GPT-2 (4 layers × 128, vocabulary 300), model M that of Llama (6 layers × 512,
vocabulary 8,192). No row ends early: all systems get an EOS id outside the model's vocabulary, at no cost.

Every system of a case runs in its own process, so that its peak memory can be measured. The systems make their steps in
turn, while the others sleep. Seconds are medians over ``--steps`` after ``--warmup``.

``--backend default`` leaves each system its own settings. For trainkit and the baseline these are float32 products
by oneDNN where that is exact, with torch's own attention kernel. With ``equal``, all systems use the precision
"medium", which is oneDNN for all products, and the same allocator, tcmalloc if it is installed; trainkit and the
baseline still exclude attention from "medium". With ``shared``, the other systems exclude attention, too.

TRL runs without activation recomputation, which is faster; ``--systems trainkit trl-recompute`` measures its default.
``--clock cpu`` counts processor time, for machines on which other programs run.
"""

from __future__ import annotations

import argparse
import ctypes.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

SYSTEMS = Path(__file__).with_name("speed_systems")
TRL_PYTHON = Path(__file__).parents[1] / ".venv-bench" / "bin" / "python"
CASES = {
    "generate": ("trainkit", "transformers", "bare"),
    "rloo": ("trainkit", "trl", "bare"),
    "ppo": ("trainkit", "bare"),
    "ppo-frozen": ("trainkit", "trainkit-frozen"),
    "sft": ("trainkit", "trl", "bare"),
}
PHASES = ("generate", "old logprobs", "reference", "forward", "backward", "optimizer", "rest")
ALLOCATORS = ("tcmalloc_minimal", "tcmalloc")
console = Console(highlight=False, width=150)


@dataclass
class Target:
    """A bound on the ratio ``over`` / ``under`` of a figure: at least ``bound`` with ``least``, else at most."""

    case: str
    figure: Literal["seconds", "peak"]
    over: str
    under: str
    bound: float
    least: bool = False
    backend: str | None = None


TARGETS = (
    Target("rloo", "seconds", "trl", "trainkit", 2.5, least=True, backend="default"),
    Target("rloo", "seconds", "trl", "trainkit", 1.8, least=True, backend="equal"),
    Target("rloo", "peak", "trainkit", "trl", 0.7),
    Target("rloo", "seconds", "trainkit", "bare", 1.25),
    Target("sft", "seconds", "trl", "trainkit", 1.2, least=True),
    Target("generate", "seconds", "transformers", "trainkit", 2.0, least=True, backend="default"),
    Target("generate", "seconds", "transformers", "trainkit", 1.5, least=True, backend="equal"),
    Target("ppo", "seconds", "trainkit", "bare", 1.25),
    Target("ppo-frozen", "seconds", "trainkit", "trainkit-frozen", 1.8, least=True),
)


class WorkerError(Exception):
    """A worker that has ended, or has nothing to measure; the message says why."""


@dataclass
class Worker:
    """The process of one system in one case, which makes a step on request."""

    system: str
    process: subprocess.Popen[str]
    log: Path
    steps: list[dict[str, Any]] = field(default_factory=list)
    baseline: float = 0.0

    def hear(self) -> dict[str, Any]:
        """Read the worker's next line.

        Raises:
            WorkerError: the worker has nothing to measure, or has ended.
        """
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise WorkerError("ended: " + " | ".join(self.log.read_text(errors="replace").strip().splitlines()[-3:]))
        said: dict[str, Any] = json.loads(line)
        if "skip" in said:
            raise WorkerError("skipped: " + said["skip"])
        return said

    def step(self) -> None:
        """Request one step, and keep its measurements."""
        assert self.process.stdin is not None
        try:
            print("step", file=self.process.stdin, flush=True)
        except BrokenPipeError:
            self.process.wait()
        self.steps.append(self.hear())

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()

    @property
    def seconds(self) -> float:
        """The median time of a step."""
        return statistics.median(step["seconds"] for step in self.steps)

    @property
    def peak(self) -> float:
        """The largest resident set size, in MB."""
        return float(self.steps[-1]["peak"])


def python_of(system: str, options: argparse.Namespace) -> str:
    """Return the Python interpreter of the system's environment.

    Raises:
        WorkerError: TRL's environment does not exist.
    """
    if not system.startswith("trl"):
        return sys.executable
    if not options.trl_python.exists():
        raise WorkerError(
            f"skipped: there is no {options.trl_python}; run `make .venv-bench/made`, or give --trl-python"
        )
    return str(options.trl_python)


def allocator(options: argparse.Namespace) -> str | None:
    """Return the allocator that all workers preload; None for that of the C library."""
    if options.backend == "default":
        return None
    return options.allocator or next(filter(None, map(ctypes.util.find_library, ALLOCATORS)), None)


def start(system: str, case: str, model: str, options: argparse.Namespace, directory: Path) -> Worker:
    """Start the worker of a system."""
    threads = str(options.threads)
    work = {
        "system": system,
        "case": "ppo" if case == "ppo-frozen" else case,
        "model": model,
        "threads": options.threads,
        "clock": {"wall": "perf_counter", "cpu": "process_time"}[options.clock],
        "backend": options.backend,
        **({"rows": 8, "prompt": 8, "new": 8, "sft_rows": 2} if options.small else {}),
    }
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = {**os.environ, **quiet, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    if preload := allocator(options):
        environment["LD_PRELOAD"] = preload
    log = directory / f"{case}-{model}-{system}.log"
    script = SYSTEMS / f"with_{system.split('-')[0]}.py"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [python_of(system, options), "-W", "ignore", str(script), json.dumps(work)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=directory,
            env=environment,
        )
    return Worker(system, process, log)


def measure(case: str, model: str, options: argparse.Namespace, progress: Progress) -> list[Worker]:
    """Run all systems of a case, one step each in turn, and return their workers."""
    workers: list[Worker] = []
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for system in options.systems or CASES[case]:
            try:
                worker = start(system, case, model, options, directory)
                stack.callback(worker.stop)
                worker.baseline = worker.hear()["peak"]
                workers.append(worker)
            except WorkerError as failed:
                console.print(f"{case} on {model}: {system} {failed}")
        task = progress.add_task(f"{case} on {model}", total=(options.warmup + options.steps) * len(workers))
        for _ in range(options.warmup + options.steps):
            for worker in list(workers):
                try:
                    worker.step()
                except WorkerError as failed:
                    console.print(f"{case} on {model}: {worker.system} {failed}")
                    workers.remove(worker)
                progress.advance(task)
        progress.remove_task(task)
    for worker in workers:
        worker.steps = worker.steps[options.warmup :]
    return workers


def show(case: str, model: str, workers: list[Worker]) -> None:
    """Print a case's table."""
    own = next((worker for worker in workers if worker.system == "trainkit"), None)
    columns = ["system", "seconds (range)", *PHASES, "peak MB (before)", "time", "memory"]
    table = Table(*columns, title=f"{case} on {model}; time and memory over trainkit's")
    for worker in workers:
        times = [step["seconds"] for step in worker.steps]
        phases = [statistics.median(step["phases"].get(name, 0.0) for step in worker.steps) for name in PHASES]
        table.add_row(
            worker.system,
            f"{worker.seconds:.3f} ({min(times):.3f}-{max(times):.3f})",
            *[f"{seconds:.3f}" if seconds else "" for seconds in phases],
            f"{worker.peak:.0f} ({worker.baseline:.0f})",
            f"{worker.seconds / own.seconds:.2f}" if own else "",
            f"{worker.peak / own.peak:.2f}" if own else "",
        )
    console.print(table)


def verdicts(found: dict[tuple[str, str], list[Worker]], backend: str) -> Iterator[tuple[str, float, bool]]:
    """Yield the text, the measured ratio and whether it is reached, for each target whose systems were measured."""
    for (case, model), workers in found.items():
        figures = {worker.system: worker for worker in workers}
        for target in TARGETS:  # the targets of "equal" hold for "shared" too
            if (
                target.case != case
                or target.backend not in (None, backend.replace("shared", "equal"))
                or not {target.over, target.under} <= {*figures}
            ):
                continue
            ratio = getattr(figures[target.over], target.figure) / getattr(figures[target.under], target.figure)
            sign = ">=" if target.least else "<="
            text = f"{case} on {model}: {target.figure} of {target.over} / {target.under} {sign} {target.bound}"
            yield text, ratio, ratio >= target.bound if target.least else ratio <= target.bound


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--models", nargs="+", choices=["S", "M"], default=["S", "M"])
    parser.add_argument("--systems", nargs="+", help="systems instead of each case's own, among them trl-recompute")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--backend", choices=["default", "equal", "shared"], default="default")
    parser.add_argument("--allocator", help="the library that all workers preload, except with --backend default")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--small", action="store_true", help="a quarter of the rows and an eighth of the tokens")
    parser.add_argument("--trl-python", type=Path, default=TRL_PYTHON, help="the interpreter of TRL's environment")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and compare with the targets; return 1 if one is missed, else 0."""
    options = parse(arguments)
    preload = allocator(options) or "the C library's"
    console.print(f"backend {options.backend}, allocator {preload}, {options.threads} thread(s), {options.clock} time")
    found: dict[tuple[str, str], list[Worker]] = {}
    with Progress(console=console, transient=True) as progress:
        for model in options.models:
            for case in options.cases:
                if case == "ppo-frozen" and model != "M":
                    continue
                found[case, model] = measure(case, model, options, progress)
                show(case, model, found[case, model])
    said = [] if options.small else list(verdicts(found, options.backend))
    for text, ratio, reached in said:
        console.print(f"{'reached' if reached else 'MISSED ':7}  {ratio:5.2f}  {text}")
    if options.json:
        rows = [
            {"case": case, "model": model, "system": w.system, "baseline": w.baseline, "steps": w.steps}
            for (case, model), workers in found.items()
            for w in workers
        ]
        options.json.write_text(json.dumps({"options": vars(options), "rows": rows}, default=str, indent=1))
    return 0 if all(reached for *_, reached in said) else 1


if __name__ == "__main__":
    sys.exit(main())
