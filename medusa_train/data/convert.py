"""Between our data set directories and the files that other tools read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from medusa_train.data.chat import ChatTokenizer
from medusa_train.data.conversations import Conversation
from medusa_train.data.report import Report, Tally
from medusa_train.data.sources import usable_turns
from medusa_train.data.turns import KEPT_KEYS
from medusa_train.errors import InputError
from medusa_train.run_dir import atomic_path

Form = Literal["sharegpt", "messages", "text", "parquet"]
_SHAREGPT_ROLES = {"user": "human", "assistant": "gpt"}
_PARQUET_ROWS = 1000


def import_manifest(
    rows: Sequence[Conversation], report: Report, chat: ChatTokenizer
) -> dict[str, Any]:
    """What the manifest of imported rows says of them; the caller adds the base model."""
    last_ids = [row.input_ids[end - 1] for row in rows for _, end in row.assistant_spans]
    ended = Counter(token for token in last_ids if token in chat.stop_ids)
    return {
        "tokenizer_hash": chat.tokenizer_hash,
        "chat_template_hash": chat.chat_template_hash,
        "chat_template_kwargs": chat.chat_template_kwargs,
        "sampling": None,
        "seed": None,
        "num_dropped": {text: reason.count for text, reason in report.dropped.items()},
        "num_repaired": {text: reason.count for text, reason in report.repaired.items()},
        "end_of_turn": {
            "id": ended.most_common(1)[0][0] if ended else None,
            "with": ended.total(),
            "without": len(last_ids) - ended.total(),
        },
        "rows": report.as_json(),
    }


def dataset_rows(
    rows: Iterable[Conversation], chat: ChatTokenizer | None
) -> Iterator[dict[str, Any]]:
    """Rows of a data set as plain rows: ``id`` and ``messages``, or ``id`` and ``text``.

    Args:
        rows: the data set.
        chat: decodes rows that have no messages; None when there are no such rows.

    Raises:
        InputError: a row without messages and no tokenizer.
    """
    for row in rows:
        if row.messages:
            yield {"id": row.id, "messages": [dict(message) for message in row.messages]}
        elif chat is None:
            raise InputError(
                f"row {row.id}: is plain text, kept as token ids; give the base model whose "
                "tokenizer made them with --base-model"
            )
        else:
            text = chat.tokenizer.decode(list(row.input_ids), skip_special_tokens=True)
            yield {"id": row.id, "text": text}


def file_rows(path: Path, tally: Tally) -> Iterator[dict[str, Any]]:
    """Rows of a file that others wrote, repaired, as plain rows; needs no tokenizer."""
    for turns in usable_turns(path, tally):
        if turns.text is not None:
            yield {"text": turns.text}
        else:
            tools = {} if turns.tools is None else {"tools": list(turns.tools)}
            yield {"messages": list(turns.messages), **tools}


def write_plain(
    path: Path,
    rows: Iterable[Mapping[str, Any]],
    *,
    form: Form,
    source: Path,
    why: Callable[[], str] = str,
) -> int:
    """Write plain rows in one of the forms, atomically; a ``.json`` file is one array.

    Args:
        path: the file.
        rows: what to write.
        form: how.
        source: where the rows come from, for messages.
        why: called where there are no rows; says what became of them.

    Returns:
        The number of rows.

    Raises:
        InputError: a chat in the form ``text``; no rows.
    """
    rows = _at_least_one(rows, source, why)
    if form == "parquet":
        return _write_parquet(path, rows)
    shape: Callable[[Mapping[str, Any]], Mapping[str, Any]] = {
        "sharegpt": _as_sharegpt,
        "messages": lambda row: row,
        "text": _as_text,
    }[form]
    is_array = path.suffix.lower() == ".json"
    start, between, end = ("[\n", ",\n", "\n]\n") if is_array else ("", "\n", "\n")
    count = 0
    with (
        atomic_path(path) as temporary,
        temporary.open("w", encoding="utf-8", newline="\n") as file,
    ):
        for row in rows:
            line = json.dumps(shape(row), ensure_ascii=False)
            file.write(f"{between if count else start}{line}")
            count += 1
        file.write(end)
    return count


def _at_least_one(
    rows: Iterable[Mapping[str, Any]], source: Path, why: Callable[[], str]
) -> Iterator[Mapping[str, Any]]:
    is_empty = True
    for row in rows:
        is_empty = False
        yield row
    if is_empty:
        raise InputError(f"{source}: no rows to write: {why() or 'there are no rows'}")


def _as_sharegpt(row: Mapping[str, Any]) -> dict[str, Any]:
    if "text" in row:
        return dict(row)
    rest = {key: value for key, value in row.items() if key != "messages"}
    turns = [
        {
            "from": _SHAREGPT_ROLES.get(message["role"], message["role"]),
            "value": message["content"],
            **{key: value for key, value in message.items() if key not in {"role", "content"}},
        }
        for message in row["messages"]
    ]
    return {**rest, "conversations": turns}


def _as_text(row: Mapping[str, Any]) -> dict[str, Any]:
    if "text" not in row:
        raise InputError(
            f"row {row.get('id', '')}: is a chat, which has no one text; use messages or sharegpt"
        )
    return {"text": row["text"]}


def _write_parquet(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """One column each for id, messages, tools and text; structures that vary are JSON text."""
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    text = pyarrow.string()
    message = pyarrow.struct([(key, text) for key in ("role", "content", *KEPT_KEYS)])
    schema = pyarrow.schema(
        [("id", text), ("messages", pyarrow.list_(message)), ("tools", text), ("text", text)]
    )
    count = 0
    with (
        atomic_path(path) as temporary,
        pyarrow.parquet.ParquetWriter(temporary, schema) as writer,
    ):
        for batch in _batches(map(_as_columns, rows)):
            writer.write_table(pyarrow.Table.from_pylist(batch, schema=schema))
            count += len(batch)
    return count


def _batches(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    for row in rows:
        batch.append(row)
        if len(batch) == _PARQUET_ROWS:
            yield batch
            batch = []
    if batch:
        yield batch


def _as_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    messages = [
        {
            key: value if key in {"role", "content"} else _text_or_none(value)
            for key, value in message.items()
        }
        for message in row.get("messages", [])
    ]
    return {
        "id": row.get("id"),
        "messages": messages or None,
        "tools": _text_or_none(row.get("tools")),
        "text": row.get("text"),
    }


def _text_or_none(value: Any) -> str | None:
    if isinstance(value, str) or not value:
        return value or None
    return json.dumps(value, ensure_ascii=False, default=str)
