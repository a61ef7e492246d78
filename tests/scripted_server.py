"""A real HTTP server on loopback that answers like vLLM, SGLang, TGI or `transformers serve`.

Its answers depend on the prompt alone (with a temperature, on the seed too); faults come from a
script: ``{"text in the prompt": ["500", "hang"]}`` gives the first two requests for such a prompt
these faults, ``itertools.repeat("400")`` gives them to all.

Faults: an HTTP status (``429`` and ``503`` with the server's ``retry_after``), ``hang`` (no answer
for ``hang_seconds``), ``cut`` (the connection ends within the answer), ``malformed`` (no JSON),
``no ids``, ``empty``, ``length``, ``no end`` (the stop id is left out of the ids), ``few`` (too few
log-probabilities), ``strange`` (another finish reason), ``die`` (the whole server stops), ``drip``
(white space now and then, and no end), ``302`` (a redirect to another page), ``echo`` (the prompt
before the answer), ``foreign logprobs`` (of tokens that there are not).
"""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, Self

from transformers import PreTrainedTokenizerBase

WORDS = ("the", "sea", "is", "wide", "blue", "a", "metal", "river", "colour", "green")
OPENAI_FIELDS = frozenset(
    {"model", "prompt", "max_tokens", "temperature", "top_p", "seed", "stop", "logprobs", "n"}
)

_CONTENTS = {
    "malformed": b"<html>gateway</html>",
    "deep": b"[" * 100_000,
    "digits": b'{"choices": ' + b"1" * 5000 + b"}",
}

Style = Literal["vllm", "sglang", "ids-only-in", "text", "transformers", "tgi"]


