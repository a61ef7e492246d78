"""What a generation has finished: one append-only file that a kill at any moment leaves readable.

A record is one unit of work: a header line, the rows of its conversations, a line each, and one
line of teacher log-probabilities for each row where they were asked for. A record counts when it
is whole; what a kill or a full disk cut short is removed when the file is opened again.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from medusa_train.data.conversations import Conversation, from_line, to_line
from medusa_train.errors import InputError, MedusaTrainError


@dataclass(frozen=True, slots=True)
class Failed:
    """A prompt that got no answer, and is asked again by the next run."""

    index: int
    source: str
    reason: str
    detail: str


@dataclass(slots=True)
class Unit:
    """The result of one unit of work.

    Attributes:
        number: of the unit.
        rows: what is kept, in the order of the prompts.
        teachers: for each row its log-probabilities as text; empty where none were asked for.
        dropped: prompts that are left out, by reason.
        shortened: conversations that end before their last turn, by reason.
        failed: prompts without an answer.
        num_drawn: prompts that the model wrote.
        num_usable: of those, the ones that could be asked.
        num_tokens: tokens written, those of dropped answers too.
        seconds: the time that it took.
    """

    number: int
    rows: list[Conversation] = field(default_factory=list)
    teachers: list[str] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    shortened: Counter[str] = field(default_factory=Counter)
    failed: list[Failed] = field(default_factory=list)
    num_drawn: int = 0
    num_usable: int = 0
    num_tokens: int = 0
    seconds: float = 0.0


class Journal:
    """The units that are finished; a context manager.

    Args:
        path: the file.
        writable: make it if it is missing, cut off what is torn, and append.

    Attributes:
        failed: units with prompts that have no answer.
        num_rows: of all records, like the counts below.
        num_drawn: prompts that the model wrote.
        num_usable: of those, the ones that could be asked.
        dropped: prompts that are left out, by reason.

    Raises:
        InputError: not writable, and there is no such file.
        MedusaTrainError: the file cannot be written, or is damaged before its end.
    """

    def __init__(self, path: Path, *, writable: bool = False) -> None:
        self.path = path
        # The last record of a unit counts: a failed prompt is asked again.
        self._offsets: dict[int, int] = {}
        self.failed: set[int] = set()
        self.num_rows = 0
        self.num_drawn = 0
        self.num_usable = 0
        self.dropped: Counter[str] = Counter()
        self._end = 0
        try:
            if writable:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = path.open("a+b" if writable else "rb")
            try:
                self._scan()
                if writable:
                    self._file.truncate(self._end)
            except BaseException:
                self._file.close()
                raise
        except FileNotFoundError as error:
            raise InputError(f"{path}: no such file") from error
        except OSError as error:
            raise MedusaTrainError(f"{path}: cannot be written: {error.strerror}") from error

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    @property
    def finished(self) -> frozenset[int]:
        """The units that need no more work."""
        return frozenset(self._offsets.keys() - self.failed)

    @property
    def size(self) -> int:
        """The bytes of all whole records."""
        return self._end

    def __contains__(self, number: int) -> bool:
        """Whether there is a record of this unit, with failed prompts or without."""
        return number in self._offsets

    def append(self, unit: Unit) -> None:
        """Add a unit, and see it on the disk.

        Raises:
            MedusaTrainError: it cannot be written (the disk is full, say); what was there stays.
        """
        header = _header(unit)
        text = json.dumps(header, ensure_ascii=False) + "\n"
        text += "".join(map(to_line, unit.rows))
        text += "".join(f"{line}\n" for line in unit.teachers)
        try:
            self._file.write(text.encode("utf-8", errors="surrogatepass"))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            self._file = self._reopened()
            raise MedusaTrainError(
                f"{self.path}: cannot be written: {error.strerror}; {len(self.finished)} finished "
                "units are kept: make room and run the same command again to go on"
            ) from error
        self._note(header)
        self._end = self._file.tell()

    def read(self, number: int) -> Unit:
        """The record of a unit."""
        self._file.seek(self._offsets[number])
        header = json.loads(self._file.readline())
        try:
            rows = [from_line(self._file.readline()) for _ in range(header.pop("num_rows"))]
        except ValueError as error:
            raise MedusaTrainError(self._damage(f"unit {number}: {error}")) from error
        num_teachers = header.pop("num_teachers")
        teachers = [self._file.readline().decode().rstrip("\n") for _ in range(num_teachers)]
        return Unit(
            number=header["unit"],
            rows=rows,
            teachers=teachers,
            dropped=Counter(header["dropped"]),
            shortened=Counter(header["shortened"]),
            failed=[Failed(**fault) for fault in header["failed"]],
            num_drawn=header["num_drawn"],
            num_usable=header["num_usable"],
            num_tokens=header["num_tokens"],
            seconds=header["seconds"],
        )

    def _note(self, header: Mapping[str, Any]) -> None:
        number = header["unit"]
        self._offsets[number] = self._end
        (self.failed.add if header["failed"] else self.failed.discard)(number)
        self.num_rows += header["num_rows"]
        self.num_drawn += header["num_drawn"]
        self.num_usable += header["num_usable"]
        self.dropped.update(header["dropped"])

    def _scan(self) -> None:
        """Find the whole records."""
        self._file.seek(0)
        for header, end in self._headers():
            self._note(header)
            self._end = end
        # What a kill cut short is the last record: none can follow it.
        self._file.seek(self._end)
        self._file.readline()
        if any(line.startswith(_HEADER_START) for line in self._file):
            raise MedusaTrainError(self._damage(f"byte {self._end} begins no record"))

    def _damage(self, what: str) -> str:
        return (
            f"{self.path}: damaged: {what}; restore the file, or remove it and run the generate "
            "command again"
        )

    def _headers(self) -> Iterator[tuple[dict[str, Any], int]]:
        while line := self._file.readline():
            if not line.endswith(b"\n"):
                return
            try:
                header = json.loads(line)
                num_lines = header["num_rows"] + header["num_teachers"]
            except (ValueError, KeyError, TypeError):
                return
            if not header.keys() >= _HEADER_KEYS:
                return
            for _ in range(num_lines):
                if not self._file.readline().endswith(b"\n"):
                    return
            yield header, self._file.tell()

    def _reopened(self) -> BinaryIO:
        """The file without the record that could not be written."""
        # Closing tries to write what is buffered again; the descriptor is closed all the same.
        with contextlib.suppress(OSError):
            self._file.close()
        os.truncate(self.path, self._end)
        return self.path.open("a+b")


_HEADER_START = b'{"unit": '
_HEADER_KEYS = frozenset(
    {"unit", "dropped", "shortened", "failed", "num_drawn", "num_usable", "num_tokens", "seconds"}
)


def _header(unit: Unit) -> dict[str, Any]:
    return {
        "unit": unit.number,
        "num_rows": len(unit.rows),
        "num_teachers": len(unit.teachers),
        "dropped": dict(sorted(unit.dropped.items())),
        "shortened": dict(sorted(unit.shortened.items())),
        "failed": [
            {"index": f.index, "source": f.source, "reason": f.reason, "detail": f.detail}
            for f in unit.failed
        ],
        "num_drawn": unit.num_drawn,
        "num_usable": unit.num_usable,
        "num_tokens": unit.num_tokens,
        "seconds": round(unit.seconds, 3),
    }
