"""Requests to servers over HTTP: what came back, or why nothing did and whether to try again."""

from __future__ import annotations

import email.utils
import os
import socket
import threading
import time
from collections.abc import Mapping
from http import HTTPStatus
from types import TracebackType
from typing import Any, Literal, Self

import httpx

from medusa_train.errors import InputError, MedusaTrainError

SERVER_ERROR = "server error"
SERVER_BUSY = "server busy"
TIMEOUT = "timeout"
LOST_CONNECTION = "connection lost"
MALFORMED_ANSWER = "malformed answer"
REFUSED = "refused by the server"

CONNECT_TIMEOUT = 10.0
# Servers close idle connections after some seconds (uvicorn after 5); ours are gone before.
KEEPALIVE_SECONDS = 2.0
MAX_MESSAGE = 200
BUSY = {408, 409, 425, 429}
_WRONG_KEY = {401, 403}
# Syntax, encoding, numbers of thousands of digits; brackets without end.
_NO_JSON = (ValueError, RecursionError)
_READ = ("Content-Type", "Location", "Retry-After")
_CONNECTED = {"connection.connect_tcp.complete", "connection.start_tls.complete"}

Blame = Literal["unreachable", "dropped", "fault", "busy", "answer", "prompt"]


class AttemptError(Exception):
    """One request gave no answer.

    Attributes:
        reason: one of the reasons above.
        detail: what was met; holds nothing secret.
        blame: ``unreachable``: nobody listens; ``dropped``: the connection was cut;
            ``fault``: an error of the server, or its silence; ``busy``: it asks to wait;
            ``answer``: what it sent makes no sense; ``prompt``: it refuses this request for good.
        retry_after: seconds that the server asks to wait, or None.
    """

    def __init__(
        self, reason: str, detail: str, *, blame: Blame, retry_after: float | None = None
    ) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
        self.blame: Blame = blame
        self.retry_after = retry_after


class StoppedError(MedusaTrainError):
    """The writer was told to stop."""

    def __init__(self) -> None:
        super().__init__("stopped; run the same command again to go on")


def base_url(text: str) -> tuple[str, httpx.Auth | None]:
    """A server's base URL without ``/v1``, user and password, and these two.

    Raises:
        InputError: it is no URL of a server; does not repeat what may be secret.
    """
    shown = "the URL of a server" if "@" in text else repr(text)
    try:
        url = httpx.URL(text.strip())
        # What is looked up later; it refuses empty and endless parts of a name.
        host = url.host and url.raw_host.decode("ascii").encode("idna")
    except (httpx.InvalidURL, UnicodeError) as error:
        raise InputError(f"{shown}: not a URL") from error
    if url.scheme not in {"http", "https"} or not host or url.query or url.fragment:
        raise InputError(f"{shown}: not a base URL of a server, such as http://localhost:8000/v1")
    auth = httpx.BasicAuth(url.username, url.password) if url.userinfo else None
    plain = str(url.copy_with(userinfo=b"")).rstrip("/")
    return plain.removesuffix("/v1").rstrip("/"), auth


