"""A generation engine that samples with a copy of the model in the process of the trainer, for checks."""

from __future__ import annotations

import copy
from concurrent.futures import Future
from dataclasses import replace

from trainkit.plugins import register_engine
from trainkit.rollouts import Engine, Generated, Replica, Request, ServedModel, Weights
from trainkit.rollouts.engines import Ability

NAME = "_copy"
"""The name of the engine in configurations, once it is `registered`."""


class CopyingEngine(Engine):
    """Generates with a copy of the model, into which new weights are loaded; its answers are those of ``local``."""

    exact = True
    abilities = frozenset[Ability](("encoder_decoder", "images", "logit_mask", "steer"))

    def __init__(self, config: None, served: ServedModel) -> None:
        super().__init__(config, served)
        self.replica = Replica(replace(served, model=copy.deepcopy(served.model)))

    def load(self, weights: Weights) -> None:
        """Copy the weights."""
        self.replica.load(weights)

    def submit(self, request: Request) -> Future[Generated]:
        """Generate now."""
        done: Future[Generated] = Future()
        done.set_result(self.replica.generate(request))
        return done


def registered() -> str:
    """Register the engine, and return its name."""
    register_engine(NAME)(CopyingEngine)
    return NAME
