"""Compares the speed and memory of trainkit with TRL, transformers, trlX and "bare", a loop in plain torch.

A case is a kind of work and a shape, such as ``rloo:8x4,32+64``: 8 prompts × 4 responses, prompts of 32 tokens and
responses of exactly 64. ``sft:8x32..256`` trains on 8 rows with 32 to 256 tokens, the same in every step of every
system; a row of reward modelling and DPO is a pair. `benchmarks/figures.py` has the table of cases that are measured
unless ``--cases`` names others. A case with its shape is measured as the options say; a name alone, or ``--models``,
``--precision`` and ``--backend`` alone, select from the table.

The reward is trivial. Model S has the shape of GPT-2 (4 layers × 128, vocabulary 300), model M that of Llama (6 layers
× 512, vocabulary 8,192), M50k is M with a vocabulary of 50,257, and G has the shape of GPT-2 (6 layers × 512,
vocabulary 8,192). Q05 and Q15 have the shapes of Qwen2.5 0.5B and 1.5B, for GPUs. No
response ends early: all systems sample with an EOS id outside the model's vocabulary, at no cost.

A step is a collection and its updates: PPO makes 4 epochs of 1 minibatch; RFT samples 4 responses to each prompt and
trains on half of them. A step of DPO counts the reference's pass over the rows; one of ``dpo-3`` is three updates and
one such pass by trainkit, which reads the rows with the reference once, and three by TRL, which by default does so in
every update.

Every system of a case runs in its own process, so that its peak memory can be measured. The systems make their steps
in turn, while the others sleep. Seconds are medians over ``--steps`` after ``--warmup``. On a machine with a CUDA
device all systems use it, and memory is what torch has allocated there.

``--backend default`` leaves each system its own settings. For trainkit and the baseline these are float32 products
by oneDNN where that is exact, with torch's own attention kernel. With ``equal``, all systems use the precision
"medium", which is oneDNN for all products on a CPU, and the same allocator, tcmalloc if it is installed; trainkit and
the baseline still exclude attention from "medium". With ``shared``, the other systems exclude attention, too.

TRL runs without activation recomputation, which is faster; ``--systems trainkit trl-recompute`` measures its default.
``trainkit-separate`` runs a prompt once for each of its responses; ``trainkit-joined`` runs rows without padding, and
``trainkit-padded`` with it, whatever the device. trlX is measured where ``--trlx-python`` names an
interpreter that has it. ``--clock cpu`` counts processor time, for machines on which other programs run.
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
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from figures import KINDS, TABLE, Case, Figures, MachineError, Row, verdicts
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

SYSTEMS = Path(__file__).with_name("speed_systems")
TRL_PYTHON = Path(__file__).parents[1] / ".venv-bench" / "bin" / "python"
MODELS = ("S", "M", "M50k", "G", "Q05", "Q15")
PHASES = ("generate", "old logprobs", "reference", "forward", "backward", "optimizer", "rest")
ALLOCATORS = ("tcmalloc_minimal", "tcmalloc")
FIELDS: dict[str, dict[str, Any]] = {
    "ppo": {"epochs": 4},
    "ppo-frozen": {"case": "ppo", "epochs": 4},
    "dpo-3": {"case": "dpo", "epochs": 3},
}
"""Fields of `Work` that the name of a case sets."""
VERSIONS = """
import json
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in ("torch", "transformers", "trl", "trlx"):
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""
"""A program that prints the versions of packages in its environment."""
SLOW = 4
"""bf16 is not measured where its products are this many times slower than those of float32."""
console = Console(highlight=False, width=150)


