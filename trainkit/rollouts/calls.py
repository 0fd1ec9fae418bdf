"""Calls in daemon threads: a function or a coroutine that never ends keeps no run and no process from ending."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from trainkit.models.backend import as_here

NAME = "trainkit-reward"
"""The name of the threads of workers."""


@dataclass
class Result:
    """The result of a call: a value, or the exception that it raised."""

    value: Any = None
    error: BaseException | None = None
    given_up: bool = False
    """Whether the call had not ended when its time was up."""


class Daemons(ThreadPoolExecutor):
    """An executor for event loops that makes each call in a daemon thread of its own.

    Python waits at its exit for the threads of other executors, also for one in which `asyncio.to_thread` hangs.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Begin a call, and return its future result."""
        future: Future[Any] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # whatever user code raises is told to the thread that waits
                future.set_exception(error)

        threading.Thread(target=work, daemon=True, name="trainkit-executor").start()
        return future


class Worker:
    """A daemon thread with an event loop, which makes one call at a time. It lives on between calls.

    So a function finds again what it keeps for its thread or for its event loop, such as a pool of connections.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], Any], Result, threading.Event] | None] = SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(Daemons())
        threading.Thread(target=self._work, daemon=True, name=NAME).start()

    def make(self, call: Callable[[], Any], timeout: float | None, *, await_it: bool = True) -> Result:
        """Make a call as it would be made in this thread, and await a coroutine that it returns, unless not wanted."""
        result, done = Result(), threading.Event()

        def whole() -> Any:
            value = call()
            if await_it and inspect.isawaitable(value):
                return self._loop.run_until_complete(_awaited(value))
            return value

        self._jobs.put((as_here(whole), result, done))
        return result if done.wait(timeout) else Result(given_up=True)

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)  # for functions that ask for the loop of their thread
        while (job := self._jobs.get()) is not None:
            call, result, done = job
            try:
                result.value = call()
            except BaseException as error:  # SystemExit and KeyboardInterrupt are raised in the thread that waits
                result.error = error
            done.set()
            del job, call, result, done
        self._loop.close()

    def leave(self) -> None:
        """End the thread after the call at hand, if that ever ends, and cancel it if it is a coroutine."""
        self._loop.call_soon_threadsafe(self._cancel)
        self._jobs.put(None)

    def _cancel(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()


_idle: list[Worker] = []
os.register_at_fork(after_in_child=_idle.clear)  # threads are not copied


def in_worker(call: Callable[[], Any], timeout: float | None, *, await_it: bool = True) -> Result:
    """Make a call in a daemon thread, and return its result; see `Worker.make`. After ``timeout`` s, give it up."""
    try:
        worker = _idle.pop()
    except IndexError:
        worker = Worker()
    try:
        result = worker.make(call, timeout, await_it=await_it)
    except BaseException:  # an interrupt of this thread
        worker.leave()
        raise
    if result.given_up:
        worker.leave()
    else:
        _idle.append(worker)
    return result


async def _awaited(promised: Awaitable[Any]) -> Any:
    return await promised
