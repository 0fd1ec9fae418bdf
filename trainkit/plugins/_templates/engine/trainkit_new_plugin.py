"""new_plugin: an engine that generates with a copy of the model, in threads of its own."""

from __future__ import annotations

import copy
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from pydantic import Field

from trainkit import PluginConfig, register_engine
from trainkit.rollouts import Engine, Generated, Replica, Request, ServedModel, Weights


class NewPluginConfig(PluginConfig):
    """The settings of new_plugin."""

    threads: int = Field(1, ge=1)
    """Requests that are answered at the same time."""


@register_engine("new_plugin", NewPluginConfig)
class NewPlugin(Engine):
    """The engine. Each process of a run makes one when it first samples.

    An engine of a server would start it here, send `load` the tensors of ``weights.tensors()``, and `submit` the token
    ids of the prompts. What it returns are token ids with their log-probabilities at the sampling temperature.
    """

    exact = True  # its sampler is that of the engine local

    def __init__(self, config: NewPluginConfig, served: ServedModel) -> None:
        super().__init__(config, served)
        self.replica = Replica(replace(served, model=copy.deepcopy(served.model)))
        self.pool = ThreadPoolExecutor(config.threads)

    def load(self, weights: Weights) -> None:
        """Copy the weights; no request is under way now."""
        self.replica.load(weights)

    def submit(self, request: Request) -> Future[Generated]:
        """Begin to generate."""
        return self.pool.submit(self.replica.generate, request)

    def close(self) -> None:
        """End the threads."""
        self.pool.shutdown()
