"""The rank-0 log, progress and tables on stderr; the only output below ``cli/``.

On a terminal :func:`progress` draws a bar. Elsewhere (a log file, CI) it writes one line per
interval with the step, the total, the rate and the time left, so that a log stays readable.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

LINE_INTERVAL_SECONDS = 15.0


def stderr() -> Console:
    """A console on the current stderr; made per call so that redirection and tests just work."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def is_main_process() -> bool:
    """Whether this process is rank 0 of its job, as torchrun and the launchers tell it."""
    return process_index() == 0


def process_index() -> int:
    """The rank of this process; 0 is the main one."""
    text = os.environ.get("RANK", "0")
    # Anything else is no launcher's; the commands refuse it, and say so through here.
    return int(text) if text.isdecimal() else 0


def log(message: str) -> None:
    """Print one line of progress on stderr, on rank 0 only."""
    if is_main_process():
        stderr().print(escape(message))


def warn(message: str) -> None:
    """Print one warning on stderr, on rank 0 only."""
    if is_main_process():
        stderr().print(f"[yellow]warning:[/yellow] {escape(message)}")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table on stderr, on rank 0 only."""
    if is_main_process():
        stderr().print(make_table(title, columns, rows))


def make_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    """A table whose first column is text and whose other columns are right-aligned figures."""
    result = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        result.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        result.add_row(*(escape(str(cell)) for cell in row))
    return result


def format_seconds(seconds: float) -> str:
    """``75`` → ``1m15s``, ``3725`` → ``1h02m05s``."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    if hours:
        return f"{hours}h{minutes:02d}m{secs:02d}s"
    return f"{minutes}m{secs:02d}s" if minutes else f"{secs}s"


class ProgressReporter:
    """What :func:`progress` yields: call :meth:`update` with the work done."""

    def __init__(self, description: str, total: int, *, done: int, bar: Progress | None) -> None:
        self.description = description
        self.total = total
        self.done = done
        self._bar = bar
        self._start_done = done
        self._start = time.monotonic()
        self._last_line = self._start
        self._task = (
            bar.add_task(description, total=total, completed=done, detail="") if bar else None
        )

    def update(self, advance: int, *, detail: str = "") -> None:
        """Add ``advance`` to the work done; ``detail`` is shown behind the figures."""
        self.done += advance
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self.done, detail=escape(detail))
            return
        now = time.monotonic()
        finished = self.done >= self.total and advance > 0
        if now - self._last_line >= LINE_INTERVAL_SECONDS or finished:
            self._last_line = now
            self._line(now, detail)

    def _line(self, now: float, detail: str) -> None:
        elapsed = now - self._start
        worked = self.done - self._start_done
        left = (self.total - self.done) * elapsed / worked if worked else float("nan")
        eta = f"{format_seconds(left)} left" if worked else "time left unknown"
        parts = [f"{self.description}: {self.done}/{self.total}", detail, eta]
        log(", ".join(part for part in parts if part))


@contextmanager
def progress(description: str, total: int, *, done: int = 0) -> Iterator[ProgressReporter]:
    """Report progress of ``total`` units of work of which ``done`` were there already."""
    console = stderr()
    if not (is_main_process() and console.is_terminal):
        yield ProgressReporter(description, total, done=done, bar=None)
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}"),
        console=console,
    )
    with bar:
        yield ProgressReporter(description, total, done=done, bar=bar)
