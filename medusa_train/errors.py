"""The errors that a user meets. Standard library only, so that an export can ship this file.

Everything raised on purpose derives from :class:`MedusaTrainError`; the command line prints its
message on one line of stderr and exits with :attr:`MedusaTrainError.exit_code`. Anything else that
escapes is a bug and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Sequence

INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM."""


class MedusaTrainError(Exception):
    """A run failed for a known reason (exit code 1)."""

    exit_code: int = 1

    @property
    def lines(self) -> Sequence[str]:
        """One line per error: where, what, got what, how to fix it."""
        return [str(self)]


class InputError(MedusaTrainError):
    """The user's input is wrong and nothing was computed (exit code 2)."""

    exit_code: int = 2


class ArgumentError(InputError, ValueError):
    """An argument of a call from Python means nothing: what ``generate`` and trees raise.

    It is a ``ValueError`` too, the one that callers of an export can name without this package.
    """


class InputErrors(InputError):
    """Several input errors found in one pass, reported together."""

    def __init__(self, messages: Sequence[str]) -> None:
        if not messages:
            raise ValueError("InputErrors needs at least one message")
        super().__init__("\n".join(messages))
        self.messages = tuple(messages)

    @property
    def lines(self) -> Sequence[str]:
        return self.messages
