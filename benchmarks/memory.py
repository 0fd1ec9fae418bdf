"""Compares the memory that `trainkit estimate` computes with the peak that is measured.

``python benchmarks/memory.py`` makes the runs of ``benchmarks/speed.py`` (sft, rloo, ppo; and dpo and reward on as many
tokens; models S and M) for a few steps, each in its own process, without and with `train.gradient_checkpointing`.
Measured is the largest resident set size beyond that before the trainer is made, when Python and the libraries are
loaded and have made such a run with a model of one layer. It is measured twice: with glibc's malloc as it is, which
keeps fragments of what is freed, and with ``MALLOC_MMAP_THRESHOLD_=65536``, with which what is freed goes back to the
system, so that only what is in use is counted. It exits with 1 if an estimate is off by more than 15 % of what is in
use and by more than 20 MB.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).with_name("speed_systems")))

from with_trainkit import data, settings
from work import OFFLINE, Work

CASES = ("sft", "dpo", "reward", "rloo", "ppo")
LIMIT, SMALL = 0.15, 20e6
console = Console(highlight=False, width=150)


def of(case: str, model: str) -> Work:
    """Return the work of a case: 32 responses, or 8 samples or pairs of 256 tokens."""
    return Work("trainkit", case, model, rows=8 if case in OFFLINE else 32)


def configuration(work: Work, again: bool) -> dict[str, Any]:
    """Return the config of the work."""
    found = settings(work)
    steps = 2 * work.epochs if work.case == "ppo" else 3
    found["train"] |= {"total_steps": steps, "gradient_checkpointing": again}
    return found


def run(work: Work, again: bool) -> None:
    """Make the steps, and print the growth of the resident memory in bytes."""
    import trainkit

    torch.set_num_threads(1)
    config: Any = trainkit.TRLConfig.from_dict(configuration(work, again))
    trainkit.get_trainer(work.case)
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama  # noqa: F401
    from torch import _dynamo  # noqa: F401  (optimizers import it when they are made)

    with tempfile.TemporaryDirectory() as place:  # what libraries load and keep in their first steps
        small = config.update({"model.model_path": small_fields(work), "train.run_dir": f"{place}/run"})
        trainkit.train(config=small, tokenizer=work.tokenizer(ends=True), **data(work))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free goes back to the system, and does not count as used before
    before = float(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    trainkit.train(config=config, tokenizer=work.tokenizer(ends=True), **data(work))
    print(json.dumps({"before": before, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


def small_fields(work: Work) -> dict[str, Any]:
    """Return the fields of a model of one layer: oneDNN keeps kernels for the shapes of its products."""
    return {**work.fields, {"S": "n_layer"}.get(work.model, "num_hidden_layers"): 1}


def measured(case: str, model: str, again: bool, **variables: str) -> float:
    """Return the growth of the resident memory in bytes, of a process of its own with these variables."""
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **quiet, **variables}
    arguments = [sys.executable, "-W", "ignore", __file__, "--measured", case, model, str(int(again))]
    with tempfile.TemporaryDirectory() as place:
        done = subprocess.run(arguments, capture_output=True, text=True, env=environment, cwd=place, check=False)
    if done.returncode:
        raise SystemExit(f"{case} on {model} failed:\n{done.stderr[-3000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return float(found["peak"] - found["before"])


def main() -> int:
    """Print the table; return 1 if an estimate is off by too much, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--models", nargs="+", choices=["S", "M"], default=["S", "M"])
    parser.add_argument("--measured", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measured:
        case, model, again = options.measured
        run(of(case, model), again == "1")
        return 0
    from trainkit import TRLConfig
    from trainkit_tools.estimates import measure, plan

    columns = ("case", "model", "recomputed", "estimated", "in use", "off", "with malloc", "off", "phase")
    table = Table(*columns, title="MB beyond Python and the libraries")
    missed = []
    for model in options.models:
        for case in options.cases:
            for again in (False, True):
                work, online = of(case, model), case not in OFFLINE
                config: Any = TRLConfig.from_dict(configuration(work, again))
                phase = plan(measure(config, prompt=work.prompt if online else None), "none", 1).largest
                used = measured(case, model, again, MALLOC_MMAP_THRESHOLD_="65536")
                grown = measured(case, model, again)
                missed += [f"{case} on {model}"] if abs(phase.total - used) > max(LIMIT * used, SMALL) else []
                figures = [f"{phase.total / 1e6:.0f}"]
                figures += [text for x in (used, grown) for text in (f"{x / 1e6:.0f}", f"{phase.total / x - 1:+.0%}")]
                table.add_row(case, model, "yes" if again else "", *figures, phase.name)
    console.print(table)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
