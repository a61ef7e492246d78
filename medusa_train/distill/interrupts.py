"""Ctrl-C and SIGTERM while a generation runs: the first asks it to finish what it is writing."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from medusa_train.console import log


class Interrupt:
    """Whether the user has asked for an end."""

    def __init__(self) -> None:
        self.is_asked = False

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """The first signal asks for an end, the second one does not wait for it."""
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        log(f"interrupted: finishing what is being written; {name} again stops at once")


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Catch SIGINT and SIGTERM inside the block; only a process's main thread can."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, interrupt.handle)
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
