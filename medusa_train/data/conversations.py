"""The data set of the toolkit: conversations with exact token ids and assistant spans.

A data set is a directory with ``conversations.jsonl`` (one :class:`Conversation` a line, in one
canonical form, so that equal data are equal bytes) and ``manifest.json`` (what made it). Rows are
not padded and not packed: a batch is padded by length where it is made, see ``examples.py``.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from medusa_train.errors import InputError, InputErrors
from medusa_train.json_values import fingerprint, read_json
from medusa_train.run_dir import atomic_path, write_json

SCHEMA_VERSION = 1
CONVERSATIONS_FILE = "conversations.jsonl"
MANIFEST_FILE = "manifest.json"
FINISH_REASONS = ("stop", "length", "given")
MAX_ERRORS = 20


@dataclass(frozen=True, slots=True)
class Conversation:
    """One row of a data set.

    Attributes:
        id: a hash that names the row; unique within a data set.
        source: where it came from: ``magpie``, or the name of a file.
        messages: the turns as ``role``/``content`` mappings; empty for plain text.
        input_ids: the very ids that the model saw and wrote.
        assistant_spans: half-open ``[start, end)`` ranges of the assistant's tokens, in order; the
            end-of-turn token is the last one of a span where the model wrote it.
        finish_reasons: one per span: ``stop``, ``length`` (cut), or ``given`` (imported text).
        sampling: how the answers were drawn; None for imported data.
        retokenised: whether an answer's ids had to be made from its text alone.
    """

    id: str
    source: str
    messages: tuple[Mapping[str, Any], ...]
    input_ids: tuple[int, ...]
    assistant_spans: tuple[tuple[int, int], ...]
    finish_reasons: tuple[str, ...]
    sampling: Mapping[str, Any] | None = None
    retokenised: bool = False

    @property
    def num_supervised(self) -> int:
        """The number of the assistant's tokens."""
        return sum(end - start for start, end in self.assistant_spans)


