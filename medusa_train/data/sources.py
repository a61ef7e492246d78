"""Files that others wrote to rows of ours, with the fate of every row counted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from medusa_train.data.chat import ChatTokenizer
from medusa_train.data.conversations import (
    CONVERSATIONS_FILE,
    Conversation,
    check_supervised,
    content_id,
    share_ids,
    truncate,
)
from medusa_train.data.files import RawRow, iterate_lines, iterate_rows
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

_BATCH = 64


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
    importer = _Importer(path, chat, max_length)
    source = iterate_turns(path)
    while batch := list(islice(source, _BATCH)):
        importer.take(batch)
    report = importer.tally.report()
    if strict:
        importer.tally.refuse_changes()
    if not allow_empty:
        check_supervised(importer.rows, where=str(path), why=report.summary())
    return importer.rows, report


def iterate_prompts(path: Path, tally: Tally) -> Iterator[Turns]:
    """Read prompts one by one: the turns before the first answer, and the user's later ones.

    A plain text file has one prompt per line; a text row is one user turn (or, for a model without
    a chat template, text to go on with). The fate of every row is counted in ``tally``.

    Raises:
        InputError: the file cannot be read.
    """
    return usable_turns(path, tally, is_prompts=True)


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
    path: Path, *, is_prompts: bool = False
) -> Iterator[tuple[str, Turns | RowRefusedError]]:
    """The rows of a file with their places, or why a row cannot be used.

    Args:
        path: the file.
        is_prompts: read the turns before the first answer; a plain text file is a prompt per line.
    """
    is_lines = is_prompts and path.suffix.lower() == ".txt" and path.is_file()
    raw_rows = iterate_lines(path) if is_lines else iterate_rows(path)
    return _read_rows(raw_rows, is_prompts=is_prompts)


def usable_turns(path: Path, tally: Tally, *, is_prompts: bool = False) -> Iterator[Turns]:
    """The rows of a file that can be used; the fate of every row is counted in ``tally``."""
    return _usable(iterate_turns(path, is_prompts=is_prompts), tally)


def usable_rows(raw_rows: Iterable[RawRow], tally: Tally, *, is_prompts: bool) -> Iterator[Turns]:
    """:func:`usable_turns` of rows that come from elsewhere."""
    return _usable(_read_rows(raw_rows, is_prompts=is_prompts), tally)


def _read_rows(
    raw_rows: Iterable[RawRow], *, is_prompts: bool
) -> Iterator[tuple[str, Turns | RowRefusedError]]:
    for raw in raw_rows:
        row: Turns | RowRefusedError
        try:
            if raw.error is not None:
                raise RowRefusedError(raw.error)
            row = read_turns(raw.value, need_answer=not is_prompts)
        except RowRefusedError as refused:
            row = refused
        yield raw.location, row


def _usable(rows: Iterable[tuple[str, Turns | RowRefusedError]], tally: Tally) -> Iterator[Turns]:
    for location, row in rows:
        if isinstance(row, RowRefusedError):
            tally.drop(row.reason, location, detail=row.detail)
        else:
            _count_taken(tally, row, location)
            yield row


def _count_taken(tally: Tally, turns: Turns, location: str) -> None:
    if turns.repairs:
        tally.repair("; ".join(turns.repairs), location)
    else:
        tally.keep()


class _Importer:
    """Collects the conversations of one file."""

    def __init__(self, path: Path, chat: ChatTokenizer, max_length: int | None) -> None:
        self.tally = Tally()
        self.rows: list[Conversation] = []
        self._source = path.name
        self._chat = chat
        self._max_length = max_length
        self._seen: set[str] = set()
        # What these were made from: a row that comes again need not be encoded again.
        self._taken: set[bytes] = set()
        self._shared: dict[int, int] = {}

    def take(self, batch: Sequence[tuple[str, Turns | RowRefusedError]]) -> None:
        """Encode some rows, and count the fate of each."""
        known = [isinstance(row, Turns) and _content_key(row) in self._taken for _, row in batch]
        chats = [
            (at, row)
            for (at, row), is_known in zip(batch, known, strict=True)
            if isinstance(row, Turns) and row.text is None and not is_known
        ]
        if chats and not self._chat.has_template:
            raise InputError(
                f"{chats[0][0]}: the row is a chat, and the base model's tokenizer has no chat "
                "template; give one (data.chat_template in a recipe, --chat-template on the "
                "command line), or use plain text"
            )
        encoded_chats = iter(
            self._chat.encode_conversations([(row.messages, row.tools) for _, row in chats])
        )
        for (location, row), is_known in zip(batch, known, strict=True):
            if isinstance(row, RowRefusedError):
                self.tally.drop(row.reason, location, detail=row.detail)
                continue
            if is_known:
                self.tally.drop(DUPLICATE, location)
                continue
            if row.text is not None:
                self._take_row(location, row, [self._chat.encode_text(row.text)])
                continue
            encoded = next(encoded_chats)
            if isinstance(encoded, TemplateRefusedError):
                self.tally.drop(REFUSED, location, detail=str(encoded.__cause__ or encoded))
            else:
                self._take_row(location, row, encoded)

    def _take_row(self, location: str, turns: Turns, encoded: Sequence[EncodedRow]) -> None:
        usable = [self._conversation(turns, row) for row in encoded if row.assistant_spans]
        kept = [row for row in usable if row.id not in self._seen]
        if usable and not kept:
            self.tally.drop(DUPLICATE, location)
            return
        self._seen.update(row.id for row in kept)
        if kept:
            self._taken.add(_content_key(turns))
        limit = self._max_length
        cut = [row if limit is None else truncate(row, limit) for row in kept]
        if not any(cut):
            self.tally.drop(BEYOND_LENGTH if kept else NOTHING_SUPERVISED, location)
            return
        _count_taken(self.tally, turns, location)
        self.rows += filter(None, cut)
        self._note(turns, encoded)
        self.tally.note(CUT, sum(a is not b for a, b in zip(kept, cut, strict=True)))

    def _conversation(self, turns: Turns, row: EncodedRow) -> Conversation:
        messages = turns.messages[: row.num_messages]
        return Conversation(
            id=content_id(self._source, messages=messages, ids=row.input_ids),
            source=self._source,
            messages=messages,
            input_ids=share_ids(row.input_ids, self._shared),
            assistant_spans=row.assistant_spans,
            finish_reasons=tuple("given" for _ in row.assistant_spans),
            retokenised=row.retokenised,
        )

    def _note(self, turns: Turns, encoded: Sequence[EncodedRow]) -> None:
        self.tally.note(RETOKENISED, sum(row.retokenised for row in encoded))
        self.tally.note(EMPTY_ANSWER, sum(row.num_empty for row in encoded))
        self.tally.note(SPLIT, len(encoded) if len(encoded) > 1 else 0)
        if turns.text is None:
            self.tally.note(NO_END_OF_TURN, sum(not end for row in encoded for end in row.ended))
            has_system = turns.messages[0]["role"] == "system"
            self.tally.note(FOLDED, int(has_system and self._chat.template.folds_system))


def _content_key(turns: Turns) -> bytes:
    content = json.dumps([turns.messages, turns.text, turns.tools], default=str)
    return hashlib.blake2b(content.encode(), digest_size=16).digest()
