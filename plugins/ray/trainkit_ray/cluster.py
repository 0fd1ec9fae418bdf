"""Ray in this process: joined at an address, or started here and shut down with its last engine."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

from trainkit.errors import ConfigError

_lock = threading.Lock()
_engines = 0
"""Engines of this process that use Ray."""
_own = False
"""Whether this module has initialised Ray, and so shuts it down."""
_joined: str | None = None
"""The address at which it was."""


def check_installed(what: str) -> None:
    """Raise a `ConfigError` if Ray is not installed; ``what`` needs it."""
    if find_spec("ray") is None:
        raise ConfigError(f"{what} needs Ray, which is not installed: pip install 'trainkit-ray[ray]'")


def check_address(value: str | None) -> str | None:
    """Return the address of a cluster.

    Raises:
        ValueError: it is none.
    """
    if value is None or value == "auto" or re.fullmatch(r"[^:/\s]+:\d+", value):
        return value
    raise ValueError("should be host:port of the head node, as `ray start --head` prints it, or 'auto'")


def enter(address: str | None) -> None:
    """Use the cluster at ``address``; None: start one on this machine, unless Ray is initialised already.

    Raises:
        ConnectionError: no Ray listens at the address; Ray itself would try for minutes.
        RuntimeError: another engine of this process uses another cluster.
        Exception: those of `ray.init`.
    """
    global _engines, _own, _joined
    with _lock, _unchanged():
        import ray

        if address not in (None, "auto"):
            _check_listens(address or "")
        if not ray.is_initialized():
            _initialise(address)
            _own, _joined = True, address
        elif _own and address != _joined:
            raise RuntimeError(f"another engine of this process uses the cluster {_joined or 'of this machine'}")
        _engines += 1


def _initialise(address: str | None) -> None:
    import ray

    usual: dict[str, Any] = {"configure_logging": False, "log_to_driver": False}
    if address is not None:
        ray.init(address=address, **usual)
        return
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", include_dashboard=False, **usual)


def _check_listens(address: str) -> None:
    wanted = "give the address of a cluster's head node, as `ray start --head` prints it"
    try:
        answers = speaks_grpc(address)
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"nothing listens at {address} ({type(error).__name__}: {error}); {wanted}") from error
    if not answers:
        raise ConnectionError(f"no Ray is at {address}: what listens there does not answer as Ray does; {wanted}")


def speaks_grpc(address: str) -> bool:
    """Return whether a server of gRPC listens at ``host:port``, as a head node does; True if it is asked by TLS.

    It answers the beginning of an HTTP/2 connection (RFC 9113, section 3.4) by a frame of its settings.

    Raises:
        OSError: nothing listens.
    """
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return True
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        with suppress(OSError):  # it does not answer, or hangs up
            return connection.recv(9)[3:4] == b"\x04"
        return False


def leave(actors: Iterable[Any]) -> None:
    """End ``actors``; shut Ray down if it was initialised here, and no other engine uses it."""
    global _engines, _own
    import ray

    with _lock:
        _engines -= 1
        if not ray.is_initialized():  # at the end of the process Ray may be first
            return
        for actor in actors:
            with suppress(Exception):  # it has died
                ray.kill(actor)
        if _own and _engines == 0:
            with _unchanged():
                ray.shutdown()
            _own = False


@contextmanager
def _unchanged() -> Iterator[None]:
    """Restore environment variables, the handler of SIGTERM and Python's generator, which importing Ray and `ray.init`
    change."""
    variables, draws = dict(os.environ), random.getstate()
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        for name in {*os.environ} - {*variables}:
            del os.environ[name]
        os.environ.update({name: value for name, value in variables.items() if os.environ.get(name) != value})
        random.setstate(draws)
        if main and handler is not None:
            signal.signal(signal.SIGTERM, handler)
