"""Files to raw rows with their places: JSON Lines, JSON arrays, Parquet and plain text.

What a file is follows from what is in it where that is certain: a ``.json`` file may hold JSON
Lines, and a byte order mark is skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_train.errors import InputError

_BOM = b"\xef\xbb\xbf"
_PARQUET_BATCH = 256


@dataclass(frozen=True, slots=True)
class RawRow:
    """One row of a file.

    Attributes:
        location: ``file:line`` (Parquet: ``file:row``, from 1).
        value: the row; None when it could not be read.
        error: why it could not be read.
    """

    location: str
    value: Any
    error: str | None = None


def iterate_rows(path: Path) -> Iterator[RawRow]:
    """The rows of a file, one by one.

    Raises:
        InputError: the file is missing, of an unknown kind, or broken as a whole.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such file" if not path.exists() else f"{path}: not a file")
    match path.suffix.lower():
        case ".parquet":
            yield from _parquet_rows(path)
        case ".txt" | ".text" | ".md":
            yield RawRow(f"{path}:1", _decoded(path, path.read_bytes()))
        case ".jsonl" | ".ndjson":
            yield from _line_rows(path)
        case ".json":
            yield from _json_rows(path)
        case suffix:
            raise InputError(
                f"{path}: unknown kind of file {suffix!r}; give .jsonl, .json, .parquet or .txt"
            )


def iterate_lines(path: Path) -> Iterator[RawRow]:
    """The lines of a text file that are not blank, each a row of its own."""
    text = _decoded(path, path.read_bytes())
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield RawRow(f"{path}:{number}", line.strip())


def _line_rows(path: Path) -> Iterator[RawRow]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            content = line.removeprefix(_BOM) if number == 1 else line
            if not content.strip():
                continue
            location = f"{path}:{number}"
            try:
                yield RawRow(location, json.loads(content.decode("utf-8")))
            except (ValueError, RecursionError):  # also a wrong encoding, and brackets without end
                yield RawRow(location, None, "not valid JSON in UTF-8")


def _json_rows(path: Path) -> Iterator[RawRow]:
    """A JSON array, one JSON object over several lines, or JSON Lines under this name."""
    if _is_json_lines(path):
        yield from _line_rows(path)
        return
    text = _decoded(path, path.read_bytes())
    if not text.strip():
        return
    start = len(text) - len(text.lstrip())
    if text[start : start + 1] == "[":
        yield from _array_rows(path, text, start + 1)
        return
    with _json_errors(path):
        value = json.loads(text)
    yield RawRow(f"{path}:1", value)


def _is_json_lines(path: Path) -> bool:
    """Whether the first line that is not blank is a whole JSON object."""
    with path.open("rb") as file:
        for line in file:
            content = line.removeprefix(_BOM).strip()
            if not content:
                continue
            try:
                return isinstance(json.loads(content), dict)
            except (ValueError, RecursionError):
                return False
    return False


def _array_rows(path: Path, text: str, position: int) -> Iterator[RawRow]:
    """The elements of a JSON array, each with the line that it begins on."""
    decoder = json.JSONDecoder()
    line, counted = 1, 0
    needs_comma = False
    with _json_errors(path):
        while True:
            position = _skip_space(text, position)
            if text[position : position + 1] == "]":
                break
            if needs_comma:
                if text[position : position + 1] != ",":
                    raise json.JSONDecodeError("expected ',' or ']'", text, position)
                position = _skip_space(text, position + 1)
            line += text.count("\n", counted, position)
            counted = position
            value, position = decoder.raw_decode(text, position)
            needs_comma = True
            yield RawRow(f"{path}:{line}", value)
        rest = _skip_space(text, position + 1)
        if rest != len(text):
            raise json.JSONDecodeError("text after the array", text, rest)


@contextmanager
def _json_errors(path: Path) -> Iterator[None]:
    """What is wrong with a whole file of JSON, as an error of the input."""
    try:
        yield
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from error
    except ValueError as error:  # a number of thousands of digits
        raise InputError(f"{path}: not valid JSON: {error}") from error
    except RecursionError as error:
        raise InputError(f"{path}: not valid JSON: nested too deeply") from error


def _skip_space(text: str, position: int) -> int:
    while text[position : position + 1] in (" ", "\n", "\r", "\t"):
        position += 1
    return position


def _parquet_rows(path: Path) -> Iterator[RawRow]:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH):
                for value in batch.to_pylist():
                    number += 1
                    yield RawRow(f"{path}:{number}", value)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"{path}: not a Parquet file: {reason}") from error


def _decoded(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path}:{line}: not UTF-8 text: byte {error.start}; save it as UTF-8"
        ) from error
