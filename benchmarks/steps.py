"""Measures what the loop adds to a small step, and what `trainkit train` adds to the imports of torch and transformers.

The first is trainkit's step of SFT, less the same tensor work written by hand.

The model is a GPT-2 of one layer of width 32, and a step reads 8 rows of 32 tokens. The step by hand is a forward pass
of the model, the cross-entropy, the backward pass, clipping and a fused AdamW. Both are made in turn in one process.
Seconds are processor time of one thread.

The second is the processor time of a process that trains this model for one step from files, over that of a process
which imports torch, and from transformers the classes that such a run loads, in turn.

Exits with 1 if the median of the differences exceeds ``--most`` milliseconds, or the ratio of the medians ``--start``.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import trainkit
from trainkit.testing import character_tokenizer

LETTERS, ROWS, LENGTH, WARMUP, TURNS = "abcdefghijklmnopqrstuvwxyz", 8, 32, 20, 5
SHAPE = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 2 * LENGTH}
TRAINKIT = str(Path(sys.executable).with_name("trainkit"))
IMPORTS = "import torch; from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel"


class Alternation:
    """A callback that makes the step by hand after each step of the loop, and times both."""

    def __init__(self) -> None:
        self.loop: list[float] = []
        self.hand: list[float] = []

    @trainkit.hookimpl
    def on_train_begin(self, trainer: Any) -> None:
        """Copy the model."""
        self.model = copy.deepcopy(trainer.unwrapped.model).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.ids = torch.randint(0, len(LETTERS), (ROWS, LENGTH))
        self.started = time.process_time()

    @trainkit.hookimpl
    def on_step(self) -> None:
        """End the loop's step, and make the one by hand."""
        ended = time.process_time()
        self.loop.append(ended - self.started)
        logits = self.model(self.ids, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), self.ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()
        self.started = time.process_time()
        self.hand.append(self.started - ended)


def main() -> int:
    """Measure and print; return 1 if the loop or the start adds too much, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--most", type=float, default=2.0, help="milliseconds that the loop may add")
    parser.add_argument("--start", type=float, default=1.5, help="times the imports that a start may take")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = character_tokenizer(LETTERS)
    with tempfile.TemporaryDirectory() as directory:
        slow = step(tokenizer, options, Path(directory)) > options.most
        late = start(tokenizer, Path(directory)) > options.start
    return slow or late


def step(tokenizer: Any, options: argparse.Namespace, directory: Path) -> float:
    """Print and return the milliseconds that the loop adds to a step."""
    draw, both = random.Random(0), Alternation()
    steps = {"batch_size": ROWS, "total_steps": options.steps + WARMUP, "trackers": []}
    trainkit.train(
        {**SHAPE, "vocab_size": len(tokenizer)},
        samples=["".join(draw.choices(LETTERS, k=LENGTH - 1)) for _ in range(64)],
        tokenizer=tokenizer,
        callbacks=[both],
        config={
            "method": "sft",
            "train": {**steps, "eval_interval": 0, "save_interval": 0, "run_dir": str(directory / "run")},
        },
    )
    loop, hand = both.loop[WARMUP:], both.hand[WARMUP:]
    added = 1000 * statistics.median(a - b for a, b in zip(loop, hand, strict=True))
    print(f"loop {1000 * statistics.median(loop):.2f} ms, by hand {1000 * statistics.median(hand):.2f} ms")
    print(f"the loop adds {added:.2f} ms per step (at most {options.most:g})")
    return added


def start(tokenizer: Any, directory: Path) -> float:
    """Print and return the time of a run of one step over that of the imports."""
    tokenizer.save_pretrained(directory / "tokenizer")
    (directory / "samples.txt").write_text("\n".join([LETTERS] * ROWS))
    trainkit.TRLConfig.from_dict(
        {
            "method": "sft",
            "model": {"model_path": {**SHAPE, "vocab_size": len(tokenizer)}},
            "tokenizer": {"tokenizer_path": str(directory / "tokenizer")},
            "train": {"total_steps": 1, "batch_size": ROWS, "save_interval": 0},
        }
    ).save_yaml(directory / "config.yaml")
    found: dict[str, list[float]] = {"imports": [], "run": []}
    for turn in range(TURNS):
        data = ["--samples", str(directory / "samples.txt"), f"train.run_dir={directory}/started-{turn}"]
        found["imports"].append(seconds([sys.executable, "-c", IMPORTS]))
        found["run"].append(seconds([TRAINKIT, "train", str(directory / "config.yaml"), *data]))
    imports, run = (statistics.median(each) for each in found.values())
    print(f"a run of one step {run:.2f} s, imports {imports:.2f} s: {run / imports:.2f} times")
    return run / imports


def seconds(command: list[str]) -> float:
    """Return the processor time of a process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    before = os.times()
    subprocess.run(command, check=True, capture_output=True, env=environment)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


if __name__ == "__main__":
    sys.exit(main())
