"""A server of vLLM over HTTP: one generated response, new weights, a new adapter."""

from __future__ import annotations

import http.client
import json
import math
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from trainkit.errors import EngineError, describe
from trainkit_vllm.transfer import Broadcast, Piece, Shared, bucket_size, filled, group_of, store_at

ADAPTER = "trainkit"
"""The name under which a server knows the adapter of the run."""
PARTIAL = "partly loaded"
"""The tag of weights while new ones are loaded; it remains if that fails."""
JOINING = 60.0
"""Seconds that trainer and workers have to reach each other over the network."""
UNKNOWN = -9999.0
"""What vLLM's servers return instead of a log-probability that is NaN or −inf."""


@dataclass(frozen=True)
class Answer:
    """One response."""

    ids: list[int]
    """The token ids, the terminating token included."""
    reason: str
    """Why it ends: ``stop``, ``length``, or what else vLLM calls it."""
    tags: set[str]
    """The tags of the weights that sampled its tokens."""
    logprobs: list[float]
    """The log-probability of each token, at the sampling temperature and before truncation."""


class UnreachableError(EngineError):
    """A server that cannot be reached."""


class RefusedError(EngineError):
    """A server that could not do what it was asked for: the status of its answer is 500 or above."""


class UnsharedError(EngineError):
    """A server that weights do not reach in this way."""


class DiedError(EngineError):
    """A server, started by trainkit, that ended although it should not."""


