"""Calling the reward function of images: directly or in threads, waiting for futures and coroutines in order."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from trainkit.rollouts import RewardFn, call, check_numbers, explained, name_of
from trainkit_ddpo.images import ImageRollouts

CONTRACT = (
    "return one finite number per image (list, tuple, NumPy array or tensor [B]), a future or coroutine of them, or a "
    "list of futures"
)


class RewardCaller:
    """A caller of ``reward_fn(images=, prompts=, **columns)`` on batches of images.

    Args:
        reward_fn: returns numbers, `concurrent.futures.Future` objects, or a coroutine, which runs in an event loop
            in a separate thread.
        workers: number of threads that call it. 0: it is called in the main thread.
    """

    def __init__(self, reward_fn: RewardFn, workers: int = 0) -> None:
        self.reward_fn, self.workers = reward_fn, workers

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.workers, thread_name_prefix="reward")

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        Thread(target=loop.run_forever, name="reward-loop", daemon=True).start()
        return loop

    def submit(self, rollouts: ImageRollouts) -> Callable[[], Tensor]:
        """Start scoring, and return a function that waits for the scores [B], float32 on the CPU.

        Raises:
            RewardError: the reward function raised, or returned something else; here or in the returned function.
        """
        promised = self._pool.submit(self._in_thread, rollouts) if self.workers else self._begin(rollouts)
        return partial(self._settle, promised, rollouts)

    def _in_thread(self, rollouts: ImageRollouts) -> Any:
        with torch.no_grad():
            return self._wait(self._begin(rollouts))

    def _begin(self, rollouts: ImageRollouts) -> Any:
        result = call(self.reward_fn, rollouts)
        return asyncio.run_coroutine_threadsafe(_awaited(result), self._loop) if inspect.isawaitable(result) else result

    def _settle(self, promised: Any, rollouts: ImageRollouts) -> Tensor:
        with explained(self.reward_fn, rollouts):
            found = self._wait(promised)
        return check_numbers(found, len(rollouts), name_of(self.reward_fn), CONTRACT)

    def _wait(self, promised: Any) -> Any:
        while isinstance(promised, Future):
            promised = promised.result()
        if isinstance(promised, list | tuple) and any(isinstance(each, Future) for each in promised):
            return [self._wait(each) for each in promised]
        return promised


async def _awaited(promised: Any) -> Any:
    return await promised
