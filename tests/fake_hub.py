"""A hub of Hugging Face on loopback: the calls that publishing a model makes. It keeps the files, and can fail."""

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
        body, call = self.rfile.read(int(self.headers.get("Content-Length", 0))), f"{self.command} {self.path}"
        self.server.calls.append((call, self.headers.get("Authorization", "")))
        if (status := self.server.fails(call)) != 0:
            found = None if status else self.reply(self.server, self.path.split("/")[1:], body)
            text = json.dumps({"error": "refused"} if found is None else found).encode()
            self.send_response(status or (404 if found is None else 200))
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    do_GET = do_PUT = do_POST

    def log_message(self, *_: Any) -> None: ...

    def reply(self, hub: Hub, path: list[str], body: bytes) -> Any:
        given = json.loads(body) if body and path[0] != "blobs" and "commit" not in path else {}
        if path == ["api", "repos", "create"]:
            id = f"{given['organization']}/{given['name']}"
            return {"url": f"{hub.url}/{id}", "kept": hub.repos.setdefault(id, given["visibility"])}
        if path[0] == "blobs" and hashlib.sha256(body).hexdigest() == path[1]:
            return {"bytes": len(hub.blobs.setdefault(path[1], body))}
        if path[-1] == "batch":
            new = [each for each in given["objects"] if each["oid"] not in hub.blobs]
            return {"objects": [o | {"actions": {"upload": {"href": f"{hub.url}/blobs/{o['oid']}"}}} for o in new]}
        if path[4:5] == ["preupload"]:
            modes = {f["path"]: "lfs" if "safetensors" in f["path"] else "regular" for f in given["files"]}
            return {"files": [{"path": f, "uploadMode": mode, "shouldIgnore": False} for f, mode in modes.items()]}
        if path[4:5] == ["commit"]:
            files = hub.files.setdefault(f"{path[2]}/{path[3]}@{path[5]}", {})
            for key, value in (json.loads(line).values() for line in body.splitlines()[1:]):
                files[value["path"]] = base64.b64decode(value["content"]) if key == "file" else hub.blobs[value["oid"]]
            return {"commitUrl": f"{hub.url}/{path[2]}/{path[3]}/commit/1", "commitOid": "0" * 40}
        if path[:2] == ["api", "models"] and (id := "/".join(path[2:])) in hub.repos:
            return {"id": id, "private": hub.repos[id] == "private"}
        return {} if "validate-yaml" in path or path[4:5] == ["branch"] else None
