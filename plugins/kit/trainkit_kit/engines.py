"""What the checks of generation engines work with: a running engine, and what its answers should be."""

from __future__ import annotations

import os
import random
import signal
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.config import SamplingConfig
from trainkit.rollouts import EngineSampler, Generated, Request, Weights
from trainkit.rollouts.engines import start
from trainkit.testing import tiny_llama
from trainkit.testing.trainers import PROMPTS, tiny_trainer
from trainkit_kit.failures import require
from trainkit_kit.launching import slowness
from trainkit_kit.reinforce import registered

MODEL = tiny_llama(10, hidden_size=64, intermediate_size=128)
"""The model that engines are checked with, unless another is given: heads of 32, the smallest that all engines run."""
SPREAD = 0.15
"""The deviation of the noise that is added to the weights: the likeliest token then has a probability of about 0.4."""
PATIENCE = 300.0
"""Seconds within which an engine should answer, also if a process of it has died, on an idle machine."""


class Serving:
    """A running engine with the tiny model that it serves.

    Args:
        entry: what a run has in `rollout.engine`.
        model: fields of the model's config, instead of `MODEL`.
    """

    def __init__(self, entry: Any, model: Mapping[str, Any] | None = None) -> None:
        name, fields = registered(), model or MODEL
        self.trainer: Any = tiny_trainer(name, Path("unused"), model=fields, rollout__engine=entry)
        self.trainer.models.build()
        self.model: Any = self.trainer.unwrapped.model.eval()
        self.push_away()
        served = self.trainer.sampling.served
        self.served = replace(served, options={**served.options, "hidden": True})
        before = state_of_process()
        self.engine = start(self.trainer.config.rollout.engine, self.served)
        self.close = weakref.finalize(self, self.engine.close)
        self.sampler = EngineSampler(self.engine, vocabulary=fields["vocab_size"], device=torch.device("cpu"))
        self.core = self.served.sampler()
        self.version = 0
        self.load()
        self.disturbed = changed_since(before)
        """What the engine changed in this process while it started and loaded weights."""

    @torch.no_grad()
    def push_away(self) -> None:
        """Perturb the weights of the trained model."""
        draws = torch.Generator().manual_seed(getattr(self, "version", 0))
        for parameter in self.model.parameters():
            parameter.add_(SPREAD * torch.randn(parameter.shape, generator=draws).to(parameter))

    def load(self, version: int | None = None) -> None:
        """Give the engine the weights as they are now."""
        self.version = self.version + 1 if version is None else version
        self.sampler.use(self.weights)

    @property
    def weights(self) -> Weights:
        """The weights as they are now, at the version of the last `load`."""
        now: Weights = self.trainer.sampling.weights
        return replace(now, version=self.version)

    def request(self, prompts: Sequence[str], seeds: Sequence[int] | None = None, **settings: Any) -> Request:
        """Return a request of responses to the prompts."""
        queries = [self.trainer.text.encode(prompt) for prompt in prompts]
        return Request(queries, seeds_of(len(prompts)) if seeds is None else seeds, self.settings(**settings), "train")

    def settings(self, **settings: Any) -> SamplingConfig:
        """Return sampling settings; responses have up to 6 tokens unless another number is given."""
        found: SamplingConfig = self.trainer.settings(**settings)
        return found

    def ask(self, prompts: Sequence[str], seeds: Sequence[int] | None = None, **settings: Any) -> Generated:
        """Return the engine's answer; the check fails if it is not what was asked for."""
        request = self.request(prompts, seeds, **settings)
        return self.answer(request, self.engine.submit(request))

    def answer(self, request: Request, future: Future[Generated]) -> Generated:
        """Wait for the answer to ``request``; the check fails if it is not what was asked for."""
        made = future.result(timeout=PATIENCE * slowness())
        fault = self.sampler.fault(request, made)
        require(not fault, f"the engine {fault}")
        return made

    @torch.no_grad()
    def logits(self, query: list[int], ids: list[int]) -> tuple[Tensor, Tensor]:
        """Return the model's logits [N, V] and last hidden states [N, D] of the tokens ``ids``, in one forward pass."""
        whole = torch.tensor([query + ids], device=self.model.device)
        out = self.model(input_ids=whole, output_hidden_states=True)
        at = slice(len(query) - 1, -1)
        return out.logits[0, at].float(), out.hidden_states[-1][0, at]


def seeds_of(count: int, start: int = 0) -> list[int]:
    """Return different seeds below 2⁶³."""
    return [(7919 * (start + at + 1) * 2**40) % 2**63 + at for at in range(count)]


def prompts(count: int) -> list[str]:
    """Return so many prompts of different lengths."""
    return [PROMPTS[at % len(PROMPTS)] for at in range(count)]


def state_of_process() -> dict[str, Any]:
    """Return what an engine must leave as it is in the training process."""
    return {
        "the number of torch's threads": torch.get_num_threads(),
        "torch's precision of float32 products": torch.get_float32_matmul_precision(),
        "the default dtype of torch": torch.get_default_dtype(),
        "torch.distributed": torch.distributed.is_available() and torch.distributed.is_initialized(),
        "the global generator of torch": torch.get_rng_state().tolist(),
        "the global generator of Python": random.getstate(),
        "the handler of SIGTERM": signal.getsignal(signal.SIGTERM),
        "the working directory": str(Path.cwd()),
        "environment variables": dict(os.environ),
    }


def changed_since(before: Mapping[str, Any]) -> list[str]:
    """Return the names of what differs from `state_of_process` earlier."""
    now = state_of_process()
    return [name for name, value in before.items() if now[name] != value]
