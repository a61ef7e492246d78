"""A real HTTP server on loopback that answers like the hub where files are sent to it or fetched.

It keeps what it is sent: repositories with their files, and every request.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

LARGE = (".safetensors", ".pt", ".png")
COMMIT = "c0ffee" * 6 + "c0ff"


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)


class Hub:
    """Use as a context manager.

    Args:
        token: what it wants as bearer.
        faults: method and a part of a path → the status that such requests get, and the reason.
        cards: model cards that it has, by the repository's name.
        ignored: names that a repository's .gitignore leaves out.
    """

    def __init__(
        self,
        token: str,
        *,
        faults: dict[tuple[str, str], tuple[int, str]] | None = None,
        ignored: frozenset[str] = frozenset(),
        cards: dict[str, str] | None = None,
    ) -> None:
        self.token = token
        self.faults = faults or {}
        self.ignored = ignored
        self.repositories: dict[str, Repository] = {}
        self.cards = cards or {}
        self.requests: list[tuple[str, str]] = []
        self.tokens: set[str | None] = set()
        self.large: dict[str, bytes] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.hub = self  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        return self.server.hub  # type: ignore[attr-defined, no-any-return]

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._handle("GET", b"")

    def do_HEAD(self) -> None:
        self._handle("HEAD", b"")

    def do_POST(self) -> None:
        self._handle("POST", self._body())

    def do_PUT(self) -> None:
        self._handle("PUT", self._body())

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _handle(self, method: str, body: bytes) -> None:
        path = self.path.split("?")[0]
        self.hub.requests.append((method, path))
        faults = [
            fault for key, fault in self.hub.faults.items() if method == key[0] and key[1] in path
        ]
        if faults:
            status, reason = faults[0]
            self._send(status, {"error": reason})
        elif path.startswith("/large/"):
            assert hashlib.sha256(body).hexdigest() == path.removeprefix("/large/")
            self.hub.large[path.removeprefix("/large/")] = body
            self._send(200, {})
        else:
            self._answer(method, path, body)

    def _answer(self, method: str, path: str, body: bytes) -> None:
        if path != "/api/agent-harnesses":  # a list that the client reads as anyone
            self.hub.tokens.add(self.headers.get("Authorization"))
        reads = method in {"GET", "HEAD"}
        if not reads and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._send(401, {"error": "Invalid username or password."})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._send(200, {"errors": [], "warnings": []})
        elif match := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            self._send(200, {"transfer": "basic", "objects": self._places(json.loads(body))})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/.*)?", path):
            self._model(match[1], match[2] or "", body)
        elif match := re.fullmatch(rf"/([^/]+/[^/]+)/resolve/{COMMIT}/(.+)", path):
            self._file(match[1], match[2])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/main/README\.md", path):
            self._card(match[1])
        else:
            self._send(404, {"error": "no such page"})

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted['organization']}/{wanted['name']}"
        url = {"url": f"{self.hub.url}/{name}"}
        if name in self.hub.repositories:
            self._send(409, {"error": "You already created this model repo", **url})
            return
        self.hub.repositories[name] = Repository(wanted.get("visibility") == "private")
        self._send(200, url)

    def _places(self, wanted: dict[str, Any]) -> list[dict[str, Any]]:
        return [
            {**each, "actions": {"upload": {"href": f"{self.hub.url}/large/{each['oid']}"}}}
            for each in wanted["objects"]
        ]

    def _model(self, name: str, rest: str, body: bytes) -> None:
        repository = self._readable(name)
        if repository is None:
            self._send(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif rest.startswith("/revision/") and rest not in {
            "/revision/main",
            f"/revision/{COMMIT}",
        }:
            self._send(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
        elif rest.startswith("/tree/"):
            self._send(200, [_entry(name, content) for name, content in repository.files.items()])
        elif rest.startswith("/preupload/"):
            asked = json.loads(body)["files"]
            self._send(200, {"files": [self._mode(file["path"]) for file in asked]})
        elif rest.startswith("/commit/"):
            self._commit(repository, body)
            url = f"{self.hub.url}/{name}/commit/{COMMIT}"
            self._send(200, {"success": True, "commitOid": COMMIT, "commitUrl": url})
        else:
            siblings = [{"rfilename": file} for file in repository.files]
            info = {"id": name, "private": repository.private, "sha": COMMIT}
            self._send(200, {**info, "siblings": siblings})

    def _readable(self, name: str) -> Repository | None:
        """The repository; a private one is there for its owner alone."""
        repository = self.hub.repositories.get(name)
        is_owner = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        return repository if repository is None or is_owner or not repository.private else None

    def _file(self, name: str, path: str) -> None:
        repository = self._readable(name)
        if repository is None or path not in repository.files:
            self._send(404, {"error": "no such file"}, {"X-Error-Code": "EntryNotFound"})
            return
        content = repository.files[path]
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        self._write(200, content, {**headers, "Content-Type": "application/octet-stream"})

    def _mode(self, path: str) -> dict[str, Any]:
        mode = "lfs" if path.endswith(LARGE) else "regular"
        return {"path": path, "uploadMode": mode, "shouldIgnore": path in self.hub.ignored}

    def _commit(self, repository: Repository, body: bytes) -> None:
        for line in body.decode().splitlines():
            entry = json.loads(line)
            value = entry["value"]
            match entry["key"]:
                case "header":
                    repository.messages.append(value["summary"])
                case "file":
                    repository.files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    repository.files[value["path"]] = self.hub.large[value["oid"]]
                case other:
                    raise AssertionError(other)

    def _card(self, name: str) -> None:
        if name not in self.hub.cards:
            self._send(404, {"error": "no card"}, {"X-Error-Code": "RepoNotFound"})
            return
        content = self.hub.cards[name].encode()
        headers = {"ETag": '"1"', "X-Repo-Commit": COMMIT, "Content-Type": "text/plain"}
        self._write(200, content, headers)

    def _send(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(value).encode()
        self._write(status, content, {"Content-Type": "application/json", **(headers or {})})

    def _write(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _entry(path: str, content: bytes) -> dict[str, Any]:
    """A file as a listing has it."""
    return {"type": "file", "path": path, "size": len(content), "oid": "0" * 40}
