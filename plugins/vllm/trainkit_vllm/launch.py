"""Servers of vLLM that trainkit starts on loopback, each in a process of its own."""

from __future__ import annotations

import http.client
import importlib.util
import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Set
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from trainkit.errors import EngineError
from trainkit_vllm.client import DiedError, RefusedError, Server, UnreachableError
from trainkit_vllm.guard import PATIENCE

log = logging.getLogger(__name__)

GUARD = Path(__file__).with_name("guard.py")
"""The program that ends a server with the process that has started it."""
EXTENSION = "trainkit_vllm.worker.WorkerExtension"
FOREIGN = re.compile(
    r"VLLM_CPU_KVCACHE_SPACE|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
)
"""Variables that a server does not inherit: a setting decides on the cache; the others describe the trainer's group."""
DYING = 15.0
"""Seconds in which a server that has lost its worker ends; only then is it known that it died."""
LOOK = 2.0
"""Seconds between looks at a server while it does not answer a call."""
SECRETS = {"api_key": "VLLM_API_KEY", "hf_token": "HF_TOKEN"}
"""Arguments that a server gets in its environment, because all users of the machine see its command line and vLLM logs
it."""
FAULT, HARMLESS = re.compile(r"\b\w*(?:Error|Exception): .*"), re.compile(r"\b(?:DEBUG|INFO|WARNING)\b")


def installed() -> bool:
    """Return whether vLLM is installed here; do not import it."""
    return importlib.util.find_spec("vllm") is not None


