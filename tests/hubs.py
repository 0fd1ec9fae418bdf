"""The fake hub, served: the one that this process publishes on, and one with a storage of Xet."""

import hashlib
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from huggingface_hub import constants

from fake_hub import Call, Hub


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Answer calls in a thread inside the block."""
    with hub:
        thread = threading.Thread(target=hub.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


@contextmanager
def served_hub(patch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve the hub that this process publishes on, without Xet, and set a token."""
    with serving(Hub()) as hub, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Use 'content=<...>'", DeprecationWarning)  # of huggingface_hub's httpx
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setenv("HF_TOKEN", "hf_canary")
        yield hub


class XetHub(Hub):
    """A hub to which weights are sent as blocks of chunks; whether it has one is asked first."""

    def __init__(self) -> None:
        super().__init__()
        self.RequestHandlerClass = XetCall
        self.blocks: set[str] = set()


class XetCall(Call):
    def reply(self, hub: Any, path: list[str], body: bytes) -> Any:
        if path[4:5] == ["xet-write-token"]:
            return {"casUrl": hub.url, "accessToken": "storage", "exp": 10**10}
        if path[:2] == ["v1", "xorb-grants"]:
            return {} if path[3] in hub.blocks else None  # it has arrived, or is to be sent
        if path[:2] == ["v1", "xorbs"]:
            hub.blocks.add(path[3])
            content = b"".join(chunks(body))  # of one file: the export has only one that is large
            hub.blobs[hashlib.sha256(content).hexdigest()] = content
            return {"was_inserted": True}
        if path[:2] == ["v1", "shards"]:
            return {"result": 1}
        return None if path[0] in ("v1", "v2") else super().reply(hub, path, body)


def chunks(block: bytes) -> Any:
    """The chunks of a block: each after a version, its length, its compression, and its length without it."""
    at = 0
    while at < len(block):
        length, compression = int.from_bytes(block[at + 1 : at + 4], "little"), block[at + 4]
        assert compression == 0, "set HF_XET_DATA_XORB_COMPRESSION_POLICY=none"
        yield block[at + 8 : at + 8 + length]
        at += 8 + length
