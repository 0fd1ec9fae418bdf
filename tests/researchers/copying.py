"""The engine ``_test_copy``: trainkit's sampler on a copy of the trained model, in the process of the trainer."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from trainkit import register_engine
from trainkit.rollouts import Generated, Replica, Request, ServedModel, Weights
from trainkit_kit.copying import CopyingEngine


@register_engine("_test_copy")
class Copying(CopyingEngine):
    """Generates with a copy, which new weights are loaded into; notes the threads that it is called from."""

    def __init__(self, config: None, served: ServedModel) -> None:
        super().__init__(config, served)
        self.threads = set[str]()

    def submit(self, request: Request) -> Future[Generated]:
        """Generate now."""
        self.threads.add(threading.current_thread().name)
        return super().submit(request)


@register_engine("_test_pair")
class Pair(Copying):
    """Generates with two copies, each in a thread of its own; notes how many requests are under way."""

    def __init__(self, config: None, served: ServedModel) -> None:
        super().__init__(config, served)
        self.replicas = [self.replica, Replica(replace(served, model=copy.deepcopy(served.model)))]
        self.pools = [ThreadPoolExecutor(1) for _ in self.replicas]
        self.sent, self.under_way = 0, list[int]()
        self.answered = 0

    def load(self, weights: Weights) -> None:
        """Copy the weights."""
        for replica in self.replicas:
            replica.load(weights)

    def submit(self, request: Request) -> Future[Generated]:
        """Generate in the two threads in turn."""
        at = self.sent % 2
        self.sent += 1
        self.under_way.append(self.sent - self.answered)
        return self.pools[at].submit(self.answer, at, request)

    def answer(self, at: int, request: Request) -> Generated:
        """Return the responses."""
        made = self.replicas[at].generate(request)
        self.answered += 1
        return made
