"""Environments: tasks of several turns, and the concurrent calls of their methods."""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, Self, TypeVar

from trainkit.config import EnvironmentConfig
from trainkit.data import Row, finite, is_conversation
from trainkit.data.batches import columns_of
from trainkit.data.formats import plain
from trainkit.errors import ConfigError, EpisodeError, describe
from trainkit.rollouts.calls import Daemons, Result
from trainkit.seeding import PLACE

T = TypeVar("T")

Prompt = str | Sequence[Mapping[str, Any]]
"""Text, or a list of messages."""


@dataclass(frozen=True)
class Turn:
    """The environment's answer to an output of the model."""

    observation: Prompt = ""
    """What the model reads next: text, or messages if the prompt is messages. Ignored if ``done``."""
    reward: float = 0.0
    """The reward of the output."""
    done: bool = False
    """Whether the episode has ended."""


class Environment(Protocol):
    """A task that the model works on in turns: the prompt, an output, an observation, an output, and so on.

    An environment is made for every episode, by calling ``environment(row)``: a class whose constructor takes a row of
    the prompts, or a function. Besides its columns the row has ``episode_seed``, an integer below 2⁶³, from which all
    randomness of the episode should follow; the episodes of a group, which are compared, have the same. The methods
    may be coroutines (``async def``). The methods of several episodes run at the same time in threads, so environments
    must not share state without a lock.
    """

    def reset(self) -> Prompt | None:
        """Return the prompt of the episode; None, or leaving out the method, means the row's own."""
        return None

    def step(self, output: str) -> Turn:
        """Return the answer to the model's output, without special tokens and stop strings."""
        ...

    def fork(self) -> Self:
        """Return a copy with the same state, for algorithms that go on from it in several ways (``forks``).

        Leaving out the method means `copy.deepcopy`. An environment that cannot be copied may raise an exception.
        """
        return copy.deepcopy(self)


EnvironmentMaker = Callable[[Row], Environment]
"""Makes the environment of one episode from a row."""


def check_maker(maker: Any) -> EnvironmentMaker:
    """Return ``environment`` if it can make environments.

    Raises:
        ConfigError: it cannot be called, or is a class without a method `step`.
    """
    if not callable(maker) or (hasattr(maker, "step") and not inspect.isclass(maker)):
        raise ConfigError(
            f"environment should be a class or function that is called with a row; given {describe(maker)}. Give the "
            "class itself, not an instance of it"
        )
    if inspect.isclass(maker) and not callable(getattr(maker, "step", None)):
        raise ConfigError(
            f"the environment {maker.__qualname__} has no method step; write step(output) -> Turn(observation, reward, "
            "done)"
        )
    name = getattr(maker, "__qualname__", type(maker).__qualname__)
    define = "def __init__(self, row)" if inspect.isclass(maker) else f"def {name}(row)"
    if why := _misfit(maker, "row"):
        raise ConfigError(f"the environment is made by {name}(row), which cannot be called so: {why}; write {define}")
    if inspect.isclass(maker) and (why := _wrong_method(maker)):
        raise ConfigError(f"the environment {name}: {why}")
    checked: EnvironmentMaker = maker
    return checked


METHODS = {"reset": (), "step": ("output",), "fork": ()}
"""The methods of an environment and their arguments."""


def _wrong_method(environment: Any) -> str:
    """Return which method of an environment, or of a class of environments, takes other arguments; empty if none."""
    for name, arguments in METHODS.items():
        plain_function = inspect.isfunction(inspect.getattr_static(environment, name, None))
        positional = ("self", *arguments) if inspect.isclass(environment) and plain_function else arguments
        if why := _misfit(getattr(environment, name, None), *positional):
            called = f"{name}({', '.join(arguments)})"
            return f"{called} cannot be called so: {why}; write def {name}({', '.join(('self', *arguments))})"
    return ""


