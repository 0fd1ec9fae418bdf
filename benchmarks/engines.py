"""Compares the speed of generation: trainkit's sampler (local), transformers' ``generate``, and vLLM in a server.

A step makes 32 responses of exactly 64 tokens to prompts of 32 tokens with model M of ``speed.py`` (Llama, 6 layers ×
512, vocabulary 8,192), at temperature 1. All numbers are float32; no row ends early. The systems make their steps in
turn, each on ``--threads`` threads. The figures are medians over ``--steps`` after ``--warmup``.

Seconds of the processor are those of all processes that take part: for vLLM, this process, which sends the requests,
and those of the server. Loading the weights into vLLM is measured separately; the other systems do not need it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).with_name("speed_systems")))

import torch
from rich.console import Console
from rich.table import Table
from work import LENGTH, Work

from trainkit.config import SamplingConfig
from trainkit.models.backend import use_fast_exact_matmul
from trainkit.plugins import get_engine
from trainkit.rollouts import Request, ServedModel, Weights

SYSTEMS = ("local", "generate", "vllm")
TICK = os.sysconf("SC_CLK_TCK")
console = Console(highlight=False, width=120)


def processor(processes: list[int]) -> float:
    """Return the seconds of the processor that this process and ``processes`` have used."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in processes]
    return time.process_time() + sum(int(row[11]) + int(row[12]) for row in fields) / TICK


def descendants(pid: int) -> list[int]:
    """Return the processes that ``pid`` has started, and those that these have started."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it has ended
    found, waiting = [], [pid]
    while waiting:
        parent = waiting.pop()
        children = [child for child, its in parents.items() if its == parent]
        found += children
        waiting += children
    return found


class System:
    """A system, ready to make steps."""

    def __init__(self, name: str, work: Work, served: ServedModel) -> None:
        self.name, self.work, self.served = name, work, served
        self.steps: list[dict[str, float]] = []
        self.loads: list[float] = []
        self.queries = work.ids(work.rows, work.prompt).tolist()
        self.engine: Any = None
        if name != "generate":
            found = get_engine(name)
            config = None if found.settings is None else found.settings(name=name, kv_cache=1)  # type: ignore[call-arg]
            self.engine = found.made(config, served)
        self.made: Callable[[int], int] = self.by_transformers if name == "generate" else self.by_engine

    def by_transformers(self, step: int) -> int:
        """Generate with the model's own method, and return the number of tokens."""
        ids = torch.tensor(self.queries)
        pad, precision = self.work.fields["vocab_size"] - 2, torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")  # torch's default
        made = self.served.model.generate(ids, do_sample=True, top_k=0, max_new_tokens=self.work.new, pad_token_id=pad)
        torch.set_float32_matmul_precision(precision)
        return int(made.numel() - ids.numel())

    def by_engine(self, step: int) -> int:
        """Load the weights, generate with the engine, and return the number of tokens."""
        begun = time.perf_counter()
        self.engine.load(Weights(step, lambda: self.served.model.state_dict().items()))
        self.loads.append(time.perf_counter() - begun)
        self.begin()
        seeds = range(step * self.work.rows, (step + 1) * self.work.rows)
        request = Request(self.queries, seeds, SamplingConfig(max_new_tokens=self.work.new), "generate")
        return sum(map(len, self.engine.submit(request).result().ids))

    def begin(self) -> None:
        """Begin to measure."""
        self.processes = descendants(os.getpid()) if self.name == "vllm" else []
        self.wall, self.used = time.perf_counter(), processor(self.processes)

    def step(self, step: int) -> None:
        """Make one step, and keep its figures."""
        self.begin()
        tokens = self.made(step)
        self.steps.append(
            {"wall": time.perf_counter() - self.wall, "cpu": processor(self.processes) - self.used, "tokens": tokens}
        )

    def median(self, figure: str) -> float:
        """Return the median of a figure over the steps."""
        return statistics.median(step[figure] for step in self.steps)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--model", choices=["S", "M"], default="M")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    options = parse(arguments)
    torch.manual_seed(1)
    torch.set_num_threads(options.threads)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # the server's threads
    use_fast_exact_matmul(torch.device("cpu"))  # as in a run
    work = Work("engines", "generate", options.model, rows=options.rows)
    served = ServedModel(work.network(), work.tokenizer(), eos=[], limit=LENGTH, options={"head_alone": True})
    systems = [System(name, work, served) for name in options.systems]
    try:
        for step in range(options.warmup + options.steps):
            for system in systems:
                system.step(step)
    finally:
        for system in systems:
            if system.engine is not None:
                system.engine.close()
    table = Table("system", "CPU seconds", "tokens per CPU second", "wall seconds", "loading", "CPU, over the first")
    for system in systems:
        system.steps = system.steps[options.warmup :]
        cpu = system.median("cpu")
        loading = f"{statistics.median(system.loads):.3f}" if system.name == "vllm" else ""
        table.add_row(
            system.name,
            f"{cpu:.2f} ({min(s['cpu'] for s in system.steps):.2f}-{max(s['cpu'] for s in system.steps):.2f})",
            f"{system.median('tokens') / cpu:.0f}",
            f"{system.median('wall'):.2f}",
            loading,
            f"{cpu / systems[0].median('cpu'):.2f}",
        )
    console.print(table)
    if options.json:
        rows = [{"system": system.name, "steps": system.steps, "loads": system.loads} for system in systems]
        options.json.write_text(json.dumps({"options": vars(options), "rows": rows}, default=str, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
