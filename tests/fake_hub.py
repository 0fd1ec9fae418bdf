"""A hub of Hugging Face on loopback: the calls that publishing a model makes. It keeps the files, and can fail."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Call)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repos: dict[str, str] = {}  # visibility by id
        self.files: dict[str, dict[str, bytes]] = {}  # by id@branch
        self.blobs: dict[str, bytes] = {}  # by SHA-256
        self.calls: list[tuple[str, str]] = []  # with their tokens
        self.fails: Callable[[str], int | None] = lambda call: None  # the status to fail with; 0 cuts the connection


class Call(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        hub, body = self.server, self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub.calls.append((f"{self.command} {self.path}", self.headers.get("Authorization", "")))
        status = hub.fails(f"{self.command} {self.path}")
        if status == 0:
            return
        found = self.reply(hub, self.path.split("/")[1:], body) if status is None else {}
        text = json.dumps(found).encode()
        self.send_response(status or (404 if found is None else 200))
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_PUT = do_POST

    def log_message(self, *_: Any) -> None: ...

    def reply(self, hub: Hub, path: list[str], body: bytes) -> Any:
        if path == ["api", "repos", "create"]:
            given = json.loads(body)
            hub.repos.setdefault(id := f"{given['organization']}/{given['name']}", given["visibility"])
            return {"url": f"{hub.url}/{id}"}
        if path[0] == "blobs":
            assert hashlib.sha256(body).hexdigest() == path[1]
            hub.blobs[path[1]] = body
            return {} if path[-1] == "validate-yaml" or path[4:5] == ["branch"] else None
        if path[-1] == "batch":
            unknown = [each for each in json.loads(body)["objects"] if each["oid"] not in hub.blobs]
            return {
                "objects": [
                    each | {"actions": {"upload": {"href": f"{hub.url}/blobs/{each['oid']}"}}} for each in unknown
                ]
            }
        if path[4:5] == ["preupload"]:
            modes = {
                each["path"]: "lfs" if "safetensors" in each["path"] else "regular"
                for each in json.loads(body)["files"]
            }
            return {"files": [{"path": p, "uploadMode": mode, "shouldIgnore": False} for p, mode in modes.items()]}
        if path[4:5] == ["commit"]:
            files = hub.files.setdefault(f"{path[2]}/{path[3]}@{path[5]}", {})
            for key, value in (json.loads(line).values() for line in body.splitlines()[1:]):
                content = base64.b64decode(value["content"]) if key == "file" else hub.blobs[value["oid"]]
                files[value["path"]] = content
            return {"commitUrl": f"{hub.url}/{path[2]}/{path[3]}/commit/1", "commitOid": "0" * 40}
        if path[:2] == ["api", "models"]:
            return {"id": f"{path[2]}/{path[3]}", "private": hub.repos[f"{path[2]}/{path[3]}"] == "private"}
        return {} if path[-1] == "validate-yaml" or path[4:5] == ["branch"] else None