def _misfit(function: Any, *arguments: str) -> str:
    """Return why ``function`` cannot be called with so many arguments; empty if it can, or if that is not known."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # no function, or one without a signature, such as those written in C
        return ""
    try:
        signature.bind(*arguments)
    except TypeError as error:
        return str(error)
    return ""


@dataclass
class Episode:
    """An episode while it is played."""

    row: Row
    name: str
    """The environment's class, for error messages."""
    environment: Any = None
    turn: int = 0
    """The number of the turn, from 1; 0 before the first output."""
    failure: str = ""
    """How the environment has failed, with ``on_error: fail_episode``."""

    def fault(self, what: str) -> EpisodeError:
        """Return the error that ``what`` happened in this episode; it names the prompt and its columns."""
        place, columns = self.row.get(PLACE), columns_of([self.row])
        index = None if place is None else place.row
        values_of = {name: values[0] for name, values in columns.items() if name != "episode_seed"}
        if self.row.get("prompt") is not None:
            values_of = {"prompt": self.row["prompt"], **values_of}
        parts = [f"{name} {_short(value, 40)}" for name, value in values_of.items()]
        seed = f"episode_seed {self.row.get('episode_seed')}"
        return EpisodeError(
            f"{self.name}, {'a prompt' if index is None else f'prompt {index}'} "
            f"({', '.join([*parts[:MOST_COLUMNS], *['…'] * (len(parts) > MOST_COLUMNS), seed])})"
            f"{f', turn {self.turn}' if self.turn else ''}: {what}"
        )

    def fail(self, error: EpisodeError, config: EnvironmentConfig) -> Turn:
        """End the episode as failed, and return its last turn. With ``on_error: raise``, raise ``error`` instead."""
        if config.on_error == "raise":
            raise error
        self.failure = str(error)
        return Turn("", config.fail_reward, done=True)


MOST_COLUMNS = 6
"""Columns of a prompt that errors quote."""


def _short(value: Any, limit: int) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def make(maker: EnvironmentMaker, rows: Sequence[Row], config: EnvironmentConfig) -> tuple[list[Episode], list[Any]]:
    """Make an environment for each row, and return the episodes with the prompts of `reset`; None: the row's own.

    Raises:
        EpisodeError: an environment cannot be made or reset, or returned no prompt; names it and the row.
    """
    episodes = _made(maker, rows, config)
    resets = [getattr(episode.environment, "reset", lambda: None) for episode in episodes]
    results = zip(episodes, call_all(resets, config), strict=True)
    return episodes, [_prompt(episode, _value(episode, result, "reset()")) for episode, result in results]


def _made(maker: EnvironmentMaker, rows: Sequence[Row], config: EnvironmentConfig) -> list[Episode]:
    name = getattr(maker, "__qualname__", type(maker).__qualname__)
    episodes = [Episode(row, name) for row in rows]
    columns = [{key: value for key, value in row.items() if key != PLACE} for row in rows]
    environments = call_all([lambda row=row: maker(row) for row in columns], config)  # type: ignore[misc]
    for episode, result in zip(episodes, environments, strict=True):
        episode.environment = _value(episode, result, f"{name}(row)")
        if not callable(getattr(episode.environment, "step", None)):
            raise episode.fault(
                f"the environment {describe(episode.environment)} has no method step; write step(output) -> "
                "Turn(observation, reward, done)"
            )
        if not inspect.isclass(maker) and (why := _wrong_method(episode.environment)):
            raise episode.fault(f"the environment {describe(episode.environment)}: {why}")
    return episodes


TEXT_OR_MESSAGES = "text, or a list of messages, which are dicts with 'role' and 'content'; neither may be empty"


def _prompt(episode: Episode, value: Any) -> Prompt | None:
    """Return the prompt that `reset` returned, checked."""
    if isinstance(value, Turn):
        raise episode.fault("reset() returned a Turn; an episode cannot be done at reset. Return the prompt")
    if value is not None and not (isinstance(value, str) and value) and not is_conversation(value):
        raise episode.fault(f"reset() returned {describe(value)}; return {TEXT_OR_MESSAGES}")
    prompt: Prompt | None = value
    return prompt


def step(episodes: Sequence[Episode], outputs: Sequence[str], config: EnvironmentConfig) -> list[Turn]:
    """Give each episode its output, and return the answers. An episode that fails ends, with ``fail_reward``.

    The turn of each episode is counted before, so that errors about the answer have its number.

    Raises:
        EpisodeError: an environment raised an exception, took too long or returned something else than a `Turn`,
            unless ``on_error`` is ``fail_episode``.
    """
    calls = [
        lambda e=episode, text=output: e.environment.step(text)
        for episode, output in zip(episodes, outputs, strict=True)
    ]
    turns = []
    for episode, result in zip(episodes, call_all(calls, config), strict=True):
        episode.turn += 1
        try:
            turns.append(_turn(episode, _value(episode, result, "step(output)")))
        except EpisodeError as error:
            turns.append(episode.fail(error, config))
    return turns


def forked(environment: Any) -> Any:
    """Return what ``environment.fork()`` returns; without such a method, a deep copy."""
    return environment.fork() if hasattr(environment, "fork") else copy.deepcopy(environment)


