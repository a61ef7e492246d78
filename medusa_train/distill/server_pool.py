"""Which server gets the next request: free slots, pauses, servers that leave and come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from medusa_train.console import format_seconds, log, warn
from medusa_train.distill.server_api import ServerForm
from medusa_train.distill.server_http import AttemptError, StoppedError
from medusa_train.errors import MedusaTrainError

# Errors in a row, of whatever prompts, after which a server leaves the pool.
FAILURES_TO_LEAVE = 5
MAX_INTERVAL = 60.0


@dataclass(slots=True, eq=False)
class Server:
    """One server and its state.

    Attributes:
        url: base URL, without secrets.
        form: how it is asked; None: it was never reached.
        is_up: whether it gets requests.
        is_out: whether it never will: it came up and cannot do what is needed.
        in_flight: requests that run on it.
        num_sent: requests that it was ever given.
        num_failures: errors since its last answer.
        num_departures: how often it left.
        paused_until: when it wants to be asked again, on the monotonic clock.
        interval: seconds between this try to reach it and the next.
        next_try: when it is tried again.
    """

    url: str
    form: ServerForm | None = None
    is_up: bool = False
    is_out: bool = False
    in_flight: int = 0
    num_sent: int = 0
    num_failures: int = 0
    num_departures: int = 0
    paused_until: float = 0.0
    interval: float = 0.0
    next_try: float = 0.0


@dataclass(frozen=True, slots=True)
class Lease:
    """A slot of a server for one request."""

    server: Server
    form: ServerForm
    num_departures: int


class ServerPool:
    """Hands slots of live servers to many threads.

    Args:
        servers: those with a form are up.
        concurrency: slots of each.
        check: asks a server again what it can do; raises as a probe does.
        ping: whether a server answers anything at all.
        stopped: set when waiting is to end.
        interval: seconds before a server that left is tried again; doubles from try to try.
        give_up_after: seconds without any server after which waiting ends.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        *,
        concurrency: int,
        check: Callable[[Server], ServerForm],
        ping: Callable[[Server], bool],
        stopped: threading.Event,
        interval: float,
        give_up_after: float,
    ) -> None:
        self._servers = list(servers)
        self._concurrency = concurrency
        self._check = check
        self._ping = ping
        self._stopped = stopped
        self._interval = interval
        self._give_up_after = give_up_after
        self._changed = threading.Condition()
        self._none_since = time.monotonic()
        self._watcher: threading.Thread | None = None
        with self._changed:
            for server in self._servers:
                server.is_up = server.form is not None
                server.interval = interval
                server.next_try = time.monotonic() + interval
            self._watch_if_needed()

    @contextmanager
    def slot(self) -> Iterator[Lease]:
        """A slot of the server with the fewest requests, as soon as there is one.

        Raises:
            MedusaTrainError: no server has been up for too long.
            StoppedError: waiting was ended.
        """
        lease = self._acquire()
        try:
            yield lease
        finally:
            with self._changed:
                lease.server.in_flight -= 1
                self._changed.notify_all()

    def succeeded(self, lease: Lease) -> None:
        """The server answered."""
        with self._changed:
            lease.server.num_failures = 0
            lease.server.interval = self._interval

    def failed(self, lease: Lease, error: AttemptError) -> bool:
        """The server did not answer; whether that counts against the prompt.

        It does not where the server is gone: the prompt just goes to another one.
        """
        server = lease.server
        is_gone = error.blame == "unreachable" or (
            error.blame == "dropped" and not self._ping(server)
        )
        with self._changed:
            if server.num_departures != lease.num_departures:
                return error.blame in {"busy", "answer"}
            if error.retry_after is not None:
                pause = min(error.retry_after, self._give_up_after)
                server.paused_until = max(server.paused_until, time.monotonic() + pause)
            if error.blame in {"dropped", "fault"}:
                server.num_failures += 1
            if is_gone or server.num_failures >= FAILURES_TO_LEAVE:
                self._leave(server, error)
            return not is_gone

    def wake(self) -> None:
        """Let all who wait look whether they are to stop."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread that tries servers again; ``stopped`` must be set."""
        self.wake()
        watcher = self._watcher
        if watcher is not None:
            watcher.join()

    def _acquire(self) -> Lease:
        with self._changed:
            while True:
                if self._stopped.is_set():
                    raise StoppedError
                now = time.monotonic()
                up = [server for server in self._servers if server.is_up]
                if not up:
                    self._check_hope(now)
                free = [server for server in up if server.in_flight < self._concurrency]
                ready = [server for server in free if server.paused_until <= now]
                if ready:
                    return self._lease(ready)
                times = [server.paused_until for server in free]
                if not up:
                    times.append(self._none_since + self._give_up_after)
                self._changed.wait(max(0.0, min(times) - now) if times else None)

    def _lease(self, ready: Sequence[Server]) -> Lease:
        server = min(ready, key=lambda server: (server.in_flight, server.num_sent))
        server.in_flight += 1
        server.num_sent += 1
        assert server.form is not None
        return Lease(server, server.form, server.num_departures)

    def _check_hope(self, now: float) -> None:
        """Raise when no server is left, or none has been up for too long."""
        waited = now - self._none_since
        if waited < self._give_up_after and not all(server.is_out for server in self._servers):
            return
        names = ", ".join(server.url for server in self._servers)
        raise MedusaTrainError(
            f"no server has answered for {format_seconds(waited)} ({names}); what was written is "
            "kept: start a server and run the same command again to go on"
        )

    def _leave(self, server: Server, error: AttemptError) -> None:
        warn(f"{error.detail}; the server leaves the pool and is tried again from time to time")
        server.is_up = False
        server.num_departures += 1
        server.num_failures = 0
        server.next_try = time.monotonic() + server.interval
        if not any(other.is_up for other in self._servers):
            self._none_since = time.monotonic()
        self._watch_if_needed()
        self._changed.notify_all()

    def _watch_if_needed(self) -> None:
        if self._watcher is None and any(not server.is_up for server in self._servers):
            self._watcher = threading.Thread(target=self._watch, name="servers", daemon=True)
            self._watcher.start()

    def _watch(self) -> None:
        """Try the servers that are down until none is."""
        while True:
            with self._changed:
                down = [s for s in self._servers if not s.is_up and not s.is_out]
                if self._stopped.is_set() or not down:
                    self._watcher = None
                    return
                server = min(down, key=lambda server: server.next_try)
                wait = server.next_try - time.monotonic()
                if wait > 0:
                    self._changed.wait(wait)
                    continue
            self._try_again(server)

    def _try_again(self, server: Server) -> None:
        try:
            form = self._check(server)
        except AttemptError:
            with self._changed:
                server.next_try = time.monotonic() + server.interval
        except StoppedError:
            return
        except MedusaTrainError as error:
            warn(f"{error}; the server is left out")
            with self._changed:
                server.is_out = True
                self._changed.notify_all()
        else:
            log(f"{server.url}: the server is in the pool again")
            with self._changed:
                server.form = form
                server.is_up = True
                server.paused_until = 0.0
                self._changed.notify_all()
        with self._changed:
            # Until it answers a prompt, however often it comes back.
            server.interval = min(2 * server.interval, MAX_INTERVAL)
