"""Reward functions and environments in actors of Ray, on this machine or on a cluster, beside the training."""

from __future__ import annotations

import asyncio
import functools
import inspect
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.machinery import PathFinder
from itertools import count
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from trainkit.errors import ConfigError, EngineError
from trainkit.models import use_fast_exact_matmul
from trainkit.rollouts import Environment, EnvironmentMaker, RewardFn, Turn, check_maker, forked, name_of
from trainkit_ray.cluster import check_address, check_installed, enter, leave


def remote_reward(
    reward_fn: RewardFn,
    *,
    workers: int = 1,
    address: str | None = None,
    cpus: float = 1.0,
    gpus: float = 0.0,
    max_restarts: int = 3,
) -> RewardFn:
    """Return a reward function that calls ``reward_fn`` in workers, for ``trainkit.train(reward_fn=...)``.

    A call is divided into equal parts, one for each worker, which run at the same time; so with several workers
    ``reward_fn`` has to score each response by itself. A worker that dies is replaced, and its part scored again.

    Args:
        reward_fn: a function; or a class whose objects are called, which is made once in each worker, for example to
            load a model there.
        workers: processes.
        address: the cluster, as `RayConfig.address`; None: this machine, which needs no ``cpus``.
        cpus: CPUs that Ray reserves for each worker.
        gpus: GPUs that Ray reserves for each worker.
        max_restarts: how often each worker is replaced when it died.

    Raises:
        ConfigError: ``reward_fn`` cannot be called, or Ray is not installed.
    """
    if not callable(reward_fn):
        raise ConfigError(f"remote_reward needs a function, or a class whose objects are called; given {reward_fn!r}")
    if inspect.isclass(reward_fn) and not any("__call__" in vars(base) for base in reward_fn.__mro__):
        raise ConfigError(f"the class {reward_fn.__qualname__} has no method __call__, so its objects score nothing")
    return _Rewards(reward_fn, _Pool(reward_fn, Scorer, workers, address, cpus, gpus, max_restarts))


def remote_environment(
    environment: EnvironmentMaker,
    *,
    workers: int = 1,
    address: str | None = None,
    cpus: float = 1.0,
    gpus: float = 0.0,
    max_restarts: int = 3,
) -> EnvironmentMaker:
    """Return an environment whose episodes run in workers, for ``trainkit.train(environment=...)``.

    Each episode belongs to one worker, in turns. If a worker dies, its episodes are played again in another process,
    with the outputs that they got; the same observations follow if they follow from the row and the outputs.
    `environment.workers` limits how many calls run at the same time, over all workers.

    Args:
        environment: as for `trainkit.train`.
        workers: processes.
        address: as for `remote_reward`.
        cpus: as for `remote_reward`.
        gpus: as for `remote_reward`.
        max_restarts: as for `remote_reward`.

    Raises:
        ConfigError: ``environment`` makes no environments, or Ray is not installed.
    """
    check_maker(environment)
    return _Environments(environment, _Pool(environment, Host, workers, address, cpus, gpus, max_restarts))


@dataclass
class _Pool:
    """Workers, which are started by the first call."""

    function: Callable[..., Any]
    kind: type[Any]
    workers: int
    address: str | None
    cpus: float
    gpus: float
    max_restarts: int
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _actors: list[Any] = field(default_factory=list)
    _packed: Any = None
    """Reference to the pickled function in Ray's store, which a worker that is replaced reads again."""

    def __post_init__(self) -> None:
        check_installed(f"workers of {name_of(self.function)}")
        if self.workers < 1:
            raise ConfigError(f"workers should be 1 or more; given {self.workers}")
        try:
            check_address(self.address)
        except ValueError as error:
            raise ConfigError(f"address {error}; given {self.address!r}") from error

    @property
    def actors(self) -> list[Any]:
        """The actors, which are started if they are not running."""
        with self._lock:
            if not self._actors:
                self._start()
            return self._actors

    def _start(self) -> None:
        import ray

        try:
            enter(self.address)
        except Exception as error:
            raise EngineError(f"Ray, for {name_of(self.function)}, cannot be reached or started: {error}") from error
        self._packed = ray.put(_pickled(self.function))
        made = ray.remote(self.kind).options(
            num_cpus=self.cpus if self.address else 0,  # the machine is the run's own
            num_gpus=self.gpus,
            max_concurrency=self.kind.concurrency,
            max_restarts=self.max_restarts,
            max_task_retries=-1,
        )
        threads = torch.get_num_threads()
        self._actors = [made.remote(self._packed, sys.path, threads) for _ in range(self.workers)]
        weakref.finalize(self, leave, self._actors)

    def result(self, reference: Any) -> Any:
        """Return the result of a call.

        Raises:
            EngineError: its worker has died too often.
            Exception: what the called function raised.
        """
        import ray
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return ray.get(reference)
        except RayTaskError as error:
            raise error.cause from error
        except RayActorError as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            raise EngineError(
                f"a worker of {name_of(self.function)} died and cannot be replaced (max_restarts is "
                f"{self.max_restarts}): {lines[0]}"
            ) from error


