"""Files that others wrote to rows of ours, with the fate of every row counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from medusa_train.data.chat import ChatTokenizer
from medusa_train.data.conversations import (
    CONVERSATIONS_FILE,
    Conversation,
    check_supervised,
    content_id,
    share_ids,
    truncate,
)
from medusa_train.data.files import iterate_lines, iterate_rows
from medusa_train.data.mask import EncodedRow
from medusa_train.data.report import Report, Tally
from medusa_train.data.template import TemplateRefusedError
from medusa_train.data.turns import RowRefusedError, Turns, read_turns
from medusa_train.errors import InputError

# Reasons and notes beside those of turns.py, as reports show them.
BEYOND_LENGTH = "no supervised token within the maximal length"
NOTHING_SUPERVISED = "no supervised token"
DUPLICATE = "same as an earlier row"
REFUSED = "refused by the chat template"
CUT = "rows cut at the maximal length, or one answer's row beyond it"
RETOKENISED = "rows with an answer tokenised apart from its prompt"
NO_END_OF_TURN = "answers whose template gives no end-of-turn token"
EMPTY_ANSWER = "calls and answers that the template leaves out (not supervised)"
FOLDED = "system turns put before the first user turn's text"
SPLIT = "rows made one per answer, since the template rewrites earlier turns"


def load_conversations_file(
    path: Path,
    chat: ChatTokenizer,
    *,
    strict: bool = False,
    max_length: int | None = None,
    allow_empty: bool = False,
) -> tuple[list[Conversation], Report]:
    """Read a ShareGPT, messages, text or Parquet file.

    Args:
        path: the file.
        chat: what makes token ids of its rows.
        strict: refuse the file when any row would be repaired or dropped.
        max_length: cut rows to this many tokens, and drop those with no answer within it.
        allow_empty: return no rows instead of an error when nothing is supervised.

    Raises:
        InputError: the file cannot be read; it holds chats and the tokenizer has no template; it
            has 0 supervised tokens.
        InputErrors: ``strict``, with the place of each row.
    """
    tally = Tally()
    seen: set[str] = set()
    rows: list[Conversation] = []
    shared: dict[int, int] = {}
    for location, turns in iterate_turns(path, tally):
        try:
            encoded = _encoded(turns, chat, location)
        except TemplateRefusedError as error:
            tally.drop(REFUSED, location, detail=str(error.__cause__ or error))
            continue
        conversations = [_conversation(path.name, turns, row, shared) for row in encoded]
        usable = [row for row in conversations if row.num_supervised]
        kept = [row for row in usable if row.id not in seen]
        if usable and not kept:
            tally.drop(DUPLICATE, location)
            continue
        seen.update(row.id for row in kept)
        cut = [row if max_length is None else truncate(row, max_length) for row in kept]
        if not any(cut):
            tally.drop(BEYOND_LENGTH if kept else NOTHING_SUPERVISED, location)
            continue
        count_taken(tally, turns, location)
        rows += filter(None, cut)
        _note(tally, turns, encoded, chat)
        tally.note(CUT, sum(a is not b for a, b in zip(kept, cut, strict=True)))
    report = tally.report()
    if strict:
        tally.refuse_changes()
    if not allow_empty:
        check_supervised(rows, where=str(path), why=report.summary())
    return rows, report


def load_prompts_file(path: Path) -> tuple[list[list[dict[str, Any]]], Report]:
    """Read prompts: the turns before the first answer of each row (user-only rows are kept).

    A plain text file has one prompt per line; a text row is one user turn.

    Raises:
        InputError: the file cannot be read, or holds no prompt.
    """
    tally = Tally()
    prompts: list[list[dict[str, Any]]] = []
    for location, turns in iterate_turns(path, tally, is_prompts=True):
        count_taken(tally, turns, location)
        is_chat = turns.text is None
        prompts.append(
            list(turns.messages) if is_chat else [{"role": "user", "content": turns.text}]
        )
    report = tally.report()
    if not prompts:
        raise InputError(f"{path}: no prompts: {report.summary() or 'the file has no rows'}")
    return prompts, report


def truncate_rows(
    rows: Sequence[Conversation], *, max_length: int, directory: Path
) -> tuple[list[Conversation], Report]:
    """Cut the rows of a data set directory, in its order; report each that has no answer left."""
    tally = Tally()
    kept: list[Conversation] = []
    for number, row in enumerate(rows, start=1):
        location = f"{directory / CONVERSATIONS_FILE}:{number}"
        cut = truncate(row, max_length)
        if cut is None:
            reason = BEYOND_LENGTH if row.num_supervised else NOTHING_SUPERVISED
            tally.drop(reason, location, detail=f"id {row.id}")
            continue
        tally.keep()
        tally.note(CUT, int(cut is not row))
        kept.append(cut)
    return kept, tally.report()


def iterate_turns(
    path: Path, tally: Tally, *, is_prompts: bool = False
) -> Iterator[tuple[str, Turns]]:
    """The usable rows of a file with their places; the others are counted in ``tally``.

    Args:
        path: the file.
        tally: counts the rows that cannot be used; the caller counts those that it takes.
        is_prompts: read the turns before the first answer; a plain text file is a prompt per line.
    """
    is_lines = is_prompts and path.suffix.lower() == ".txt" and path.is_file()
    for raw in iterate_lines(path) if is_lines else iterate_rows(path):
        if raw.error is not None:
            tally.drop(raw.error, raw.location)
            continue
        try:
            yield raw.location, read_turns(raw.value, need_answer=not is_prompts)
        except RowRefusedError as refused:
            tally.drop(refused.reason, raw.location, detail=refused.detail)


def count_taken(tally: Tally, turns: Turns, location: str) -> None:
    """Count a row that is taken, as it is or repaired."""
    if turns.repairs:
        tally.repair("; ".join(turns.repairs), location)
    else:
        tally.keep()


def _encoded(turns: Turns, chat: ChatTokenizer, location: str) -> list[EncodedRow]:
    if turns.text is not None:
        return [chat.encode_text(turns.text)]
    if not chat.has_template:
        raise InputError(
            f"{location}: the row is a chat, and the base model's tokenizer has no chat template; "
            "give one (data.chat_template in a recipe, --chat-template on the command line), or "
            "use plain text"
        )
    return chat.encode_conversation(turns.messages, tools=turns.tools)


def _conversation(
    source: str, turns: Turns, row: EncodedRow, shared: dict[int, int]
) -> Conversation:
    messages = turns.messages[: row.num_messages]
    return Conversation(
        id=content_id(source, messages=messages, ids=row.input_ids),
        source=source,
        messages=messages,
        input_ids=share_ids(row.input_ids, shared),
        assistant_spans=row.assistant_spans,
        finish_reasons=tuple("given" for _ in row.assistant_spans),
        retokenised=row.retokenised,
    )


def _note(tally: Tally, turns: Turns, encoded: Sequence[EncodedRow], chat: ChatTokenizer) -> None:
    tally.note(RETOKENISED, sum(row.retokenised for row in encoded))
    tally.note(EMPTY_ANSWER, sum(row.num_empty for row in encoded))
    tally.note(SPLIT, len(encoded) if len(encoded) > 1 else 0)
    if turns.text is None:
        tally.note(NO_END_OF_TURN, sum(not ended for row in encoded for ended in row.ended))
        has_system = turns.messages[0]["role"] == "system"
        tally.note(FOLDED, int(has_system and chat.template.folds_system))
