"""A real HTTP server on loopback that judges as an OpenAI-compatible chat model does, by a rule."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Rule = Callable[[dict[str, str]], str]
"""The texts of a request by tag → the reply."""

Fault = int | str
"""An HTTP status, or the body of a response with status 200."""


def by_length(texts: dict[str, str]) -> str:
    """Prefers the longer answer, and grades by the number of words."""
    if "answer" in texts:
        return f"It has some words.\n**SCORE: {min(10, len(texts['answer'].split()))}**"
    first, second = (len(texts[name].split()) for name in ("answer_a", "answer_b"))
    verdict = "TIE" if first == second else "A" if first > second else "B"
    return f"One is longer, or not.\n\nVERDICT: {verdict}"


class JudgeServer(ThreadingHTTPServer):
    """Listens on a free port.

    Args:
        rule: what it says.
        faults: what its first requests get instead.
        api_key: what it wants as bearer; None: nothing.
    """

    daemon_threads = True

    def __init__(
        self, rule: Rule, *, faults: Sequence[Fault] = (), api_key: str | None = None
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.rule = rule
        self.faults = list(faults)
        self.api_key = api_key
        self.lock = threading.Lock()
        self.requests: list[tuple[dict[str, Any], dict[str, str]]] = []

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


@contextmanager
def judging(rule: Rule = by_length, **options: Any) -> Iterator[JudgeServer]:
    """A server inside the block."""
    with JudgeServer(rule, **options) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: JudgeServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self._has_key():
            self._send(404, {"detail": "this server lists no models"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append((body, dict(self.headers)))
            fault = self.server.faults.pop(0) if self.server.faults else None
        if not self._has_key():
            return
        if self.path != "/v1/chat/completions":
            self._send(404, {"error": {"message": "not here"}})
        elif isinstance(fault, int):
            self._send(fault, {"error": {"message": "a fault"}})
        elif fault is not None:
            self._write(200, fault.encode())
        else:
            texts = dict(re.findall(r"<(\w+)>\n(.*?)\n</\1>", body["messages"][1]["content"], re.S))
            message = {"role": "assistant", "content": self.server.rule(texts)}
            self._send(200, {"choices": [{"index": 0, "message": message}]})

    def _has_key(self) -> bool:
        wanted = self.server.api_key
        if wanted is None or self.headers["Authorization"] == f"Bearer {wanted}":
            return True
        self._send(401, {"error": {"message": f"wrong key {self.headers['Authorization']}"}})
        return False

    def _send(self, status: int, value: dict[str, Any]) -> None:
        self._write(status, json.dumps(value).encode())

    def _write(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if status == 429:
            self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(content)