def _pickled(function: Callable[..., Any]) -> bytes:
    """Return ``function`` pickled: with its source if its module is a file that a worker cannot import by name."""
    from ray import cloudpickle

    plain = function.func if isinstance(function, functools.partial) else function
    module = inspect.getmodule(plain)
    own = module is not None and PathFinder.find_spec(module.__name__.partition(".")[0]) is None
    if module is None or not own or module.__name__ == "__main__":  # that is pickled with its source anyway
        data: bytes = cloudpickle.dumps(function)
        return data
    cloudpickle.register_pickle_by_value(module)
    try:
        data = cloudpickle.dumps(function)
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    return data


# ------------------------------------------------------------------------------------------------------- rewards


class _Rewards:
    """A reward function that is called in workers."""

    def __init__(self, reward_fn: RewardFn, pool: _Pool) -> None:
        self.pool = pool
        self.tokenizer: tuple[Any, Any] = (None, None)
        """The tokenizer of the last call, and the reference to it in Ray's store."""
        functools.update_wrapper(self, reward_fn, updated=())

    def __call__(self, **arguments: Any) -> Any:
        import ray

        rows, actors = len(arguments["prompts"]), self.pool.actors
        if (tokenizer := arguments.pop("tokenizer", None)) is not self.tokenizer[0]:
            self.tokenizer = (tokenizer, ray.put(tokenizer))
        cuts = [rows * index // len(actors) for index in range(len(actors) + 1)]
        parts = [(actor, start, end) for actor, start, end in zip(actors, cuts, cuts[1:], strict=False) if start < end]
        asked = [
            actor.score.remote(_rows(arguments, rows, start, end), self.tokenizer[1]) for actor, start, end in parts
        ]
        found = [self.pool.result(reference) for reference in asked]
        if len(parts) == 1:
            return found[0]
        for scores, (_, start, end) in zip(found, parts, strict=True):
            if not hasattr(scores, "__len__") or len(scores) != end - start:
                return scores  # which the caller refuses, because it is not a score for each response
        return [value for scores in found for value in scores]


def _rows(arguments: Mapping[str, Any], count: int, start: int, end: int) -> dict[str, Any]:
    """Return the arguments of a reward function for the responses from ``start`` to ``end``."""

    def cut(value: Any) -> Any:
        is_column = isinstance(value, list | tuple | Tensor | np.ndarray) and len(value) == count
        return value[start:end] if is_column else value

    return {name: cut(value) for name, value in arguments.items()}


class Worker:
    """What runs in a worker.

    Args:
        function: the pickled function.
        paths: where the training process looks for modules.
        threads: threads of torch.
    """

    concurrency = 1

    def __init__(self, function: bytes, paths: list[str], threads: int) -> None:
        torch.set_num_threads(threads)
        use_fast_exact_matmul(torch.device("cpu"))  # a model gives the bits that it gives in the training process
        sys.path.extend(path for path in paths if path not in sys.path)
        self._function = function

    @cached_property
    def function(self) -> Any:
        """The function."""
        from ray import cloudpickle

        return cloudpickle.loads(self._function)


class Scorer(Worker):
    """What runs in a worker of a reward function."""

    @cached_property
    def score_fn(self) -> RewardFn:
        """The function, or an object of the class."""
        made: Any = self.function() if inspect.isclass(self.function) else self.function
        return cast("RewardFn", made)

    def score(self, arguments: dict[str, Any], tokenizer: Any) -> Any:
        """Return the scores of some responses."""
        return self.score_fn(**arguments, **({} if tokenizer is None else {"tokenizer": tokenizer}))


# -------------------------------------------------------------------------------------------------- environments


class _Environments:
    """Makes environments that run in workers."""

    def __init__(self, environment: EnvironmentMaker, pool: _Pool) -> None:
        self.pool, self.episodes = pool, count()
        self.over: dict[int, list[str]] = {index: [] for index in range(pool.workers)}
        """Episodes that nobody plays any more, by worker; a worker forgets them with its next call."""
        functools.update_wrapper(self, environment, updated=())

    def __call__(self, row: dict[str, Any]) -> RemoteEpisode:
        worker = next(self.episodes) % self.pool.workers
        return RemoteEpisode(self.pool, worker, row, self.over[worker])


class RemoteEpisode:
    """An environment whose methods run in a worker."""

    def __init__(self, pool: _Pool, worker: int, row: dict[str, Any], over: list[str]) -> None:
        self.pool, self.worker, self.row, self.over = pool, worker, row, over
        self.key, self.outputs = secrets.token_hex(8), list[str]()
        weakref.finalize(self, over.append, self.key)

    def reset(self) -> Any:
        """Return the prompt of the episode; None: the row's own."""
        return self._call("reset")

    def step(self, output: str) -> Turn:
        """Return the answer to the model's output."""
        self.outputs.append(output)
        turn: Turn = self._call("step", self.outputs)
        return turn

    def fork(self) -> RemoteEpisode:
        """Return a copy of the episode, with a copy of its environment in the worker."""
        made = RemoteEpisode(self.pool, self.worker, self.row, self.over)
        made.outputs = [*self.outputs]
        self._call("fork", self.outputs, made.key)
        return made

    def _call(self, method: str, *arguments: Any) -> Any:
        over = [self.over.pop() for _ in range(len(self.over))]
        actor = self.pool.actors[self.worker]
        return self.pool.result(getattr(actor, method).remote(over, self.key, self.row, *arguments))


class Host(Worker):
    """What runs in a worker of environments: the episodes that belong to it."""

    concurrency = 32

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.episodes: dict[str, tuple[Environment, int]] = {}
        """Environments, and how many outputs each has got."""
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def reset(self, over: list[str], key: str, row: dict[str, Any]) -> Any:
        """Begin an episode, and return its prompt. Those in ``over`` are forgotten."""
        for each in over:
            self.episodes.pop(each, None)
        made = self.function(dict(row))
        prompt = self._value(getattr(made, "reset", lambda: None)())
        self.episodes[key] = (made, 0)
        return prompt

    def step(self, over: list[str], key: str, row: dict[str, Any], outputs: list[str]) -> Any:
        """Return the answer to the last of ``outputs``; give the others first, if the episode is not known here."""
        made = self._after(over, key, row, outputs[:-1])
        self.episodes[key] = (made, len(outputs))
        turn = self._value(made.step(outputs[-1]))
        if getattr(turn, "done", False):
            del self.episodes[key]
        return turn

    def fork(self, over: list[str], key: str, row: dict[str, Any], outputs: list[str], copied: str) -> None:
        """Copy the environment of an episode that has got ``outputs``; the copy is that of the episode ``copied``."""
        self.episodes[copied] = (self._value(forked(self._after(over, key, row, outputs))), len(outputs))

    def _after(self, over: list[str], key: str, row: dict[str, Any], outputs: list[str]) -> Environment:
        """Return the environment of an episode that has got ``outputs``; give them first, if it is not known here."""
        if self.episodes.get(key, (None, -1))[1] != len(outputs):
            self.reset(over, key, row)
            for earlier in outputs:
                self._value(self.episodes[key][0].step(earlier))
        return self.episodes[key][0]

    def _value(self, found: Any) -> Any:
        """Return what a method has returned, or what its coroutine returns."""
        if not isinstance(found, Coroutine):
            return found
        return asyncio.run_coroutine_threadsafe(found, self.loop).result()
