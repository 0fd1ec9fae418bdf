"""Measures what the loop adds to a small step: trainkit's step of SFT, less the same tensor work written by hand.

The model is a GPT-2 of one layer of width 32, and a step reads 8 rows of 32 tokens. The step by hand is a forward pass
of the model, the cross-entropy, the backward pass, clipping and a fused AdamW. Both are made in turn in one process.
Seconds are processor time of one thread. Exits with 1 if the median of the differences exceeds ``--most`` milliseconds.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
import torch.nn.functional as F

import trainkit
from trainkit.testing import character_tokenizer

LETTERS, ROWS, LENGTH, WARMUP = "abcdefghijklmnopqrstuvwxyz", 8, 32, 20


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
    """Measure and print; return 1 if the loop adds too much, else 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--most", type=float, default=2.0, help="milliseconds that the loop may add")
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw = random.Random(0)
    tokenizer = character_tokenizer(LETTERS)
    shape = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 32, "n_positions": 2 * LENGTH}
    steps = {"batch_size": ROWS, "total_steps": options.steps + WARMUP, "trackers": []}
    both = Alternation()
    with tempfile.TemporaryDirectory() as directory:
        trainkit.train(
            {**shape, "vocab_size": len(tokenizer)},
            samples=["".join(draw.choices(LETTERS, k=LENGTH - 1)) for _ in range(64)],
            tokenizer=tokenizer,
            callbacks=[both],
            config={
                "method": "sft",
                "train": {**steps, "eval_interval": 0, "save_interval": 0, "run_dir": f"{directory}/run"},
            },
        )
    loop, hand = both.loop[WARMUP:], both.hand[WARMUP:]
    added = 1000 * statistics.median(a - b for a, b in zip(loop, hand, strict=True))
    print(f"loop {1000 * statistics.median(loop):.2f} ms, by hand {1000 * statistics.median(hand):.2f} ms")
    print(f"the loop adds {added:.2f} ms per step (at most {options.most:g})")
    return added > options.most


if __name__ == "__main__":
    sys.exit(main())
