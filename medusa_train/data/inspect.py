"""What is in a data set: counts, and a decoded view that shows the loss mask."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from medusa_train.data.chat import ChatTokenizer
from medusa_train.data.conversations import Conversation, check_supervised, normalised_text
from medusa_train.data.lengths import Lengths, lengths_of
from medusa_train.errors import InputError

_DIGEST_BYTES = 16
# Control characters as pictures of themselves: a terminal would obey them, HTML forbids them.
_VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}


@dataclass(frozen=True, slots=True)
class Inspection:
    """Counts over the rows of a data set.

    Attributes:
        num_conversations: rows.
        num_tokens: of all rows.
        num_supervised_tokens: tokens of the assistant.
        num_spans: answers.
        num_with_end_of_turn: answers whose last token is a stop id.
        end_of_turn_id: the most frequent of those; None where there is none.
        num_double_bos: rows that begin with two beginning-of-sequence tokens.
        num_retokenised: rows with an answer that was tokenised apart from its prompt.
        num_fully_supervised: rows in which every token is supervised; of a chat, every one but a
            beginning-of-sequence token at the start.
        num_same_tokens: rows whose token ids are those of an earlier row.
        num_same_prompt: rows whose messages before the first answer are those of an earlier row,
            normalised; the rows that one conversation was split into count as one.
        longest: tokens of the longest row.
        row_lengths: tokens per row.
        answer_lengths: supervised tokens per answer.
        finish_reasons: answers by the reason for their end.
        sources: rows by source.
    """

    num_conversations: int
    num_tokens: int
    num_supervised_tokens: int
    num_spans: int
    num_with_end_of_turn: int
    end_of_turn_id: int | None
    num_double_bos: int
    num_retokenised: int
    num_fully_supervised: int
    num_same_tokens: int
    num_same_prompt: int
    longest: int
    row_lengths: Lengths
    answer_lengths: Lengths
    finish_reasons: dict[str, int]
    sources: dict[str, int]

    @property
    def supervised_share(self) -> float:
        """Supervised tokens ÷ tokens; 0 without tokens."""
        return self.num_supervised_tokens / self.num_tokens if self.num_tokens else 0.0

    def as_json(self) -> dict[str, Any]:
        """All counts as one JSON object."""
        return {**asdict(self), "supervised_share": self.supervised_share}


def inspect_rows(rows: Iterable[Conversation], chat: ChatTokenizer) -> Inspection:
    """Count what is in ``rows``; ``chat`` knows the stop ids and the BOS token."""
    counts: Counter[str] = Counter()
    ends: Counter[int] = Counter()
    finish_reasons: Counter[str] = Counter()
    sources: Counter[str] = Counter()
    row_lengths, answer_lengths = array("q"), array("q")
    repeats = _Repeats()
    bos = chat.tokenizer.bos_token_id
    for row in rows:
        row_lengths.append(len(row.input_ids))
        answer_lengths.extend(end - start for start, end in row.assistant_spans)
        sources[row.source] += 1
        finish_reasons.update(row.finish_reasons)
        last_ids = (row.input_ids[end - 1] for _, end in row.assistant_spans)
        ends.update(token for token in last_ids if token in chat.stop_ids)
        counts["double BOS"] += bos is not None and row.input_ids[:2] == (bos, bos)
        counts["retokenised"] += row.retokenised
        counts["full"] += _is_full(row, bos)
        repeats.take(row)
    return Inspection(
        num_conversations=len(row_lengths),
        num_tokens=sum(row_lengths),
        num_supervised_tokens=sum(answer_lengths),
        num_spans=len(answer_lengths),
        num_with_end_of_turn=ends.total(),
        end_of_turn_id=ends.most_common(1)[0][0] if ends else None,
        num_double_bos=counts["double BOS"],
        num_retokenised=counts["retokenised"],
        num_fully_supervised=counts["full"],
        num_same_tokens=repeats.num_same_tokens,
        num_same_prompt=repeats.num_same_prompt,
        longest=max(row_lengths, default=0),
        row_lengths=lengths_of(row_lengths),
        answer_lengths=lengths_of(answer_lengths),
        finish_reasons=dict(sorted(finish_reasons.items())),
        sources=dict(sorted(sources.items())),
    )


class _Repeats:
    """Counts rows that were there before, by digests alone: texts would double the memory."""

    def __init__(self) -> None:
        self.num_same_tokens = 0
        self.num_same_prompt = 0
        self._tokens: set[bytes] = set()
        self._prompts: set[bytes] = set()
        self._before: Sequence[Any] = ()

    def take(self, row: Conversation) -> None:
        tokens = _digest(array("q", row.input_ids).tobytes())
        self.num_same_tokens += tokens in self._tokens
        self._tokens.add(tokens)
        # A template that rewrites history gives several rows of one conversation, one by one.
        before, self._before = self._before, row.messages
        goes_on = 0 < len(before) < len(row.messages) and row.messages[: len(before)] == before
        if not row.messages or goes_on:
            return
        prompt = _digest(_prompt_key(row.messages))
        self.num_same_prompt += prompt in self._prompts
        self._prompts.add(prompt)


def _prompt_key(messages: Sequence[Any]) -> bytes:
    roles = [message.get("role") for message in messages]
    end = roles.index("assistant") if "assistant" in roles else len(roles)
    texts = [normalised_text(str(message.get("content"))) for message in messages[:end]]
    return json.dumps([roles[:end], texts]).encode()


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _is_full(row: Conversation, bos: int | None) -> bool:
    rest = len(row.input_ids) - row.num_supervised
    return rest == 0 or (rest == 1 and bool(row.messages) and row.input_ids[0] == bos)


def check_mask(
    inspection: Inspection, rows: Sequence[Conversation], *, where: str, why: str = ""
) -> None:
    """Refuse a mask that says nothing.

    Args:
        inspection: of ``rows``.
        rows: the data.
        where: its file or directory, for the message.
        why: what became of the rows that are missing, for the message.

    Raises:
        InputError: no token is supervised, or every token of every row is.
    """
    check_supervised(rows, where=where, why=why)
    if inspection.num_fully_supervised == inspection.num_conversations:
        raise InputError(
            f"{where}: every token of every row is supervised, the prompts too; make the data "
            "again from chats, or with generate"
        )


def end_of_turn(inspection: Inspection, chat: ChatTokenizer) -> str | None:
    """The token that most answers end with; None where there is none."""
    token_id = inspection.end_of_turn_id
    return None if token_id is None else str(chat.tokenizer.convert_ids_to_tokens(token_id))


def decoded_segments(row: Conversation, chat: ChatTokenizer) -> list[tuple[str, bool]]:
    """The row's text in pieces, each with whether it is supervised.

    Special tokens are shown, and control characters other than line feed and tab as pictures.
    """
    borders = [0, *(border for span in row.assistant_spans for border in span), len(row.input_ids)]
    segments = []
    for index, (start, end) in enumerate(pairwise(borders)):
        if start < end:
            text = chat.tokenizer.decode(list(row.input_ids[start:end]), skip_special_tokens=False)
            segments.append((str(text).translate(_VISIBLE), index % 2 == 1))
    return segments
