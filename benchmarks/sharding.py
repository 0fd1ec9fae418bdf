"""Measures the memory of each process under `train.sharding`: what it holds of weights, gradients and optimizer.

``python benchmarks/sharding.py`` trains by SFT on a GPT-2 with random weights for three steps, with 1, 2 and 4
processes on CPUs, and prints the bytes of the tensors that a process holds between the backward pass and the step, and
its resident memory beyond that before the model: the peak while the model is loaded and divided, in the first process
and in the others, and what remains after the last step. It exits with 1 if what FSDP2 divides does not
fall with the number of processes. ``--shardings none fsdp2 zero2 zero3`` needs `trainkit-deepspeed[deepspeed]`, of
which only the resident memory is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from rich.console import Console
from rich.table import Table
from torch import Tensor

from trainkit import TRLConfig, get_trainer
from trainkit.testing import character_tokenizer, tiny_gpt2

PROCESSES = (1, 2, 4)
MODEL = {"n_layer": 6, "n_embd": 1280, "n_head": 8, "n_positions": 128}
HELD = ("weights", "gradients", "optimizer")
SHOWN = (*HELD, "resident", "loading: first process", "loading: others")
TOLERANCE = 1.1
"""How much more than its share a process may hold."""
MEGABYTE = 1e6
console = Console(highlight=False, soft_wrap=True)


def held(tensors: Iterable[Any]) -> int:
    """Return the bytes of memory behind tensors that this process holds; several may lie in one block of memory."""
    own: list[Tensor] = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in map(Tensor.untyped_storage, own)}.values())


def resident() -> float:
    """Return the resident memory of this process, in bytes."""
    return float(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure(sharding: str, run_dir: str) -> None:
    """Train, and print what the first process holds as JSON."""
    torch.set_num_threads(1)
    tokenizer = character_tokenizer("abcdefgh")
    config: TRLConfig[Any] = TRLConfig.from_dict(
        {
            "method": "sft",
            "model": {"model_path": tiny_gpt2(len(tokenizer), **MODEL)},
            "train": {"batch_size": 8, "total_steps": 3, "eval_interval": 0, "save_interval": 0, "trackers": []},
        }
    ).update({"train.sharding": sharding, "train.run_dir": run_dir})
    trainer = get_trainer("sft")(config, tokenizer=tokenizer)
    trainer.add_samples([("abc", "defgh" * 4)] * 64)
    before, found = resident(), {}
    trainer.models.build()  # loads and divides the model
    peaks = gather_object([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before])
    found |= {SHOWN[-2]: peaks[0], **({SHOWN[-1]: max(peaks[1:])} if peaks[1:] else {})}
    if sharding in ("none", "fsdp2"):
        inner = trainer.optimizer.optimizer
        inner.register_step_pre_hook(lambda *_: found.update(gradients=_gradients(trainer)))
    trainer.learn()
    found["resident"] = resident() - before
    if sharding in ("none", "fsdp2"):
        found["weights"] = held(trainer.unwrapped.parameters())
        state = inner.state.values()
        found["optimizer"] = held(x for each in state for x in each.values() if isinstance(x, Tensor))
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(found))


def _gradients(trainer: Any) -> int:
    return held(p.grad for p in trainer.unwrapped.parameters() if p.grad is not None)


def run(sharding: str, processes: int) -> dict[str, float]:
    """Return what the first of ``processes`` holds, in MB."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    with tempfile.TemporaryDirectory() as out:
        arguments = [__file__, "--measured", sharding, "--run-dir", f"{out}/run"]
        done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{sharding} with {processes} processes failed:\n{done.stderr[-6000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return {name: value / MEGABYTE for name, value in json.loads(lines[-1]).items()}


def main() -> int:
    """Print the table; return 1 if FSDP2 does not divide what it should, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shardings", nargs="+", default=["none", "fsdp2"])
    parser.add_argument("--measured", help=argparse.SUPPRESS)
    parser.add_argument("--run-dir", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measured:
        measure(options.measured, options.run_dir)
        return 0
    table = Table("sharding", "processes", *SHOWN, title="MB per process")
    found = {}
    for sharding in options.shardings:
        for processes in PROCESSES:
            found[sharding, processes] = each = run(sharding, processes)
            table.add_row(sharding, str(processes), *(f"{each[name]:.0f}" if name in each else "" for name in SHOWN))
    console.print(table)
    too_much = [
        f"{name} of {processes} processes"
        for (sharding, processes), each in found.items()
        for name in HELD
        if sharding == "fsdp2" and each[name] > TOLERANCE * found[sharding, 1][name] / processes
    ]
    if too_much:
        console.print(f"not divided: {', '.join(too_much)}")
    return int(bool(too_much))


if __name__ == "__main__":
    sys.exit(main())
