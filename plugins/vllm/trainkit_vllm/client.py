"""A server of vLLM over HTTP: one generated response, new weights, a new adapter."""

from __future__ import annotations

import http.client
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trainkit.errors import EngineError, describe

ADAPTER = "trainkit"
"""The name under which a server knows the adapter of the run."""
PARTIAL = "partly loaded"
"""The tag of weights while new ones are loaded; it remains if that fails."""
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

    def describe(self) -> dict[str, Any]:
        """Return what the server serves, as `trainkit_vllm.worker.WorkerExtension.trainkit_describe` returns it.

        Raises:
            EngineError: there is no server, or it is started without what trainkit needs; says how to start it.
        """
        try:
            found: dict[str, Any] = self.post("/collective_rpc", {"method": "trainkit_describe"})["results"][0]
        except (UnreachableError, DiedError):
            raise
        except (EngineError, LookupError, TypeError) as error:
            raise EngineError(
                f"{error}. The engine {self} cannot be used; start it with VLLM_SERVER_DEV_MODE=1 and "
                "VLLM_USE_V2_MODEL_RUNNER=0 in its environment and the options --enable-scale-out "
                "--worker-extension-cls trainkit_vllm.worker.WorkerExtension"
            ) from error
        return found

    def load(self, directory: Path, tag: str, adapter: bool) -> None:
        """Load the weights or the adapter in ``directory`` between two requests, and call them ``tag``.

        Raises:
            EngineError: the server refused, or its prefix cache may hold what the earlier weights computed.
        """
        self.post("/pause?mode=wait")  # all requests have been answered; a server of several users may have others
        try:
            self.post("/update_weight_version", {"new_version": PARTIAL})
            if adapter:
                path = {"lora_name": ADAPTER, "lora_path": str(directory), "load_inplace": True}
                self.post("/v1/load_lora_adapter", path)
            else:
                self.post("/collective_rpc", {"method": "trainkit_load", "args": [str(directory)]})
            if self.post("/reset_prefix_cache") != {"success": True}:
                raise EngineError(
                    f"the engine {self} did not clear its prefix cache after new weights were loaded: its next "
                    "responses could depend on the earlier weights"
                )
            self.post("/update_weight_version", {"new_version": tag})
        finally:
            self.post("/resume")

    def generate(self, query: Sequence[int], parameters: Mapping[str, Any], adapter: bool) -> Answer:
        """Return the response to ``query``, sampled with vLLM's ``parameters``.

        Raises:
            EngineError: as `post`; or the answer lacks something.
        """
        body: dict[str, Any] = {"token_ids": list(query), "sampling_params": dict(parameters)}
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