class Http:
    """One client for all servers and threads; knows the key and never says it.

    Args:
        timeout: seconds after which a request is given up, whatever has come of its answer.
        num_connections: requests that may run at once.
        api_key_env: environment variable with the key; servers without a key ignore it.
        auth: user and password of servers whose URL holds them.

    Raises:
        InputError: what the variable holds cannot be sent, or the variables for proxies and
            certificates make no sense.
    """

    def __init__(
        self,
        *,
        timeout: float,
        num_connections: int,
        api_key_env: str,
        auth: Mapping[str, httpx.Auth],
    ) -> None:
        self.stopped = threading.Event()
        self._api_key_env = api_key_env
        self._key = os.environ.get(api_key_env, "").strip()
        if not (self._key.isascii() and self._key.isprintable()):
            raise InputError(
                f"the environment variable {api_key_env}: holds characters that no API key has (a "
                "line break, say); set it anew"
            )
        self._auth = dict(auth)
        self._timeout = timeout
        self._sockets: set[socket.socket] = set()
        try:
            self._client = httpx.Client(
                timeout=httpx.Timeout(timeout, connect=min(timeout, CONNECT_TIMEOUT), pool=None),
                limits=httpx.Limits(
                    max_connections=None,
                    max_keepalive_connections=num_connections,
                    keepalive_expiry=KEEPALIVE_SECONDS,
                ),
                headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            )
        except (httpx.InvalidURL, ImportError, OSError, ValueError) as error:
            # Without what the error says: the URL of a proxy can hold a password.
            raise InputError(
                "the environment's settings for connections cannot be used "
                f"({type(error).__name__}); check HTTP_PROXY, HTTPS_PROXY, ALL_PROXY, NO_PROXY, "
                "SSL_CERT_FILE and SSL_CERT_DIR"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self.stop()
        self._client.close()

    def stop(self) -> None:
        """Cut every request that is under way; each raises, in its own thread."""
        self.stopped.set()
        for connection in list(self._sockets):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # closed already

    def send(self, url: str, path: str, *, body: Mapping[str, Any] | None) -> httpx.Response:
        """POST ``body`` as JSON, or GET without one; any status is a response.

        Args:
            url: base URL of the server, which is its name in messages too.
            path: below it.
            body: of the request.

        Raises:
            AttemptError: there is no response.
            StoppedError: :meth:`stop` was called.
        """
        if self.stopped.is_set():
            raise StoppedError
        try:
            return self._sent(url, path, body)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            attempt = AttemptError(LOST_CONNECTION, _said(url, error), blame="unreachable")
        except httpx.TimeoutException as error:
            attempt = AttemptError(TIMEOUT, _said(url, error), blame="fault")
        except httpx.HTTPError as error:
            attempt = AttemptError(LOST_CONNECTION, _said(url, error), blame="dropped")
        if self.stopped.is_set():
            raise StoppedError
        raise attempt

    def _sent(self, url: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        """The whole response; the client's own time-out begins anew with every byte."""
        end = time.monotonic() + self._timeout
        content = bytearray()
        with self._client.stream(
            "GET" if body is None else "POST",
            url + path,
            json=body,
            auth=self._auth.get(url, httpx.USE_CLIENT_DEFAULT),
            extensions={"trace": self._remember},
        ) as response:
            for part in response.iter_bytes():
                content += part
                if time.monotonic() > end:
                    raise httpx.ReadTimeout(f"no whole answer within {self._timeout:g} s")
        headers = {name: response.headers[name] for name in _READ if name in response.headers}
        return httpx.Response(response.status_code, headers=headers, content=bytes(content))

    def json(self, response: httpx.Response, *, url: str) -> dict[str, Any]:
        """The object in a good response.

        Raises:
            AttemptError: another status than 200, or no object; says whether to try again.
            InputError: no request can succeed: a wrong key, no such model or address, or another
                address.
        """
        self.check_access(response, url=url)
        status = response.status_code
        if status == HTTPStatus.OK:
            try:
                value = response.json()
            except _NO_JSON as error:
                detail = f"{url}: not JSON ({error})"
                raise AttemptError(MALFORMED_ANSWER, detail, blame="answer") from error
            if isinstance(value, dict):
                return value
            raise AttemptError(MALFORMED_ANSWER, f"{url}: not a JSON object", blame="answer")
        detail = f"{url}: {self.describe(response)}"
        if response.has_redirect_location:
            to = _one_line(response.headers["Location"])
            raise InputError(f"{detail}: redirects to {to!r}; give the base URL that is meant")
        if status == HTTPStatus.NOT_FOUND:
            raise InputError(f"{detail}; is it the base URL of an OpenAI-compatible server?")
        if status in BUSY or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            wait = _retry_after(response.headers.get("Retry-After"))
            is_busy = status in BUSY or wait is not None
            reason = SERVER_BUSY if is_busy else SERVER_ERROR
            blame: Blame = "busy" if is_busy else "fault"
            raise AttemptError(reason, detail, blame=blame, retry_after=wait)
        raise AttemptError(REFUSED, detail, blame="prompt")

    def check_access(self, response: httpx.Response, *, url: str) -> None:
        """Raise unless the server took our key, or wants none.

        Raises:
            InputError: it did not; names the environment variable.
        """
        if response.status_code in _WRONG_KEY:
            state = "is refused" if self._key else "is not set"
            raise InputError(
                f"{url}: HTTP {response.status_code}: the server wants an API key, and the one in "
                f"the environment variable {self._api_key_env} {state}"
            )

    def describe(self, response: httpx.Response) -> str:
        """Status and message of an error, on one short line, without the key."""
        text = _message(response)
        if self._key:
            text = text.replace(self._key, "***")
        text = _one_line(text)
        status = f"HTTP {response.status_code}"
        return f"{status}: {text}" if text else status

    def _remember(self, event: str, info: Mapping[str, Any]) -> None:
        """Keep each new connection's socket, so that :meth:`stop` can wake who waits for it."""
        if event not in _CONNECTED:
            return
        connection = info["return_value"].get_extra_info("socket")
        if isinstance(connection, socket.socket):
            closed = {known for known in list(self._sockets) if known.fileno() < 0}
            self._sockets -= closed
            self._sockets.add(connection)
        if self.stopped.is_set():
            self.stop()


def _one_line(text: str) -> str:
    """A short text without what a terminal would obey."""
    shown = "".join(c if c.isprintable() else " " for c in text[: 10 * MAX_MESSAGE])
    line = " ".join(shown.split())
    return line if len(line) <= MAX_MESSAGE else line[:MAX_MESSAGE] + "…"


def _said(url: str, error: httpx.HTTPError) -> str:
    text = str(error).strip() or type(error).__name__
    return f"{url}: {text}"


def _message(response: httpx.Response) -> str:
    """What servers say in ``error.message``, ``message``, ``detail`` or ``error``, or the body."""
    try:
        value = response.json()
    except _NO_JSON:
        return response.text
    if not isinstance(value, dict):
        return response.text
    error = value.get("error")
    found = error.get("message") if isinstance(error, dict) else error
    found = found or value.get("message") or value.get("detail")
    return found if isinstance(found, str) else response.text


def _retry_after(value: str | None) -> float | None:
    """Seconds from now; the header holds seconds or a date."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
        except ValueError:
            return None
    return max(0.0, seconds) if seconds < float("inf") else None