class Server:
    """A server of vLLM at ``url``.

    Args:
        url: its address, ``http://HOST:PORT``.
        timeout: seconds that it has to answer.
        key: its API key; empty if it has none.
    """

    def __init__(self, url: str, timeout: float, key: str = "") -> None:
        self.url, self.timeout = url.rstrip("/"), timeout
        self._group: tuple[str, Any] | None = None
        """The group that the workers at an address have joined."""
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}

    def __str__(self) -> str:
        return f"'vllm' at {self.url}"

    def request(self, method: str, path: str, body: Any = None, timeout: float | None = None) -> tuple[int, bytes]:
        """Send one request, and return the status and the content of the answer.

        Raises:
            OSError, http.client.HTTPException: the server cannot be reached, or does not answer in time.
        """
        parts = urlsplit(self.url)
        connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = connect(parts.netloc, timeout=timeout or self.timeout)
        try:
            content = None if body is None else json.dumps(body).encode()
            connection.request(method, parts.path + path, content, self._headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def post(self, path: str, body: Any = None) -> Any:
        """Send ``body`` as JSON, and return the answer.

        Raises:
            EngineError: there is no server, it does not answer in time, or its answer is an error.
        """
        try:
            status, content = self.request("POST", path, body)
        except TimeoutError as error:
            raise EngineError(
                f"the engine {self} did not answer within {self.timeout:g} seconds; raise rollout.engine.timeout, or "
                "see what the server does"
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise UnreachableError(
                f"the engine {self} cannot be reached ({type(error).__name__}: {error}); start a server there, or "
                "correct rollout.engine.urls"
            ) from error
        if status != 200:
            kind = RefusedError if status >= 500 else EngineError
            raise kind(f"the engine {self} answered {path} with the status {status}: {_message(content)}")
        try:
            return json.loads(content)
        except ValueError:
            return content.decode("utf-8", "replace")

    # --------------------------------------------------------------------------------------------------- its model

    def describe(self, excluded: Sequence[int] = ()) -> dict[str, Any]:
        """Return what the server serves, as `trainkit_vllm.worker.WorkerExtension.trainkit_describe` returns it.

        Raises:
            EngineError: there is no server, or it is started without what trainkit needs; says how to start it.
        """
        try:
            found: dict[str, Any] = self.call("trainkit_describe", list(excluded))[0]
        except (UnreachableError, DiedError):
            raise
        except (EngineError, LookupError, TypeError) as error:
            raise EngineError(
                f"{error}. The engine {self} cannot be used; start it with VLLM_SERVER_DEV_MODE=1 and "
                "VLLM_USE_V2_MODEL_RUNNER=0 in its environment and the options --enable-scale-out "
                "--worker-extension-cls trainkit_vllm.worker.WorkerExtension"
            ) from error
        self.workers: int = found["workers"]
        return found

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of `trainkit_vllm.worker.WorkerExtension`, and return the result of each worker."""
        results: list[Any] = self.post("/collective_rpc", {"method": method, "args": arguments})["results"]
        return results

    @contextmanager
    def loading(self, tag: str) -> Iterator[None]:
        """Call the weights that are loaded in the block ``tag``; no request is under way in it.

        Raises:
            EngineError: the server refused, or its prefix cache may hold what the earlier weights computed.
        """
        self.post("/pause?mode=wait")  # all requests have been answered; a server of several users may have others
        try:
            self.post("/update_weight_version", {"new_version": PARTIAL})
            yield
            if self.post("/reset_prefix_cache") != {"success": True}:
                raise EngineError(
                    f"the engine {self} did not clear its prefix cache after new weights were loaded: its next "
                    "responses could depend on the earlier weights"
                )
            self.post("/update_weight_version", {"new_version": tag})
        finally:
            self.post("/resume")

    def load_adapter(self, directory: Path) -> None:
        """Load the adapter in ``directory``."""
        self.post("/v1/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": str(directory), "load_inplace": True})

    def load_tensors(self, tensors: Mapping[str, Tensor], network: bool) -> None:
        """Load tensors of this process, over the network or through memory that the workers map.

        Raises:
            UnsharedError: they do not reach the workers in this way; nothing is loaded.
            EngineError: the server failed.
        """
        device = next(iter(tensors.values())).device
        way = Broadcast if network else Shared
        try:
            bucket = way(bucket_size(tensors), device, *([self._joined(device)] if network else []))
        except EngineError:
            raise
        except (OSError, RuntimeError) as error:
            raise UnsharedError(f"{type(error).__name__}: {error}") from error
        token = [*secrets.token_bytes(16)]
        bucket.bucket[:16] = torch.tensor(token)
        try:
            self._agreed("trainkit_begin", bucket.bucket.numel(), bucket.told, token)
            for pieces, used in filled(tensors, bucket.bucket):
                if device.type == "cuda":
                    torch.cuda.synchronize()
                self._send(bucket, pieces, used)
            self.call("trainkit_finish")
        except BaseException:
            self._group = None
            raise
        finally:
            bucket.close()

    def _send(self, bucket: Shared | Broadcast, pieces: list[Piece], used: int) -> None:
        """Let the workers load what is in the bucket."""
        if isinstance(bucket, Shared):
            self.call("trainkit_take", pieces, used)
            return
        with ThreadPoolExecutor(1) as pool:
            taken = pool.submit(self.call, "trainkit_take", pieces, used)
            try:
                work = bucket.group.broadcast(bucket.bucket[:used], 0)
                taken.result()
                work.wait()
            except RuntimeError as error:  # also an EngineError
                bucket.group.abort()  # a worker that has died would be waited for
                taken.result()  # raises the reason, if it knows one
                raise EngineError(f"weights cannot be sent to the engine {self} over the network: {error}") from error

    def _joined(self, device: torch.device) -> Any:
        """Return the group of this process and the workers.

        Raises:
            UnsharedError: they cannot join it.
        """
        if self._group is not None and self._group[0] == self.url:
            return self._group[1]
        parts, gpu = urlsplit(self.url), device.type == "cuda"
        with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=JOINING) as connection:
            own = connection.getsockname()[0]
        size = 1 + self.workers
        store = store_at(own, 0, 0, size, JOINING)
        with ThreadPoolExecutor(1) as pool:
            joined = pool.submit(self._agreed, "trainkit_join", own, store.port, size, gpu, JOINING)
            group = group_of(store, 0, size, gpu, JOINING)
            joined.result()
        self._group = (self.url, group)
        return group

    def _agreed(self, method: str, *arguments: Any) -> None:
        for reason in self.call(method, *arguments):
            if reason:
                raise UnsharedError(reason)

    def generate(
        self,
        query: Sequence[int],
        parameters: Mapping[str, Any],
        adapter: bool,
        features: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Return the response to ``query``, sampled with vLLM's ``parameters``.

        ``features`` is what `trainkit_vllm.images.for_server` returns of its images.

        Raises:
            EngineError: as `post`; or the answer lacks something.
        """
        body: dict[str, Any] = {"token_ids": list(query), "sampling_params": dict(parameters), **(features or {})}
        if adapter:
            body["model"] = ADAPTER
        answer = self.post("/inference/v1/generate", body)
        try:
            [choice] = answer["choices"]
            ids = [int(token) for token in choice["token_ids"]]
            content = choice["logprobs"]["content"] if ids else []
            logprobs = {"token": [row["token_id"] for row in content], "value": [row["logprob"] for row in content]}
            tags = {span["version"] for span in choice["weight_versions"] or []}
        except (LookupError, TypeError, ValueError) as error:
            raise EngineError(
                f"the engine {self} answered {describe(answer, 200)}; expected is one choice with token_ids, logprobs "
                "and weight_versions, as vLLM 0.32 returns it"
            ) from error
        if logprobs["token"] != ids:
            raise EngineError(
                f"the engine {self} returned log-probabilities of the tokens {logprobs['token']} with the tokens {ids}"
            )
        values = [math.nan if value is None or value <= UNKNOWN else float(value) for value in logprobs["value"]]
        return Answer(ids, str(choice["finish_reason"]), tags, values)

    def close(self) -> None:
        """Do nothing: the server belongs to others."""


def _message(content: bytes) -> str:
    """Return the message of an error in JSON, or the beginning of the content."""
    try:
        found = json.loads(content)
        error = found.get("error", found.get("detail", found))
        return str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return content[:200].decode("utf-8", "replace") or "no content"
