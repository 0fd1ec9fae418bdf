"""The work of every system of ``benchmarks/speed.py``, its data, and a worker's communication with the benchmark.

This module also runs in the environments of TRL and trlX.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

CONTEXT, FIRST = 256, 0x20000
"""The models' context, unless the work needs a longer one; the code point of the character of token 0."""
PACKED = 8
"""How many of the longest texts a packed row has room for."""
MODELS: dict[str, dict[str, Any]] = {
    "S": {"model_type": "gpt2", "n_layer": 4, "n_head": 4, "n_embd": 128, "vocab_size": 300},
    "G": {"model_type": "gpt2", "n_layer": 6, "n_head": 8, "n_embd": 512, "vocab_size": 8192},
    "M": {
        "model_type": "llama",
        "num_hidden_layers": 6,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 1408,
        "vocab_size": 8192,
        "tie_word_embeddings": False,
    },
}
MODELS["M50k"] = {**MODELS["M"], "vocab_size": 50257}
QWEN = {"model_type": "qwen2", "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}
MODELS["Q05"] = {
    **QWEN,
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "num_attention_heads": 14,
    "intermediate_size": 4864,
}
MODELS["Q15"] = {
    **QWEN,
    "num_hidden_layers": 28,
    "hidden_size": 1536,
    "num_attention_heads": 12,
    "intermediate_size": 8960,
}
OFFLINE = ("sft", "sft-packed", "reward", "dpo", "ilql")
"""The cases on samples, whose rows end in an EOS token of the vocabulary."""


@dataclass(frozen=True)
class Work:
    """The work of one system in one case."""

    system: str
    case: str
    model: str
    rows: int = 32
    """Responses of a step, or rows of a dataset, which may be pairs."""
    prompt: int = 32
    new: int = 64
    samples: int = 4
    epochs: int = 1
    """Passes over the responses; of DPO, steps for each time that the reference reads the rows."""
    shortest: int = 256
    longest: int = 256
    """Tokens of the shortest and of the longest row of a dataset, EOS included."""
    vocabulary: int | None = None
    """Tokens, instead of the model's own number."""
    precision: str = "float32"
    microbatch: int | None = None
    """Rows of a forward pass in training; None: each system's default."""
    threads: int = 1
    clock: str = "perf_counter"
    """The function of `time` that measures seconds; `process_time` excludes the time of other processes."""
    backend: str = "default"
    """``equal``: all use the precision "medium". ``shared``: all use trainkit's products and attention."""

    @property
    def device(self) -> str:
        """The device that all systems use: a CUDA device, if there is one that they can see."""
        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of the model's config, in which no token is EOS."""
        fields, context = MODELS[self.model], max(CONTEXT, self.prompt + self.new, self.longest)
        context = PACKED * self.longest if self.case == "sft-packed" else context
        name = "n_positions" if fields["model_type"] == "gpt2" else "max_position_embeddings"
        size = {} if self.vocabulary is None else {"vocab_size": self.vocabulary}
        return {**fields, **size, name: context, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

    def network(self) -> PreTrainedModel:
        """Create the model with random weights in float32."""
        with torch.device(self.device):  # on a GPU this takes no time, on a CPU 20 seconds of Q15
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(**self.fields)).float().eval()

    def ids(self, rows: int, length: int) -> Tensor:
        """Return random token ids [rows, length] on the CPU, the same for all systems."""
        generator = torch.Generator().manual_seed(1)
        return torch.randint(self.fields["vocab_size"] - 2, (rows, length), generator=generator, device="cpu")

    def texts(self, rows: int, length: int) -> list[str]:
        """Return the same ids as texts with one character per token."""
        return [text(row) for row in self.ids(rows, length).tolist()]

    def lengths(self) -> list[int]:
        """Return the tokens of each row of a dataset without EOS, in equal steps from the shortest to the longest."""
        return torch.linspace(self.shortest, self.longest, self.rows, device="cpu").round().int().sub(1).tolist()

    def samples_of_a_step(self) -> list[str]:
        """Return the samples of a step; it trains on the same ones every time, so that all systems have equal work."""
        return [row[:length] for row, length in zip(self.texts(self.rows, self.longest), self.lengths(), strict=True)]

    def pairs_of_a_step(self) -> list[dict[str, str]]:
        """Return the pairs of a step; half of the tokens of the shorter side are the prompt of both."""
        lengths, texts = self.lengths(), self.texts(2 * self.rows, self.longest)
        pairs = []
        for index, chosen in enumerate(lengths):
            rejected = lengths[index - 1]
            prompt = min(chosen, rejected) // 2
            first, second = texts[2 * index], texts[2 * index + 1]
            sides = {"chosen": first[prompt:chosen], "rejected": second[prompt:rejected]}
            pairs.append({"prompt": first[:prompt], **sides})
        return pairs

    def tokenizer(self, *, ends: bool | None = None) -> PreTrainedTokenizerFast:
        """Create a tokenizer of characters.

        Its EOS is outside the model's vocabulary, so that no response ends early; it is inside with ``ends``, the
        default for cases on samples, and for systems that refuse such a tokenizer and have a least length instead.
        """
        vocabulary = {chr(FIRST + i): i for i in range(self.fields["vocab_size"] - 2)}
        ends = self.case in OFFLINE if ends is None else ends
        vocabulary |= {"<pad>": len(vocabulary), "<eos>": len(vocabulary) + 1 if ends else 2**20}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=None))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        tokenizer.decoder = decoders.Fuse()
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def text(ids: list[int]) -> str:
    """Return token ids as text with one character per token."""
    return "".join(chr(FIRST + i) for i in ids)


