"""The generation engine ``ray``: actors of Ray sample the responses, on this machine or on a cluster.

Reward functions and environments run in actors, too: `remote_reward` and `remote_environment`."""

from __future__ import annotations

import io
import logging
import secrets
import socket
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from threading import Lock, Thread
from typing import Any

import torch
from pydantic import Field, field_validator, model_validator

from trainkit import EngineEntry, PluginConfig, register_engine
from trainkit.errors import EngineError
from trainkit.rollouts import Engine, Generated, Request, ServedModel, Weights, engine_class
from trainkit_ray import cluster
from trainkit_ray.workers import remote_environment, remote_reward

__all__ = ["RayConfig", "RayEngine", "remote_environment", "remote_reward"]

log = logging.getLogger(__name__)

BOARDS = "trainkit"
"""The namespace of Ray in which processes of a run find the same actor."""


class RayConfig(PluginConfig):
    """How many actors sample, and where."""

    actors: int = Field(1, ge=1)
    """Actors, each a process with a copy of the model. A call of the sampler goes to one of them as a whole."""
    engine: EngineEntry = "local"
    """What samples in each actor: `local`, which is trainkit's sampler, or another engine, which is started there, e.g.
    `{name: vllm, mode: process}`."""
    address: str | None = None
    """The cluster: the `host:port` of its head node, or `auto` for the one that this machine belongs to. None: a
    cluster on this machine, for this run alone."""
    cpus: float = Field(1.0, ge=0)
    """CPUs that Ray reserves for each actor; only with `address`."""
    gpus: float = Field(0.0, ge=0)
    """GPUs that Ray reserves for each actor, which then samples on a GPU; 0: on the CPU."""
    threads: int | None = Field(None, ge=1)
    """Threads of torch in each actor. None: as many as in the training process, so that numbers are bit-equal."""
    max_restarts: int = Field(3, ge=0)
    """How many actors that died are replaced in a run; one more is an error."""
    timeout: float = Field(300.0, gt=0)
    """Seconds that an actor has to start."""

    @field_validator("address")
    @classmethod
    def _check_address(cls, value: str | None) -> str | None:
        return cluster.check_address(value)

    @field_validator("engine")
    @classmethod
    def _check_engine(cls, value: str | PluginConfig) -> str | PluginConfig:
        if isinstance(value, RayConfig):
            raise ValueError("should be what samples in an actor, e.g. 'local'; given 'ray' itself")
        return value

    @model_validator(mode="after")
    def _check_cpus(self) -> RayConfig:
        if self.address is None and self.cpus != 1.0:
            raise ValueError("cpus has no effect without address; set threads, or remove it")
        return self


