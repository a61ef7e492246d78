"""What is in a data set: counts, and a decoded view that shows the loss mask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from medusa_train.data.chat import ChatTokenizer
from medusa_train.data.conversations import Conversation, check_supervised
from medusa_train.errors import InputError


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
        num_fully_supervised: rows in which every token is supervised.
        longest: tokens of the longest row.
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
    longest: int
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
    longest = 0
    bos = chat.tokenizer.bos_token_id
    for row in rows:
        length = len(row.input_ids)
        longest = max(longest, length)
        sources[row.source] += 1
        finish_reasons.update(row.finish_reasons)
        last_ids = (row.input_ids[end - 1] for _, end in row.assistant_spans)
        ends.update(token for token in last_ids if token in chat.stop_ids)
        counts["rows"] += 1
        counts["tokens"] += length
        counts["supervised"] += row.num_supervised
        counts["spans"] += len(row.assistant_spans)
        counts["double BOS"] += bos is not None and row.input_ids[:2] == (bos, bos)
        counts["retokenised"] += row.retokenised
        counts["full"] += row.num_supervised == length
    return Inspection(
        num_conversations=counts["rows"],
        num_tokens=counts["tokens"],
        num_supervised_tokens=counts["supervised"],
        num_spans=counts["spans"],
        num_with_end_of_turn=ends.total(),
        end_of_turn_id=ends.most_common(1)[0][0] if ends else None,
        num_double_bos=counts["double BOS"],
        num_retokenised=counts["retokenised"],
        num_fully_supervised=counts["full"],
        longest=longest,
        finish_reasons=dict(sorted(finish_reasons.items())),
        sources=dict(sorted(sources.items())),
    )


def check_mask(inspection: Inspection, rows: Sequence[Conversation], *, where: str) -> None:
    """Refuse a mask that says nothing.

    Raises:
        InputError: no token is supervised, or every token of every row is.
    """
    check_supervised(rows, where=where)
    if inspection.num_fully_supervised == inspection.num_conversations:
        raise InputError(
            f"{where}: every token of every row is supervised, the prompts too; make the data "
            "again from chats, or with generate"
        )


def decoded_segments(row: Conversation, chat: ChatTokenizer) -> list[tuple[str, bool]]:
    """The row's text in pieces, each with whether it is supervised; special tokens are shown."""
    borders = [0, *(border for span in row.assistant_spans for border in span), len(row.input_ids)]
    segments = []
    for index, (start, end) in enumerate(pairwise(borders)):
        if start < end:
            text = chat.tokenizer.decode(list(row.input_ids[start:end]), skip_special_tokens=False)
            segments.append((str(text), index % 2 == 1))
    return segments