def reward(completions: list[Any] | None = None, outputs: list[str] | None = None, **_: Any) -> list[float]:
    """Return 0 and 1 in turn: trivial to compute, and with variance within a prompt."""
    return [float(i % 2) for i in range(len(completions or outputs or []))]


class Turns:
    """A worker's turns: it waits for the request of a step, and reports seconds by phase and peak memory.

    Of the second turn, which is not measured, it also reports how often the host waited for a CUDA device.
    """

    def __init__(self, clock: str) -> None:
        self.clock: Callable[[], float] = getattr(time, clock)
        self.answers = os.fdopen(os.dup(1), "w")  # libraries may print to standard output
        os.dup2(2, 1)
        self.phases: Counter[str] = Counter()
        self.nested: list[float] = []
        self.started = 0.0
        self.turn = 0
        self.watched: Any = None

    def say(self, **facts: Any) -> None:
        """Write one line to the benchmark."""
        print(json.dumps({"peak": peak_memory(), **facts}), file=self.answers, flush=True)

    def ready(self) -> None:
        """Report that the model is created, and wait for the first turn."""
        self.say()
        self._wait()

    def end(self) -> None:
        """Report the step, and wait for the next turn."""
        seconds = self._now() - self.started
        phases = {**self.phases, "rest": seconds - sum(self.phases.values())}
        self.say(seconds=seconds, phases=phases, **self._waits())
        self._wait()

    def _waits(self) -> dict[str, int]:
        """Return how often the host waited in a turn in which that was watched, and stop watching."""
        if self.watched is None:
            return {}
        torch.cuda.set_sync_debug_mode("default")
        catching, caught = self.watched
        self.watched = catching.__exit__(None, None, None)
        return {"waits": sum("synchronizing CUDA operation" in str(each.message) for each in caught)}

    def _wait(self) -> None:
        if not sys.stdin.readline():
            sys.exit()
        self.turn += 1
        if self.turn == 2 and torch.cuda.is_available():
            catching = warnings.catch_warnings(record=True)
            self.watched = catching, catching.__enter__()
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
        self.phases.clear()
        self.started = self._now()

    def _now(self) -> float:
        """Return the time when all that was asked of the device is done."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return self.clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time within the context as phase ``name``, except the time of phases inside it."""
        started = self._now()
        self.nested.append(0.0)
        yield
        seconds = self._now() - started
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


def peak_memory() -> float:
    """Return the largest memory so far in MB: of a CUDA device what torch has given out, else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


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

        use_fast_exact_matmul(torch.device(work.device))
    run(work, turns)
