"""Calling the reward function of images: directly or in threads, waiting for futures and coroutines in order."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cached_property, partial
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from trainkit import RewardFunctionConfig
from trainkit.rollouts import (
    UNLIMITED,
    Daemons,
    Result,
    RewardFn,
    at_step,
    call,
    check_numbers,
    explained,
    in_worker,
    name_of,
    repeated,
    settled,
)
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
        workers: number of threads that call it at the same time. 0: one call after the other.
        config: the time limit of a call, and of the wait for what it promises; and after which exceptions it is
            repeated. By default there is no limit, and nothing is repeated.
    """

    def __init__(self, reward_fn: RewardFn, workers: int = 0, config: RewardFunctionConfig = UNLIMITED) -> None:
        self.reward_fn, self.workers, self.config = reward_fn, workers, config
        self.seconds: list[float] = []
        """The time that each call took, and the wait for what it promised; where calls overlap, the wait alone."""

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self.workers, thread_name_prefix="reward")

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.new_event_loop()
        loop.set_default_executor(Daemons())
        Thread(target=loop.run_forever, name="reward-loop", daemon=True).start()
        return loop

    def submit(self, rollouts: ImageRollouts, step: int | None = None) -> Callable[[], Tensor]:
        """Start scoring, and return a function that waits for the scores [B], float32 on the CPU.

        Raises:
            RewardError: the reward function raised, took too long, or returned something else; here or in the returned
                function. It names ``step``.
        """
        started = time.perf_counter()
        with at_step(step):
            promised = self._pool.submit(self._in_thread, rollouts) if self.workers else self._begun(rollouts)
        return partial(self._settle, promised, rollouts, step, time.perf_counter() - started)

    def _repeated(self, attempt: Callable[[], Any]) -> Any:
        return repeated(attempt, name_of(self.reward_fn), self.config, alone=not self.workers)

    def _in_thread(self, rollouts: ImageRollouts) -> Any:
        with torch.no_grad():
            return self._repeated(lambda: self._wait(self._call(rollouts), rollouts))

    def _begun(self, rollouts: ImageRollouts) -> Any:
        return self._repeated(lambda: self._call(rollouts))

    def _call(self, rollouts: ImageRollouts) -> Any:
        """Return what the function returns, which may be promises; a coroutine is begun."""
        fn, timeout = self.reward_fn, self.config.timeout
        if timeout is None:
            result = call(fn, rollouts)
        else:
            made = in_worker(partial(call, fn, rollouts), timeout, await_it=False)
            result = settled(made, fn, rollouts, timeout)
        return asyncio.run_coroutine_threadsafe(_awaited(result), self._loop) if inspect.isawaitable(result) else result

    def _settle(self, promised: Any, rollouts: ImageRollouts, step: int | None, seconds: float) -> Tensor:
        started, first = time.perf_counter(), [promised]
        with at_step(step):
            if self.workers:
                found = promised.result()  # its call is limited
            else:
                found = self._repeated(lambda: self._wait(first.pop() if first else self._call(rollouts), rollouts))
            self.seconds.append(seconds + time.perf_counter() - started)
            return check_numbers(found, len(rollouts), name_of(self.reward_fn), CONTRACT)

    def _wait(self, promised: Any, rollouts: ImageRollouts) -> Any:
        limit = self.config.timeout
        with explained(self.reward_fn, rollouts):
            return self._kept(promised, rollouts, None if limit is None else time.monotonic() + limit)

    def _kept(self, promised: Any, rollouts: ImageRollouts, until: float | None) -> Any:
        """Return what is promised, waiting for it up to the time ``until``."""
        while isinstance(promised, Future):
            if not wait([promised], None if until is None else max(until - time.monotonic(), 0)).done:
                promised.cancel()
                settled(Result(given_up=True), self.reward_fn, rollouts, self.config.timeout)
            promised = promised.result()
        if isinstance(promised, list | tuple) and any(isinstance(each, Future) for each in promised):
            return [self._kept(each, rollouts, until) for each in promised]
        return promised


async def _awaited(promised: Any) -> Any:
    return await promised