def environment(adapters: bool, arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment variables of a server; those of this process take precedence where they may differ.

    Args:
        adapters: whether adapters are loaded.
        arguments: vLLM's arguments, of which the `SECRETS` are passed in variables.
    """
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if not torch.cuda.is_available():
        threads["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # for CPUs, vLLM takes the executor "uni" only with it
    own = {name: value for name, value in os.environ.items() if not FOREIGN.fullmatch(name)}
    return {
        **threads,
        **own,
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that load weights exist only with it
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the extension knows the sampler of the first
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1" if adapters else "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOOPBACK_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # all files are in the directory
        "TOKENIZERS_PARALLELISM": "false",
        **{variable: str(arguments[name]) for name, variable in SECRETS.items() if name in arguments},
    }


def options(arguments: Mapping[str, Any]) -> list[str]:
    """Return vLLM's arguments as options of its command line: ``{"a_b": 2, "c": True}`` -> ``--a-b 2 --c``.

    The `SECRETS` are omitted.
    """
    made: list[str] = []
    for name, value in arguments.items():
        if name in SECRETS:
            continue
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            made.append(option if value else option.replace("--", "--no-", 1))
        else:
            made += [option, value if isinstance(value, str) else json.dumps(value)]
    return made


def key_of(arguments: Mapping[str, Any]) -> str:
    """Return the API key of a server that is started with ``arguments``; empty if it has none."""
    return str(arguments.get("api_key") or os.environ.get("VLLM_API_KEY", ""))


def note_in(directory: Path) -> Path:
    """Return the file in which the process that starts a server announces it."""
    return directory / "server.json"


class Started(Server):
    """A server on loopback, started by trainkit; it ends with this process.

    Args:
        arguments: vLLM's arguments, among them the directory of the model.
        directory: where its log is written.
        timeout: seconds that it has to answer.
        start_timeout: seconds that it has to start.
    """

    def __init__(self, arguments: Mapping[str, Any], directory: Path, timeout: float, start_timeout: float) -> None:
        super().__init__("", timeout, key_of(arguments))
        self.arguments, self.log, self.start_timeout = arguments, directory / "server.log", start_timeout
        self.process: subprocess.Popen[bytes] | None = None
        self._begin = self._starts = 0

    def start(self) -> None:
        """Start the server, and wait until it answers.

        Raises:
            EngineError: it ended, or does not answer in time; with the reason from its log.
        """
        self.close()
        self._starts += 1
        self._note()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        server = ["-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
        quiet = ["--uvicorn-log-level", "warning"]
        given = options({**self.arguments, "worker_extension_cls": EXTENSION, "enable_scale_out": True})
        self._begin = self.log.stat().st_size if self.log.exists() else 0  # the log of a restarted server goes on
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(GUARD), str(self.log.parent), sys.executable, *server, *quiet, *given],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                env=environment(bool(self.arguments.get("enable_lora")), self.arguments),
                start_new_session=True,  # an interrupt from the keyboard ends the run, which then ends the server
            )
        log.info("starting vLLM at %s, which takes about a minute; its log is %s", self.url, self.log)
        self._wait()

    def _wait(self) -> None:
        end = time.monotonic() + self.start_timeout
        while time.monotonic() < end:
            if self.process is None or self.process.poll() is not None:
                raise EngineError(f"the engine {self} did not start: {self.reason()}")
            try:
                if self.request("GET", "/health", timeout=5)[0] == 200:
                    return
            except (OSError, http.client.HTTPException):
                pass  # it does not listen yet
            time.sleep(0.25)
        self.close()
        raise EngineError(
            f"the engine {self} did not start within {self.start_timeout:g} seconds; raise "
            f"rollout.engine.start_timeout. Its log ends with: {self.reason()}"
        )

    def announce(self, fault: str = "") -> None:
        """Let other processes use the server, or fail with ``fault``, because it is not started again."""
        self._starts += bool(fault)  # what they have joined is over
        self._note(url=self.url, ready=True, fault=fault)

    def _note(self, **said: Any) -> None:
        note = note_in(self.log.parent)
        with suppress(FileNotFoundError):  # the engine is closed
            note.with_suffix(".new").write_text(json.dumps({"starts": self._starts, "ready": False, **said}), "utf-8")
            note.with_suffix(".new").replace(note)

    def reason(self) -> str:
        """Return the first error since the server was started, from its log; the log's end if it names none."""
        content = self.log.read_bytes()[self._begin :] if self.log.exists() else b""
        lines = content.decode("utf-8", "replace").strip().splitlines()
        told = [line for line in lines if not HARMLESS.search(line)]
        for at, line in enumerate(told):
            if found := FAULT.search(line):
                more = told[at + 1 : at + 3] if "validation error" in line else []  # pydantic says it in further lines
                return " ".join([found.group(), *more])
        return " | ".join(lines[-3:]) or "its log is empty"

    @property
    def alive(self) -> bool:
        """Whether the process of the server runs."""
        return self.process is not None and self.process.poll() is None

    @property
    def pids(self) -> list[int]:
        """The ids of its processes: that of the server first, then those that compute."""
        if not self.alive:
            return []
        assert self.process is not None
        found = []
        with suppress(psutil.NoSuchProcess):
            for each in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if each.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(each.cmdline()):
                        found.append(each.pid)
        return found

    def post(self, path: str, body: Any = None) -> Any:
        """Send ``body`` as JSON, and return the answer.

        Raises:
            DiedError: the server died, or is about to.
            EngineError: it does not answer in time, or its answer is an error.
        """
        process, begun = self.process, self._starts  # another thread may start the next one meanwhile
        try:
            return super().post(path, body)
        except (UnreachableError, RefusedError) as error:
            end = time.monotonic() + DYING
            while process is not None and process.poll() is None and self._starts == begun and time.monotonic() < end:
                if self._lost(process):
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(PATIENCE + 5)
                    break
                time.sleep(0.1)
            if process is None or process.poll() is not None or self._starts != begun:
                raise DiedError(f"the engine {self} died: {self.reason()}") from error
            raise

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of the workers; end a server whose workers have died, because it does not answer then.

        Raises:
            DiedError: the server died.
        """
        process, begun = self.process, {*self.pids}
        with ThreadPoolExecutor(1) as pool:
            called = pool.submit(super().call, method, *arguments)
            while not wait([called], timeout=LOOK).done:
                self._lost(process, begun)
            return called.result()

    def _lost(self, process: subprocess.Popen[bytes] | None, begun: Set[int] = frozenset()) -> bool:
        """End ``process`` and return true if it has lost its workers: it may wait for their answers, and not end.

        Args:
            begun: processes without which it does not answer any more.
        """
        try:
            lost = self.request("GET", "/health", timeout=5)[0] == 503
        except ConnectionRefusedError:
            lost = True  # it has begun to end
        except (OSError, http.client.HTTPException):  # it is busy, waits for workers, or has ended
            lost = not begun <= {*self.pids}
        if lost and process is not None and process is self.process:
            assert process.stdin is not None
            process.stdin.close()  # for the guard, the end of this process
        return lost

    def close(self) -> None:
        """End the server and its processes."""
        if self.process is None:
            return
        assert self.process.stdin is not None
        self.process.stdin.close()  # for the guard, the end of this process
        try:
            self.process.wait(PATIENCE + 5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None


class Joined(Server):
    """A server that another process of this machine has started, and starts again if it dies.

    Args:
        directory: where that process announces it.
        timeout: seconds that it has to answer, and to load weights.
        start_timeout: seconds that it has to start.
        key: its API key; empty if it has none.
    """

    def __init__(self, directory: Path, timeout: float, start_timeout: float, key: str) -> None:
        super().__init__("", timeout, key)
        self.note, self.start_timeout, self._starts = note_in(directory), start_timeout, 0

    def start(self) -> None:
        """Wait until the server is started, or started again, and has its weights.

        Raises:
            EngineError: the other process gives up, ends, or takes too long.
        """
        end = time.monotonic() + self.start_timeout + self.timeout
        while not (said := self._said())["ready"]:
            if time.monotonic() > end:
                raise EngineError(f"the engine {self} died, and was not started again in time")
            time.sleep(0.1)
        if said["fault"]:
            raise EngineError(said["fault"])
        self.url, self._starts = said["url"], said["starts"]

    @property
    def alive(self) -> bool:
        """Whether the server is not known to have died."""
        return bool(self._said()["starts"] == self._starts)

    def post(self, path: str, body: Any = None) -> Any:
        """Send ``body`` as JSON, and return the answer.

        Raises:
            DiedError: the server died.
            EngineError: it does not answer in time, or its answer is an error.
        """
        begun = self._starts
        try:
            return super().post(path, body)
        except (UnreachableError, RefusedError) as error:
            end = time.monotonic() + DYING
            while self._said()["starts"] == begun and time.monotonic() < end:
                time.sleep(0.1)
            if self._said()["starts"] != begun:
                raise DiedError(f"the engine {self} died") from error
            raise

    def _said(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self.note.read_text("utf-8"))
        except FileNotFoundError as error:
            raise EngineError(f"the engine {self} ended with the process that had started it") from error
        return found