@register_engine("ray", RayConfig)
class RayEngine(Engine):
    """Samples in actors of Ray, each with a `trainkit.rollouts.Replica` of the model."""

    abilities = frozenset(("encoder_decoder", "images", "logit_mask"))
    exact = True
    config: RayConfig

    def __init__(self, config: RayConfig, served: ServedModel) -> None:
        super().__init__(config, served)
        self.restarts = 0
        """Actors that have been replaced."""
        self.closed = False
        self.loaded: Any = None
        """Reference to the weights of the last `load`, in Ray's store of objects."""
        self.behind = False
        """Whether another process of this machine has stored newer ones."""
        self._restarting, self._choosing = Lock(), Lock()
        try:
            cluster.enter(config.address)
        except ConnectionError as error:
            raise self._error(f"cannot be reached: {error}") from error
        except Exception as error:
            token = "" if config.address is None else "; if the cluster asks for a token, set RAY_AUTH_MODE=token"
            raise self._error(f"cannot be reached or started: {_said(error)}{token}") from error
        self.seats: list[Seat] = []
        self.board: Any = None
        """The actor that has the references for all processes of this machine; None: there is one process."""
        self.address = served.address
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise

    def __str__(self) -> str:
        count, place = self.config.actors, self.config.address
        where = "on this machine" if place is None else f"at {place}"
        return f"'ray' ({count} actor{'s' if count > 1 else ''} {where})"

    @classmethod
    def of(cls, config: PluginConfig | None) -> type[Engine]:
        """Return a class that can do what the engine in the actors can do."""
        inner, address = getattr(config, "engine", "local"), getattr(config, "address", None)
        held = None if inner == "local" else engine_class(inner)
        return cls if held is None and address is None else _variant(cls, held, address is not None)

    @classmethod
    def check(cls, config: PluginConfig | None, processes: int) -> None:  # noqa: ARG003
        """Raise a `ConfigError` if Ray is not installed."""
        cluster.check_installed("the engine 'ray'")

    # ------------------------------------------------------------------------------------------------ the interface

    @property
    def pids(self) -> list[int]:
        """The actors' processes, if they run on this machine."""
        return [seat.pid for seat in self.seats if seat.host == socket.gethostname()]

    def load(self, weights: Weights) -> None:
        """Send the weights to all actors, through Ray's store, where they are once."""
        import ray

        from trainkit_ray.generator import packed

        if self.served.address is not None:  # they may not be stored yet, but are before the next request
            self.behind = True
            return
        tensors = {name: packed(tensor) for name, tensor in self.served.fitting(weights).items()}
        self.loaded = ray.put((weights.version, tensors))
        if self.board is not None:
            ray.get(self.board.put.remote("weights", [self.loaded]))
        self._load_all()

    def _load_all(self) -> None:
        sent = [(seat, seat.actor, seat.actor.load.remote(self.loaded)) for seat in self.seats]
        for seat, actor, done in sent:
            self._finish(seat, actor, done, lambda actor: actor.load.remote(self.loaded))

    def submit(self, request: Request) -> Future[Generated]:
        """Give the request to the actor with the fewest requests under way."""
        future: Future[Generated] = Future()
        if self.behind:
            self.loaded, self.behind = self._on_board("weights"), False
            self._load_all()
        with self._choosing:
            seat = min(self.seats, key=lambda seat: (seat.waiting, seat.turns))
            seat.waiting, seat.turns = seat.waiting + 1, seat.turns + 1
        Thread(target=self._answer, args=(seat, request, future), name="trainkit-ray", daemon=True).start()
        return future

    def close(self) -> None:
        """End the actors, and the cluster if the run started it."""
        if self.closed:
            return
        self.closed = True
        own = [self.board] if self.board is not None and self.served.address is None else []
        cluster.leave([*(seat.actor for seat in self.seats), *own])

    # ----------------------------------------------------------------------------------------------------- answering

    def _answer(self, seat: Seat, request: Request, future: Future[Generated]) -> None:
        from trainkit_ray.generator import unpacked_answer

        try:
            actor = seat.actor
            answer = self._finish(seat, actor, actor.generate.remote(request), lambda a: a.generate.remote(request))
            future.set_result(unpacked_answer(answer))
        except BaseException as error:  # whoever waits for the future gets it
            future.set_exception(error)
        finally:
            with self._choosing:
                seat.waiting -= 1

    def _finish(self, seat: Seat, actor: Any, done: Any, again: Callable[[Any], Any]) -> Any:
        """Return the result of a call of ``actor``; if it has died, replace it, and call the new one.

        Raises:
            EngineError: the call raised an exception, which is the cause, or too many actors have died.
        """
        import ray
        from ray.exceptions import RayActorError, RayError, RayTaskError

        while True:
            try:
                return ray.get(done)
            except RayActorError as error:
                self._replace(seat, actor, error)
            except RayTaskError as error:
                raise self._error(f"failed in actor {seat.index}: {_said(error.cause)}") from error.cause
            except RayError as error:
                raise self._error(f"failed in actor {seat.index}: {_said(error)}") from error
            actor = seat.actor
            done = again(actor)

    # --------------------------------------------------------------------------------------------------- the actors

    def _start_all(self) -> None:
        import ray

        from trainkit_ray.generator import Board

        if self.address is not None:
            self.board = ray.get_actor(self.address, BOARDS)
            self._packed = self._on_board("model")
        else:
            buffer = io.BytesIO()
            torch.save(self.served, buffer, pickle_module=ray.cloudpickle)  # also classes of a script
            self._packed = ray.put(buffer.getvalue())
            if self.shared and self.served.processes > 1:
                self.address = secrets.token_hex(8)
                options = {"name": self.address, "namespace": BOARDS, "num_cpus": 0}
                self.board = ray.remote(Board).options(**options).remote()
                ray.get(self.board.put.remote("model", [self._packed]))
        started = [self._begin() for _ in range(self.config.actors)]
        for index, actor in enumerate(started, 1):
            self.seats.append(Seat(index, actor))
            self._await_start(self.seats[-1], actor)

    def _on_board(self, key: str) -> Any:
        """Return a reference that the process which this one joins has stored."""
        import ray

        [reference] = ray.get(self.board.get.remote(key))
        return reference

    def _begin(self) -> Any:
        """Start an actor, and return it at once."""
        import ray

        from trainkit_ray.generator import Generator

        config, threads = self.config, self.config.threads or torch.get_num_threads()
        cpus = 0 if config.address is None else config.cpus  # the machine is the run's own
        options = {"num_cpus": cpus, "num_gpus": config.gpus, "max_restarts": 0}
        device = "cuda" if config.gpus else "cpu"
        return ray.remote(Generator).options(**options).remote(self._packed, threads, device, config.engine)

    def _await_start(self, seat: Seat, actor: Any) -> None:
        """Wait until the actor has made its replica, and note where it runs."""
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        config = self.config
        try:
            seat.host, seat.pid = ray.get(actor.place.remote(), timeout=config.timeout)
        except GetTimeoutError as error:
            room = f"{config.cpus:g} CPUs and {config.gpus:g} GPUs each" if config.address else f"{config.gpus:g} GPUs"
            raise self._error(
                f"has not started actor {seat.index} within {config.timeout:g} s; Ray has to find {room}: look at "
                "`ray status`, ask for less, or raise rollout.engine.timeout"
            ) from error
        except RayActorError as error:
            cause = getattr(error, "cause", None) or error
            raise self._error(f"cannot start actor {seat.index}: {_said(cause)}") from cause

    def _replace(self, seat: Seat, dead: Any, error: BaseException) -> None:
        """Put a new actor in the place of ``dead``, with the weights of the last `load`, unless it is done already."""
        import ray
        from ray.exceptions import RayActorError

        with self._restarting:
            while seat.actor is dead:
                if self.closed:
                    raise self._error("is closed") from error
                if self.restarts >= self.config.max_restarts:
                    told = f"lost actor {seat.index}, and {self.restarts} were replaced before (max_restarts)"
                    raise self._error(f"{told}: {_said(error)}") from error
                self.restarts += 1
                count = f"restart {self.restarts} of {self.config.max_restarts}"
                log.warning("actor %d of the engine %s has died and is replaced (%s)", seat.index, self, count)
                actor = self._begin()
                try:
                    self._await_start(seat, actor)
                    if self.loaded is not None:
                        ray.get(actor.load.remote(self.loaded))
                    seat.actor = actor
                except RayActorError as again:
                    error = again

    def _error(self, what: str) -> EngineError:
        return EngineError(f"the engine {self} {what}")


@cache
def _variant(outer: type[RayEngine], inner: type[Engine] | None, shared: bool) -> type[Engine]:
    """Return the engine with what ``inner`` can do; ``shared``: processes of a machine store their weights once.

    A cluster that a process has started ends with it, so that others do not use it.
    """
    held = {} if inner is None else {"abilities": inner.abilities, "exact": False}
    return type(outer.__name__, (outer,), {**held, **({"shared": "machine"} if shared else {})})


class Seat:
    """The place of an actor, which may be replaced."""

    def __init__(self, index: int, actor: Any) -> None:
        self.index, self.actor = index, actor
        self.host, self.pid = "", 0
        self.waiting, self.turns = 0, 0
        """Requests under way, and all requests."""


def _said(error: BaseException) -> str:
    """Return an error in one line, as short as it names the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
