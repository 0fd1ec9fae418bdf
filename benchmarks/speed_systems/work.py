"""The work of every system of ``benchmarks/speed.py``, its data, and a worker's communication with the benchmark.

This module also runs in TRL's environment.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

LENGTH, FIRST = 256, 0x4E00
"""The tokens of a row of SFT, which are also the models' context; the code point of the character of token 0."""
MODELS: dict[str, dict[str, Any]] = {
    "S": {"model_type": "gpt2", "n_layer": 4, "n_head": 4, "n_embd": 128, "n_positions": LENGTH, "vocab_size": 300},
    "M": {
        "model_type": "llama",
        "num_hidden_layers": 6,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 1408,
        "max_position_embeddings": LENGTH,
        "vocab_size": 8192,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True)
class Work:
    """The work of one system in one case."""

    system: str
    case: str
    model: str
    rows: int = 32
    prompt: int = 32
    new: int = 64
    samples: int = 4
    epochs: int = 4
    sft_rows: int = 8
    threads: int = 1
    clock: str = "perf_counter"
    """The function of `time` that measures seconds; `process_time` excludes the time of other processes."""
    backend: str = "default"
    """``equal``: all use the precision "medium". ``shared``: all use trainkit's products and attention."""

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the model's config, in which no token is EOS."""
        return {**MODELS[self.model], "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

    def network(self) -> PreTrainedModel:
        """Create the model with random weights."""
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**self.fields), dtype=torch.float32).eval()

    def ids(self, rows: int, length: int) -> Tensor:
        """Return random token ids [rows, length], the same for all systems."""
        return torch.randint(self.fields["vocab_size"] - 2, (rows, length), generator=torch.Generator().manual_seed(1))

    def texts(self, rows: int, length: int) -> list[str]:
        """Return the same ids as texts with one character per token."""
        return ["".join(chr(FIRST + i) for i in row) for row in self.ids(rows, length).tolist()]

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Create a tokenizer of characters; its EOS is outside the model's vocabulary, so that no row ends early."""
        vocabulary = {chr(FIRST + i): i for i in range(self.fields["vocab_size"] - 2)}
        vocabulary |= {"<pad>": len(vocabulary), "<eos>": 2**20}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=None))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        tokenizer.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def reward(completions: list[Any] | None = None, outputs: list[str] | None = None, **_: Any) -> list[float]:
    """Return 0 and 1 in turn: trivial to compute, and with variance within a prompt."""
    return [float(i % 2) for i in range(len(completions or outputs or []))]


class Turns:
    """A worker's turns: it waits for the request of a step, and reports seconds by phase and peak memory."""

    def __init__(self, clock: str) -> None:
        self.clock: Callable[[], float] = getattr(time, clock)
        self.answers = os.fdopen(os.dup(1), "w")  # libraries may print to standard output
        os.dup2(2, 1)
        self.phases: Counter[str] = Counter()
        self.nested: list[float] = []
        self.started = 0.0

    def say(self, **facts: Any) -> None:
        """Write one line to the benchmark."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"peak": peak, **facts}), file=self.answers, flush=True)

    def ready(self) -> None:
        """Report that the model is created, and wait for the first turn."""
        self.say()
        self._wait()

    def end(self) -> None:
        """Report the step, and wait for the next turn."""
        seconds = self.clock() - self.started
        self.say(seconds=seconds, phases={**self.phases, "rest": seconds - sum(self.phases.values())})
        self._wait()

    def _wait(self) -> None:
        if not sys.stdin.readline():
            sys.exit()
        self.phases.clear()
        self.started = self.clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time within the context as phase ``name``, except the time of phases inside it."""
        started = self.clock()
        self.nested.append(0.0)
        yield
        seconds = self.clock() - started
        self.phases[name] += seconds - self.nested.pop()
        if self.nested:
            self.nested[-1] += seconds

    def time(self, owner: Any, method: str, name: str | Callable[..., str]) -> None:
        """Time every call of ``owner.method`` as the phase ``name``; a function returns the name for the arguments."""
        inner = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name if isinstance(name, str) else name(*args, **kwargs)):
                return inner(*args, **kwargs)

        setattr(owner, method, timed)


def serve(run: Callable[[Work, Turns], None]) -> None:
    """Run the work that the command line describes."""
    work = Work(**json.loads(sys.argv[1]))
    turns = Turns(work.clock)
    torch.manual_seed(1)
    torch.set_num_threads(work.threads)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-work.threads :])
    if work.backend == "equal":
        torch.set_float32_matmul_precision("medium")
    if work.backend == "shared":
        from trainkit.models.backend import use_fast_exact_matmul

        use_fast_exact_matmul(torch.device("cpu"))
    run(work, turns)