def to_line(conversation: Conversation) -> str:
    """The one JSON form of a row: keys in a fixed order, no spaces, a newline at the end.

    Only a message's role and content have fixed places: templates render the fields of tool calls
    in the order that they have, so another order would be another text.
    """
    sampling = conversation.sampling
    row = {
        "assistant_spans": conversation.assistant_spans,
        "finish_reasons": conversation.finish_reasons,
        "id": conversation.id,
        "input_ids": conversation.input_ids,
        "messages": [_ordered(message) for message in conversation.messages],
        "retokenised": conversation.retokenised,
        "sampling": None if sampling is None else dict(sorted(sampling.items())),
        "source": conversation.source,
    }
    text = json.dumps(row, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text + "\n"


def write_conversations(path: Path, rows: Iterable[Conversation]) -> int:
    """Write rows to the file ``path`` atomically; equal rows give equal bytes.

    Returns:
        The number of rows.
    """
    count = 0
    with (
        atomic_path(path) as temporary,
        temporary.open("w", encoding="utf-8", newline="\n") as file,
    ):
        for row in rows:
            file.write(to_line(row))
            count += 1
    return count


def iterate_conversations(path: Path) -> Iterator[Conversation]:
    """Read rows of the file ``path`` one by one, strictly.

    Raises:
        InputError: the file is missing, or a line is no row; names the line.
    """
    shared: dict[int, int] = {}
    for line_number, line in _lines(path):
        try:
            yield from_line(line, shared=shared)
        except ValueError as error:
            raise InputError(f"{path}:{line_number}: {error}") from error


def read_conversations(directory: Path) -> list[Conversation]:
    """Read every row of a data set directory.

    Raises:
        InputErrors: lines that are no rows, and ids that occur twice, with their line numbers.
    """
    path = directory / CONVERSATIONS_FILE
    rows: list[Conversation] = []
    lines_of_ids: dict[str, int] = {}
    errors: list[str] = []
    shared: dict[int, int] = {}
    for line_number, line in _lines(path):
        try:
            row = from_line(line, shared=shared)
        except ValueError as error:
            errors.append(f"{path}:{line_number}: {error}")
            continue
        first = lines_of_ids.setdefault(row.id, line_number)
        if first != line_number:
            errors.append(f"{path}:{line_number}: id {row.id!r} is also the id of line {first}")
        rows.append(row)
    if errors:
        raise InputErrors(limit_errors(errors, of=path))
    return rows


def limit_errors(errors: Sequence[str], *, of: Path) -> list[str]:
    """The first errors, and a line that says how many more there are."""
    shown = list(errors[:MAX_ERRORS])
    if len(errors) > MAX_ERRORS:
        shown.append(f"{of}: {len(errors) - MAX_ERRORS} more errors like these")
    return shown


def write_dataset(
    directory: Path,
    rows: Iterable[Conversation],
    *,
    manifest: Mapping[str, Any] | Callable[[], Mapping[str, Any]],
) -> int:
    """Write a data set directory; the manifest comes last, so that its presence means complete.

    ``manifest`` gives what made the data (a function: called when all rows are written);
    ``schema_version`` and the counts are added here.

    Returns:
        The number of rows.
    """
    num_supervised = 0

    def counted() -> Iterator[Conversation]:
        nonlocal num_supervised
        for row in rows:
            num_supervised += row.num_supervised
            yield row

    count = write_conversations(directory / CONVERSATIONS_FILE, counted())
    counts = {"num_conversations": count, "num_supervised_tokens": num_supervised}
    facts = manifest() if callable(manifest) else manifest
    write_json(directory / MANIFEST_FILE, {"schema_version": SCHEMA_VERSION, **facts, **counts})
    return count


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a data set directory.

    Raises:
        InputError: it is missing, no JSON object, or of another schema version.
    """
    path = directory / MANIFEST_FILE
    manifest = read_json(path)
    if not isinstance(manifest, dict):
        raise InputError(f"{path}: must be a JSON object, got {type(manifest).__name__}")
    version = manifest.get("schema_version")
    if version != SCHEMA_VERSION:
        raise InputError(
            f"{path}: schema_version: must be {SCHEMA_VERSION}, got {version!r}; make it again"
        )
    return manifest


def is_dataset(path: Path) -> bool:
    """Whether ``path`` is a data set directory (complete or not)."""
    return path.is_dir() and (path / CONVERSATIONS_FILE).exists()


def truncate(conversation: Conversation, max_length: int) -> Conversation | None:
    """Cut a row to ``max_length`` tokens, never inventing an end of turn.

    A span that is cut has the finish reason ``length``. Split the rows into train and eval before
    you truncate them: :func:`split_of` hashes the ids of plain text.

    Returns:
        The row, or None when no supervised token is left.
    """
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}")
    if len(conversation.input_ids) <= max_length:
        return conversation if conversation.num_supervised else None
    spans: list[tuple[int, int]] = []
    reasons: list[str] = []
    for (start, end), reason in zip(
        conversation.assistant_spans, conversation.finish_reasons, strict=True
    ):
        if start >= max_length:
            break
        spans.append((start, min(end, max_length)))
        reasons.append(reason if end <= max_length else "length")
    if not spans:
        return None
    return replace(
        conversation,
        input_ids=conversation.input_ids[:max_length],
        assistant_spans=tuple(spans),
        finish_reasons=tuple(reasons),
    )


def split_of(conversation: Conversation, *, eval_fraction: float) -> Literal["train", "eval"]:
    """The side of a row, by a hash of its normalised first user turn (of plain text: of its ids).

    So all answers to one prompt are on one side.
    """
    user = next((m.get("content") for m in conversation.messages if m.get("role") == "user"), None)
    key = " ".join(map(str, conversation.input_ids)) if user is None else normalised_text(str(user))
    digest = hashlib.sha256(key.encode()).digest()
    position = int.from_bytes(digest[:8], "big") / 2**64
    return "eval" if position < eval_fraction else "train"


def normalised_text(text: str) -> str:
    """What is the same prompt: Unicode NFKC, case folded, white space collapsed."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def share_ids(ids: Sequence[int], shared: dict[int, int]) -> tuple[int, ...]:
    """``ids`` with one int object per token id not per position: a quarter of the memory."""
    return tuple(map(shared.setdefault, ids, ids))


def content_id(source: str, *, messages: Sequence[Mapping[str, Any]], ids: Sequence[int]) -> str:
    """The id of an imported row: a hash of its source and content."""
    return fingerprint([source, list(messages), list(ids)])


def check_token_ids(rows: Iterable[Conversation], *, vocab_size: int, path: Path) -> None:
    """Refuse ids that are no tokens of the model.

    Args:
        rows: the rows of ``path``, in its order.
        vocab_size: the number of the tokenizer's ids; ``lm_head`` may have more rows than that.
        path: the file that the rows came from, for the message.

    Raises:
        InputErrors: names the row number of each such row.
    """
    errors = []
    for number, row in enumerate(rows, start=1):
        worst = max(row.input_ids, default=0)
        if worst >= vocab_size:
            errors.append(
                f"{path}:{number}: row {number} (id {row.id}): token id {worst} is not in the "
                f"base model's vocabulary of {vocab_size}; make the data with its tokenizer"
            )
    if errors:
        raise InputErrors(limit_errors(errors, of=path))


def check_supervised(rows: Iterable[Conversation], *, where: str, why: str = "") -> None:
    """Refuse data in which there is nothing to learn.

    Raises:
        InputError: the rows hold 0 supervised tokens.
    """
    if not any(row.num_supervised for row in rows):
        raise InputError(
            f"{where}: 0 supervised tokens{': ' + why if why else ''}; "
            "every conversation needs an answer of the assistant within the maximal length"
        )


def _ordered(message: Mapping[str, Any]) -> dict[str, Any]:
    first = {key: message[key] for key in ("role", "content") if key in message}
    return {**first, **message}


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            yield from enumerate(file, start=1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error


_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "id": str,
    "source": str,
    "messages": list,
    "input_ids": list,
    "assistant_spans": list,
    "finish_reasons": list,
    "sampling": (dict, type(None)),
    "retokenised": bool,
}


def from_line(line: bytes, *, shared: dict[int, int] | None = None) -> Conversation:
    """Parse what :func:`to_line` wrote, strictly.

    Args:
        line: UTF-8 JSON.
        shared: the int objects of the token ids of earlier lines, to be used again.

    Raises:
        ValueError: says what is wrong with the line.
    """
    try:
        value = json.loads(line.decode("utf-8"))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"a row must be a JSON object, got {type(value).__name__}")
    if missing := _TYPES.keys() - value.keys():
        raise ValueError(f"missing key {sorted(missing)[0]!r}")
    if surplus := value.keys() - _TYPES.keys():
        raise ValueError(f"unknown key {sorted(surplus)[0]!r}")
    for key, kind in _TYPES.items():
        if not isinstance(value[key], kind):
            raise ValueError(f"{key}: wrong type {type(value[key]).__name__}")
    ids = value["input_ids"]
    if not ids or set(map(type, ids)) != {int} or min(ids) < 0:
        raise ValueError("input_ids: must be a list of one or more token ids of at least 0")
    if not all(isinstance(message, dict) for message in value["messages"]):
        raise ValueError("messages: each must be a JSON object")
    spans = _checked_spans(value["assistant_spans"], len(ids))
    reasons = tuple(value["finish_reasons"])
    if len(reasons) != len(spans) or not set(reasons) <= set(FINISH_REASONS):
        raise ValueError(
            f"finish_reasons: must have one of {', '.join(FINISH_REASONS)} for each of "
            f"{len(spans)} spans, got {list(reasons)}"
        )
    return Conversation(
        id=value["id"],
        source=value["source"],
        messages=tuple(value["messages"]),
        input_ids=tuple(ids) if shared is None else share_ids(ids, shared),
        assistant_spans=spans,
        finish_reasons=reasons,
        sampling=value["sampling"],
        retokenised=value["retokenised"],
    )


def _checked_spans(value: Sequence[Any], length: int) -> tuple[tuple[int, int], ...]:
    spans = []
    for item in value:
        if not (isinstance(item, list) and len(item) == 2 and set(map(type, item)) == {int}):
            raise ValueError(f"assistant_spans: must be pairs of positions, got {item!r}")
        spans.append((item[0], item[1]))
    if any(not 0 <= start < end <= length for start, end in spans) or any(
        before[1] > after[0] for before, after in pairwise(spans)
    ):
        raise ValueError(
            f"assistant_spans: must be ascending, not overlapping, not empty and within "
            f"{length} tokens, got {value}"
        )
    return tuple(spans)