def fork(episodes: Sequence[Episode], config: EnvironmentConfig) -> list[Episode]:
    """Return copies of episodes, with copies of their environments.

    Raises:
        EpisodeError: an environment cannot be copied.
    """
    results = call_all([partial(forked, episode.environment) for episode in episodes], config)
    copies = []
    for episode, result in zip(episodes, results, strict=True):
        try:
            made = _value(episode, result, "fork(), by default copy.deepcopy,")
        except EpisodeError as error:
            advice = "An algorithm that branches episodes copies their environments: write fork(self) -> a copy"
            raise EpisodeError(f"{error}. {advice}") from error
        if made is episode.environment or not callable(getattr(made, "step", None)):
            raise episode.fault(f"fork() returned {describe(made)}; return another environment in the same state")
        copies.append(replace(episode, environment=made))
    return copies


def _value(episode: Episode, result: Result, what: str) -> Any:
    """Return the result of a call; raise an `EpisodeError` if it failed. `KeyboardInterrupt` is raised unchanged."""
    error = result.error
    if error is None:
        return result.value
    if isinstance(error, KeyboardInterrupt):
        raise error
    advice = (
        f"{what} took longer than environment.timeout, {error}; it is not waited for"
        if isinstance(error, TimeoutError) and result.given_up
        else f"{what} raised {type(error).__name__}{f': {error}' if str(error) else ''}"
    )
    raise episode.fault(advice) from error


def _turn(episode: Episode, value: Any) -> Turn:
    """Return a checked copy of a turn, with plain numbers.

    Raises:
        EpisodeError: it is no `Turn`, or one of its fields has a wrong type or value.
    """
    if not isinstance(value, Turn):
        raise episode.fault(f"step(output) returned {describe(value)}; return Turn(observation, reward, done)")
    reward, done = finite(plain(value.reward)), plain(value.done)
    if reward is None:
        raise episode.fault(f"the reward of its Turn is {describe(value.reward)}; it should be a finite number")
    if not isinstance(done, bool):
        raise episode.fault(f"done of its Turn is {describe(value.done)}; it should be True or False")
    seen = value.observation
    if not done and not (isinstance(seen, str) and seen) and not is_conversation(seen):
        raise episode.fault(
            f"the observation of its Turn is {describe(seen)}; unless the episode is done, it should be "
            f"{TEXT_OR_MESSAGES}"
        )
    return Turn(seen, reward, done)


# ------------------------------------------------------------------------------------------------ concurrent calls


def call_all(calls: Sequence[Callable[[], Any]], config: EnvironmentConfig) -> list[Result]:
    """Call all functions, up to ``config.workers`` at a time, and return their results in order.

    Coroutines that they return are awaited, and cancelled when their time is up. A plain function cannot be cancelled:
    its thread is left behind, and its result is discarded. Threads are daemons, so the process can exit.
    """
    results: dict[int, Result] = {}
    ended = threading.Event()
    late = Result(error=TimeoutError(f"{config.timeout:g} s"), given_up=True)

    async def one(index: int, places: asyncio.Semaphore) -> None:
        async with places:
            task = asyncio.ensure_future(_awaited(calls[index]))
            done, _ = await asyncio.wait([task], timeout=config.timeout)
            if not done:
                task.cancel()
                results[index] = late
            else:
                results[index] = Result(error=asyncio.CancelledError()) if task.cancelled() else task.result()

    async def every() -> None:
        asyncio.get_running_loop().set_default_executor(Daemons())
        places = asyncio.Semaphore(config.workers)
        await asyncio.gather(*(one(index, places) for index in range(len(calls))))

    def run() -> None:
        try:
            asyncio.run(every())
        finally:
            ended.set()

    threading.Thread(target=run, daemon=True, name="trainkit-environment").start()
    # a coroutine that blocks the loop cannot be cancelled: wait for as long as all may take one after the other
    rounds = -(-len(calls) // config.workers)
    ended.wait(config.timeout * (rounds + 1))
    return [results.get(index, late) for index in range(len(calls))]


async def _awaited(call: Callable[[], Any]) -> Result:
    """Return the result of a call in a thread of its own, or of the coroutine that it returns.

    Of an error in a task, asyncio would pass SystemExit on, and end all others with it.
    """
    result = await asyncio.get_running_loop().run_in_executor(None, _called, call)
    if not inspect.isawaitable(result.value):
        return result
    try:
        return Result(await result.value)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        return Result(error=error)


def _called(call: Callable[[], Any]) -> Result:
    try:
        return Result(call())
    except BaseException as error:  # whatever user code raises, SystemExit too, is told to the main thread
        return Result(error=error)
