"""What every system of ``benchmarks/speed.py`` is given: the work, its data, and a worker's side of the alternation.

Runs where TRL is installed, too.
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
"""Tokens of a row of SFT, which is also the models' context; the character that is token 0."""
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
    """One system's share of one case."""

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
    """The function of `time` that seconds are taken from; `process_time` leaves out what other processes took."""
    backend: str = "default"
    """``equal``: "medium" is set for everyone. ``shared``: everyone gets trainkit's products and attention."""

    @property
    def fields(self) -> dict[str, Any]:
        """The model's config: no token of its vocabulary is EOS."""
        return {**MODELS[self.model], "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

    def network(self) -> PreTrainedModel:
        """The model, with random weights."""
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**self.fields), dtype=torch.float32).eval()

    def ids(self, rows: int, length: int) -> Tensor:
        """Random token ids [rows, length], the same for all systems."""
        return torch.randint(self.fields["vocab_size"] - 2, (rows, length), generator=torch.Generator().manual_seed(1))

    def texts(self, rows: int, length: int) -> list[str]:
        """The same as text: a token is a character."""
        return ["".join(chr(FIRST + i) for i in row) for row in self.ids(rows, length).tolist()]

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """One character per token; EOS has an id beyond the model's vocabulary, so that no row can end early."""
        vocabulary = {chr(FIRST + i): i for i in range(self.fields["vocab_size"] - 2)}
        vocabulary |= {"<pad>": len(vocabulary), "<eos>": 2**20}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=None))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        tokenizer.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def reward(completions: list[Any] | None = None, outputs: list[str] | None = None, **_: Any) -> list[float]:
    """Every other response is good: trivial to compute, with variance within a prompt."""
    return [float(i % 2) for i in range(len(completions or outputs or []))]


class Turns:
    """A worker's side: it blocks until told to make a step, and reports seconds by phase and peak memory."""

    def __init__(self, clock: str) -> None:
        self.clock: Callable[[], float] = getattr(time, clock)
        self.answers = os.fdopen(os.dup(1), "w")  # what libraries print on standard output must not get between
        os.dup2(2, 1)
        self.phases: Counter[str] = Counter()
        self.nested: list[float] = []
        self.started = 0.0

    def say(self, **facts: Any) -> None:
        """Write one line to the benchmark."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"peak": peak, **facts}), file=self.answers, flush=True)

    def ready(self) -> None:
        """Everything is made: wait for the first turn."""
        self.say()
        self._wait()

    def end(self) -> None:
        """A step is made: report it and wait for the next turn."""
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
        """Count what happens inside as ``name``, phases within it excepted."""
        started = self.clock()
        self.nested.append(0.0)
        yield
        seconds = self.clock() - started
        self.phases[name] += seconds - self.nested.pop()
        if self.nested:
            self.nested[-1] += seconds

    def time(self, owner: Any, method: str, name: str | Callable[..., str]) -> None:
        """Count every call of ``owner.method`` as a phase: ``name``, or what it says about the arguments."""
        inner = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name if isinstance(name, str) else name(*args, **kwargs)):
                return inner(*args, **kwargs)

        setattr(owner, method, timed)


def serve(run: Callable[[Work, Turns], None]) -> None:
    """Be a worker for the work that the command line describes."""
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
