"""What all tests share: one thread, reproducible property tests, and processes played by threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "trainkit", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("trainkit")
torch.set_num_threads(1)

Reduce = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(scope="session")
def in_lockstep() -> Callable[[Callable[[Any, Reduce], Any], Sequence[Any]], list[Any]]:
    """``run(fn, shards)``: ``fn(shard, reduce)`` for every shard at once, ``reduce`` summing over the shards."""

    def run(fn: Callable[[Any, Reduce], Any], shards: Sequence[Any]) -> list[Any]:
        barrier, slots = Barrier(len(shards), timeout=30), [torch.zeros(())] * len(shards)

        def reduce_as(rank: int) -> Reduce:
            def reduce(x: torch.Tensor) -> torch.Tensor:
                slots[rank] = x
                barrier.wait()  # everyone has given
                total = torch.stack(slots).sum(0)
                barrier.wait()  # everyone has taken
                return total

            return reduce

        with ThreadPoolExecutor(len(shards)) as pool:
            return list(pool.map(lambda rank: fn(shards[rank], reduce_as(rank)), range(len(shards))))

    return run
