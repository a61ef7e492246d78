"""Ctrl-C and SIGTERM during long work: the first asks for an end at the next good moment."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from medusa_train.console import log


class Interrupt:
    """Whether the user has asked for an end.

    Args:
        doing: what is still done after the first signal, for the message.
    """

    def __init__(self, doing: str) -> None:
        self.doing = doing
        self.is_asked = False

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """The first signal asks for an end, the second one does not wait for it."""
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        log(f"interrupted: {self.doing}; {name} again stops at once")


@contextmanager
def interruptible(doing: str = "finishing what is being written") -> Iterator[Interrupt]:
    """Catch SIGINT and SIGTERM inside the block; only a process's main thread can."""
    interrupt = Interrupt(doing)
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