class ScriptedServer:
    """Use as a context manager; :meth:`stop` and :meth:`start` keep the port.

    Args:
        tokenizer: of the model that it pretends to serve.
        stop_id: the token that ends its answers.
        style: whose interface it speaks.
        faults: see the module's text.
        models: ids that it lists.
        api_key: what it wants as bearer; None: nothing.
        retry_after: the header of its 429 and 503.
        hang_seconds: how long it hangs.
        delay: seconds that each answer takes.
        refused_fields: fields that it answers with 422, besides its style's.
        max_model_len: what it says of its model.
        owner: whose it says it is; None: its style's.
        said: goes behind what it says of an error.
        fixed_temperature: with which it draws, whatever it is sent.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_id: int,
        style: Style = "vllm",
        faults: dict[str, Iterable[str]] | None = None,
        models: Sequence[str] = ("tiny",),
        api_key: str | None = None,
        retry_after: str | None = None,
        hang_seconds: float = 5.0,
        delay: float = 0.0,
        refused_fields: frozenset[str] = frozenset(),
        max_model_len: int | None = None,
        owner: str | None = None,
        said: str = "",
        fixed_temperature: float | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_id = stop_id
        self.style = style
        self.models = list(models)
        self.api_key = api_key
        self.retry_after = retry_after
        self.hang_seconds = hang_seconds
        self.delay = delay
        self.refused_fields = refused_fields
        self.max_model_len = max_model_len
        self.owner = owner or style
        self.said = said
        self.fixed_temperature = fixed_temperature
        self.lock = threading.Lock()
        self.requests: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.num_running = self.most_running = 0
        self.stopping = threading.Event()
        self._faults: dict[str, Iterator[str]] = {k: iter(v) for k, v in (faults or {}).items()}
        self._port = 0
        self._server: _Server | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Its base URL, which stays the same."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def prompts(self) -> list[dict[str, Any]]:
        """The bodies of all requests but those for one token, with which clients look around."""
        return [body for path, body, _ in self.requests if path != "GET" and not _is_probe(body)]

    def start(self) -> None:
        """Listen, on the port of before if there is one."""
        self.stopping.clear()
        self._server = _Server(("127.0.0.1", self._port), _Handler)
        self._server.script = self
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Refuse connections and cut those that there are."""
        with self.lock:
            server, self._server = self._server, None
        if server is not None:
            self.stopping.set()
            server.shutdown()
            server.server_close()
            server.cut_all()

    def die(self) -> None:
        """:meth:`stop`, from a request's own thread."""
        threading.Thread(target=self.stop, daemon=True).start()
        self.stopping.wait(5)

    def answer_ids(
        self, prompt_ids: Sequence[int], *, seed: int | None = None, max_tokens: int = 1000
    ) -> tuple[int, ...]:
        """What it answers; the stop id is the last one unless it was cut."""
        digest = hashlib.sha256(json.dumps([list(prompt_ids), seed]).encode()).digest()
        words = [WORDS[byte % len(WORDS)] for byte in digest[: 3 + digest[0] % 6]]
        ids = self.tokenizer(" ".join(words), add_special_tokens=False)["input_ids"]
        return tuple([*ids, self.stop_id][:max_tokens])

    def fault_of(self, text: str) -> str | None:
        """The next fault of a prompt."""
        with self.lock:
            for key, faults in self._faults.items():
                if key in text:
                    return next(faults, None)
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64
    script: ScriptedServer

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.connections: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def cut_all(self) -> None:
        for connection in list(self.connections):
            _cut(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients go away; that is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        script = self.server.script
        script.requests.append(("GET", {}, dict(self.headers)))
        if not self._has_key():
            return
        if self.path != "/v1/models" or script.style == "tgi":
            if self.path == "/info" and script.style == "tgi":
                self._send(200, {"model_id": script.models[0]})
            else:
                self._send(404, {"detail": "Not Found"})
            return
        entry: dict[str, Any] = {"object": "model", "owned_by": script.owner}
        if script.max_model_len is not None:
            entry["max_model_len"] = script.max_model_len
        self._send(200, {"object": "list", "data": [{"id": m, **entry} for m in script.models]})

    def do_POST(self) -> None:
        script = self.server.script
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with script.lock:
            script.requests.append((self.path, body, dict(self.headers)))
            script.num_running += 1
            script.most_running = max(script.most_running, script.num_running)
        try:
            if self._has_key() and not self._refuses(body):
                self._answer(body)
        finally:
            with script.lock:
                script.num_running -= 1

    def _has_key(self) -> bool:
        script = self.server.script
        if script.api_key is None or self.headers["Authorization"] == f"Bearer {script.api_key}":
            return True
        given = self.headers["Authorization"]
        self._send(401, {"error": {"message": f"Incorrect API key provided: {given}"}})
        return False

    def _refuses(self, body: dict[str, Any]) -> bool:
        """Answer requests that a server of this style does not take."""
        script = self.server.script
        path = "/generate" if script.style == "tgi" else "/v1/completions"
        if self.path != path:
            status = 422 if script.style == "tgi" else 404
            self._send(status, {"error": "not here"})
        elif script.style == "tgi":
            return False
        elif body["model"] not in script.models:
            self._send(404, {"error": {"message": f"The model `{body['model']}` does not exist."}})
        elif unknown := sorted(set(body) & script.refused_fields | self._unknown(set(body))):
            detail = "Unexpected fields in the request" if script.style == "transformers" else "no"
            self._send(422, {"detail": f"{detail}: {unknown}"})
        elif isinstance(body["prompt"], list) and script.style in {"text", "transformers"}:
            self._send(400, {"detail": "prompt must be a string."})
        else:
            return False
        return True

    def _unknown(self, fields: set[str]) -> set[str]:
        match self.server.script.style:
            case "text":
                return fields - OPENAI_FIELDS
            case "transformers":
                return fields - OPENAI_FIELDS - {"generation_config"}
            case _:
                return set()

    def _answer(self, body: dict[str, Any]) -> None:
        script = self.server.script
        prompt = body["inputs"] if script.style == "tgi" else body["prompt"]
        # As servers do: the tokenizer's own BOS goes before a text.
        ids = script.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        fault = None if _is_probe(body) else script.fault_of(script.tokenizer.decode(ids))
        script.stopping.wait(script.delay)
        match fault:
            case "hang":
                script.stopping.wait(script.hang_seconds)
                self.close_connection = True
            case "cut":
                self._start(200, length=1000)
                self.wfile.write(b'{"choices": [')
                self.close_connection = True
            case "drip":
                self._drip()
            case "die":
                script.die()
                self.close_connection = True
            case "malformed":
                self._write(200, b"<html>gateway</html>")
            case "deep":
                self._write(200, b"[" * 100_000)
            case "digits":
                self._write(200, b'{"choices": ' + b"1" * 5000 + b"}")
            case str() if fault.isdigit():
                said = f"scripted {fault}" + script.said
                if fault == "400" and script.api_key is not None:
                    said += f" {script.api_key}"
                self._send(int(fault), {"error": {"message": said}})
            case _:
                self._send(200, self._reply(ids, body, fault))

    def _drip(self) -> None:
        self._start(200, length=1000)
        while not self.server.script.stopping.wait(0.05):
            self.wfile.write(b" ")
        self.close_connection = True

    def _reply(self, prompt: list[int], body: dict[str, Any], fault: str | None) -> dict[str, Any]:
        script = self.server.script
        options = body.get("parameters", body)
        limit = options.get("max_tokens", options.get("max_new_tokens"))
        draws = options.get("temperature", 0.0) > 0
        if script.fixed_temperature is not None:
            draws = script.fixed_temperature > 0
        ids = script.answer_ids(
            prompt, seed=options.get("seed") if draws else None, max_tokens=limit
        )
        changed = {"empty": (script.stop_id,), "length": ids[:2], "echo": (*prompt, *ids)}
        ids = changed.get(fault or "", ids)
        reason = "stop" if ids[-1] == script.stop_id else "length"
        text = script.tokenizer.decode([i for i in ids if i != script.stop_id])
        if fault == "no end":
            ids = ids[:-1]
        if fault in {"foreign ids", "huge ids"}:
            ids = (len(script.tokenizer) if fault == "foreign ids" else 2**40, *ids)
        if fault == "half a character":
            text = "\ud800"
        if script.style == "tgi":
            return {
                "generated_text": text,
                "details": {
                    "finish_reason": "eos_token" if reason == "stop" else "length",
                    "tokens": [{"id": token} for token in ids],
                },
            }
        if fault == "strange":
            reason = "abort"
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": reason}
        choice["stop_reason"] = None
        choice["logprobs"] = None
        if body.get("return_token_ids") and fault != "no ids" and script.style != "ids-only-in":
            choice["token_ids"] = list(ids)
        if (num := body.get("logprobs")) is not None and script.style in {"vllm", "sglang"}:
            first = len(script.tokenizer) if fault == "foreign logprobs" else 0
            choice["logprobs"] = self._logprobs([first + i for i in ids], num - (fault == "few"))
        return {"object": "text_completion", "model": body["model"], "choices": [choice]}

    def _logprobs(self, ids: Sequence[int], num: int) -> dict[str, Any]:
        rows = [top_logprobs(token, place=place, num=num) for place, token in enumerate(ids)]
        names = [{f"token_id:{i}": p for i, p in reversed(row.items())} for row in rows]
        if self.server.script.style == "sglang":  # gives texts only
            names = [{f"t{i}": p for i, p in row.items()} for row in rows]
        return {"top_logprobs": names, "tokens": [f"token_id:{i}" for i in ids]}

    def _send(self, status: int, value: dict[str, Any]) -> None:
        self._write(status, json.dumps(value).encode())

    def _write(self, status: int, content: bytes) -> None:
        self._start(status, length=len(content))
        self.wfile.write(content)

    def _start(self, status: int, *, length: int) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(length))
        if status in {429, 503} and (wait := self.server.script.retry_after) is not None:
            self.send_header("Retry-After", wait)
        if status == HTTPStatus.FOUND:
            self.send_header("Location", "http://login.example/")
        self.end_headers()


def top_logprobs(token: int, *, place: int, num: int) -> dict[int, float]:
    """The most likely ids at a place of an answer, the most likely first.

    At every third place the drawn token is not among them, and comes in addition, as in vLLM.
    """
    others = [token + 1 + n for n in range(num)]
    if place % 3 == 2:
        best = {other: -0.5 - n for n, other in enumerate(others)}
        return {**best, token: -9.0}
    return {token: -0.25, **{other: -1.5 - n for n, other in enumerate(others[: num - 1])}}


def _is_probe(body: dict[str, Any]) -> bool:
    options = body.get("parameters", body)
    return options.get("max_tokens", options.get("max_new_tokens")) == 1


def _cut(connection: socket.socket) -> None:
    with suppress(OSError):  # gone already
        connection.shutdown(socket.SHUT_RDWR)