@dataclass(frozen=True)
class Job:
    """A case on a model, with the settings that all of its systems have."""

    case: Case
    model: str
    precision: str = "float32"
    backend: str = "default"
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Work` instead of those of the case."""

    def __str__(self) -> str:
        settings = [self.precision] * (self.precision != "float32") + [self.backend] * (self.backend != "default")
        return " ".join([f"{self.case} on {self.model}", *settings])


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
    waits: int | None = None
    """How often the host waited for a CUDA device in a step."""

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
        WorkerError: TRL's environment does not exist, or no interpreter with trlX is given.
    """
    if system == "trlx":
        if options.trlx_python is None:
            raise WorkerError("skipped: give the interpreter of an environment that has trlX, --trlx-python")
        return str(options.trlx_python)
    if not system.startswith("trl"):
        return sys.executable
    if not options.trl_python.exists():
        raise WorkerError(
            f"skipped: there is no {options.trl_python}; run `make .venv-bench/made`, or give --trl-python"
        )
    return str(options.trl_python)


def allocator(backend: str, options: argparse.Namespace) -> str | None:
    """Return the allocator that all workers preload; None for that of the C library."""
    if backend == "default":
        return None
    return options.allocator or next(filter(None, map(ctypes.util.find_library, ALLOCATORS)), None)


def environment(options: argparse.Namespace, backend: str = "default") -> dict[str, str]:
    """Return the environment of a worker."""
    threads = str(options.threads)
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
    found = {**os.environ, **quiet, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    if options.device == "cpu":
        found["CUDA_VISIBLE_DEVICES"] = ""
    if preload := allocator(backend, options):
        found["LD_PRELOAD"] = preload
    return found


def start(system: str, job: Job, options: argparse.Namespace, directory: Path) -> Worker:
    """Start the worker of a system."""
    work = {
        "system": system,
        "case": job.case.name,
        "model": job.model,
        "precision": job.precision,
        "backend": job.backend,
        "threads": options.threads,
        "clock": {"wall": "perf_counter", "cpu": "process_time"}[options.clock],
        "microbatch": options.microbatch,
        **job.case.fields(small=options.small),
        **FIELDS.get(job.case.name, {}),
        **job.fields,
    }
    log = directory / f"{system}.log"
    script = SYSTEMS / f"with_{system.split('-')[0]}.py"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [python_of(system, options), "-W", "ignore", str(script), json.dumps(work)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=directory,
            env=environment(options, job.backend),
        )
    return Worker(system, process, log)


def systems_of(job: Job, options: argparse.Namespace) -> list[str]:
    """Return the systems of a case: those that are asked for, or its own; trlX only where it is."""
    own = [name for name in KINDS[job.case.name].systems if name != "trlx" or options.trlx_python]
    return options.systems or own


def measure(job: Job, options: argparse.Namespace, progress: Progress) -> list[Worker]:
    """Run all systems of a case, one step each in turn unless ``--apart``, and return their workers."""
    together = systems_of(job, options)
    parts = [[system] for system in together] if options.apart else [together]
    return [worker for systems in parts for worker in in_turn(systems, job, options, progress)]


def in_turn(systems: list[str], job: Job, options: argparse.Namespace, progress: Progress) -> list[Worker]:
    """Run some systems of a case, one step each in turn, and return their workers."""
    workers: list[Worker] = []
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        started: list[Worker] = []
        for system in systems:
            try:
                started.append(start(system, job, options, directory))
                stack.callback(started[-1].stop)
            except WorkerError as failed:
                console.print(f"{job}: {system} {failed}", markup=False)
        for worker in started:  # all of them load their libraries at the same time
            try:
                worker.baseline = worker.hear()["peak"]
                workers.append(worker)
            except WorkerError as failed:
                console.print(f"{job}: {worker.system} {failed}", markup=False)
        task = progress.add_task(str(job), total=(options.warmup + options.steps) * len(workers))
        for _ in range(options.warmup + options.steps):
            for worker in list(workers):
                try:
                    worker.step()
                except WorkerError as failed:
                    console.print(f"{job}: {worker.system} {failed}", markup=False)
                    workers.remove(worker)
                progress.advance(task)
        progress.remove_task(task)
    for worker in workers:
        worker.waits = next((step["waits"] for step in worker.steps if "waits" in step), None)
        worker.steps = worker.steps[options.warmup :]
    return workers


def row(job: Job, worker: Worker) -> Row:
    """Return the medians of a system, as they are kept in a file."""
    times = [step["seconds"] for step in worker.steps]
    phases = {name: statistics.median(step["phases"].get(name, 0.0) for step in worker.steps) for name in PHASES}
    return {
        "case": str(job.case),
        "model": job.model,
        "precision": job.precision,
        "backend": job.backend,
        "system": worker.system,
        "seconds": round(worker.seconds, 4),
        "range": [round(min(times), 4), round(max(times), 4)],
        "peak": round(worker.peak, 1),
        "before": round(worker.baseline, 1),
        **({} if worker.waits is None else {"waits": worker.waits}),
        "phases": {name: round(seconds, 4) for name, seconds in phases.items() if seconds},
    }


def show(job: Job, rows: list[Row]) -> None:
    """Print a case's table."""
    own = next((each for each in rows if each["system"] == "trainkit"), None)
    columns = ["system", "seconds (range)", *PHASES, "peak MB (before)", "time", "memory"]
    table = Table(*columns, title=f"{job}; time and memory over trainkit's")
    for each in rows:
        phases = [each["phases"].get(name) for name in PHASES]
        table.add_row(
            each["system"],
            "{:.3f} ({:.3f}-{:.3f})".format(each["seconds"], *each["range"]),
            *["" if seconds is None else f"{seconds:.3f}" for seconds in phases],
            f"{each['peak']:.0f} ({each['before']:.0f})",
            f"{each['seconds'] / own['seconds']:.2f}" if own else "",
            f"{each['peak'] / own['peak']:.2f}" if own else "",
        )
    console.print(table)


def machine(options: argparse.Namespace) -> dict[str, Any]:
    """Return the device, the hardware, the speeds of products and the versions of this run."""
    script = [sys.executable, str(SYSTEMS / "products.py"), str(options.threads)]
    found: dict[str, Any] = json.loads(subprocess.check_output(script, text=True, env=environment(options)))
    versions: dict[str, str] = {}
    for python in (options.trlx_python, options.trl_python, sys.executable):  # trainkit's count
        if python is not None and Path(python).exists():
            versions |= json.loads(subprocess.check_output([str(python), "-c", VERSIONS], text=True))
    given = {name: getattr(options, name) for name in ("threads", "clock", "small")}
    return {**found, **given, "versions": versions, "date": date.today().isoformat()}


def jobs(options: argparse.Namespace) -> Iterator[Job]:
    """Yield what is measured: the table or a selection of it, and the cases that are given with a shape."""
    names = [Case.read(case).name for case in options.cases or () if ":" not in case]
    for part in TABLE if options.cases is None else [part for part in TABLE if Case.read(part.case).name in names]:
        if part.models == ("G",) and options.trlx_python is None and options.models is None:
            continue  # it is for trlX
        for model, precision, backend in (
            (model, precision, backend)
            for model in part.models
            for precision in part.precisions
            for backend in part.backends
        ):
            chosen = ((model, options.models), (precision, options.precision), (backend, options.backend))
            if all(asked is None or value in asked for value, asked in chosen):
                yield Job(Case.read(part.case), model, precision, backend)
    for case in options.cases or ():
        if ":" in case:
            for model in options.models or ("S", "M"):
                for precision in options.precision or ("float32",):
                    for backend in options.backend or ("default",):
                        yield Job(Case.read(case), model, precision, backend)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return the options that ``growth.py`` has too."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--systems", nargs="+", help="systems instead of each case's own, among them trl-recompute")
    made.add_argument("--steps", type=int, default=5)
    made.add_argument("--warmup", type=int, default=2)
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--microbatch", type=int, help="rows of a forward pass in training, instead of each default")
    made.add_argument("--apart", action="store_true", help="one system after the other: two do not fit in memory")
    made.add_argument("--device", choices=["cpu"], help="cpu: also where there is a CUDA device")
    made.add_argument("--allocator", help="the library that all workers preload, except with --backend default")
    made.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    made.add_argument("--small", action="store_true", help="few rows and tokens, to try whether everything runs")
    made.add_argument("--trl-python", type=Path, default=TRL_PYTHON, help="the interpreter of TRL's environment")
    made.add_argument("--trlx-python", type=Path, help="an interpreter that has trlX")
    made.add_argument("--json", type=Path, help="add the figures to this file, which docs/make_performance.py reads")
    return made


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    made = parser(__doc__)
    made.add_argument("--cases", nargs="+", help=f"cases instead of the whole table; {', '.join(KINDS)}")
    made.add_argument("--models", nargs="+", choices=MODELS)
    made.add_argument("--precision", nargs="+", choices=["float32", "bf16"])
    made.add_argument("--backend", nargs="+", choices=["default", "equal", "shared"])
    options = made.parse_args(arguments)
    try:
        options.jobs = list(jobs(options))
    except ValueError as wrong:
        made.error(str(wrong))
    if not options.jobs:
        made.error("the table has no such case; give a case with its shape, such as rloo:8x4,32+64")
    return options


def begin(options: argparse.Namespace) -> Figures:
    """Describe the machine, and return the figures that this run adds to.

    Raises:
        SystemExit: the file has figures of another machine.
    """
    about = machine(options)
    speeds = ", ".join(f"{name} {speed:g}" for name, speed in about["products"].items())
    console.print(f"{about['hardware']} ({about['device']}), {options.threads} thread(s), {options.clock} time")
    console.print(f"products in GFLOP/s: {speeds}")
    try:
        return Figures.open(options.json, about)
    except MachineError as other:
        raise SystemExit(str(other)) from None


def why_not(job: Job, products: Mapping[str, float]) -> str | None:
    """Return why a case is not measured on this machine; None if it is."""
    usual, bf16 = products["float32, default library"], products["bf16"]
    if job.precision == "bf16" and bf16 * SLOW < usual:
        return f"skipped: products of bf16 have {bf16:g} GFLOP/s here, and those of float32 {usual:g}"
    return None


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and compare with the targets; return 1 if one is missed, else 0."""
    options = parse(arguments)
    figures = begin(options)
    measured: list[Row] = []
    with Progress(console=console, transient=True) as progress:
        for at, job in enumerate(options.jobs, 1):
            console.print(f"{at} of {len(options.jobs)}: {job}", markup=False)
            if reason := why_not(job, figures.machine["products"]):
                console.print(reason)
                continue
            rows = [row(job, worker) for worker in measure(job, options, progress)]
            show(job, rows)
            figures.add(rows)
            measured += rows
    said = [] if options.small else list(verdicts(measured))
    for each in said:
        console.print(f"{'reached' if each.reached else 'MISSED ':7}  {each.measured:5.2f}  {each.text}")
    return 0 if all(each.reached for each in said) else 1


if __name__ == "__main__":
    sys.exit(main())
