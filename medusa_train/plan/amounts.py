"""How much text there is: counted where the data set is there, else at most.

A micro-batch is thought of as the rows with the most, so that memory is that of the worst one.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from medusa_train.data.conversations import Conversation, read_conversations, split_of, truncate
from medusa_train.hidden_states.shards import num_source_positions

PER_CONVERSATIONS = 1_000
"""Where nothing says how many conversations there will be, figures are for so many."""


@dataclass(frozen=True, slots=True)
class Amount:
    """How much text one side of a data set is.

    Attributes:
        conversations: how many rows.
        tokens: of all rows.
        squared_tokens: the sum of the squares of their lengths, for attention.
        positions: source positions of all rows.
        pairs: of all rows and heads.
        longest: tokens of the longest row.
        most_positions: source positions of each of the rows with the most, descending; as many as a
            micro-batch has rows.
        origin: where the figures come from, in words.
    """

    conversations: int
    tokens: int
    squared_tokens: int
    positions: int
    pairs: int
    longest: int
    most_positions: tuple[int, ...]
    origin: str


def counted_amount(
    rows: Iterable[Conversation], *, num_heads: int, batch_size: int, origin: str
) -> Amount:
    """What is in some conversations."""
    rows = list(rows)
    lengths = [len(row.input_ids) for row in rows]
    positions = [num_source_positions(row) for row in rows]
    pairs = sum(
        max(0, end - max(start, 1) - 1 - head)
        for row in rows
        for start, end in row.assistant_spans
        for head in range(num_heads)
    )
    return Amount(
        conversations=len(rows),
        tokens=sum(lengths),
        squared_tokens=sum(length**2 for length in lengths),
        positions=sum(positions),
        pairs=pairs,
        longest=max(lengths, default=0),
        most_positions=tuple(heapq.nlargest(batch_size, positions)),
        origin=origin,
    )


def greatest_amount(
    conversations: int, *, row_tokens: int, answer_tokens: int, num_heads: int, batch_size: int,
    origin: str,
) -> Amount:  # fmt: skip
    """An upper bound: every row as long as it may be, its answer too."""
    positions = max(answer_tokens - 1, 0)
    pairs = sum(max(0, answer_tokens - 1 - head) for head in range(num_heads))
    return Amount(
        conversations=conversations,
        tokens=conversations * row_tokens,
        squared_tokens=conversations * row_tokens**2,
        positions=conversations * positions,
        pairs=conversations * pairs,
        longest=row_tokens,
        most_positions=(positions,) * min(batch_size, conversations),
        origin=origin,
    )


def dataset_amounts(
    directory: Path, *, max_length: int, eval_fraction: float, num_heads: int, batch_size: int
) -> tuple[Amount, Amount]:
    """What a data set directory has to train on, and held out, split and cut as training does."""
    sides: dict[str, list[Conversation]] = {"train": [], "eval": []}
    for row in read_conversations(directory):
        kept = truncate(row, max_length)
        if kept is not None:
            sides[split_of(row, eval_fraction=eval_fraction)].append(kept)
    origin = f"counted in {directory}"
    train, held_out = (
        counted_amount(sides[side], num_heads=num_heads, batch_size=batch_size, origin=origin)
        for side in ("train", "eval")
    )
    return train, held_out


def greatest_amounts(
    conversations: int | None,
    *,
    row_tokens: int,
    answer_tokens: int,
    eval_fraction: float,
    num_heads: int,
    batch_size: int,
) -> tuple[Amount, Amount]:
    """The same before the data set is there: an upper bound.

    Args:
        conversations: how many there will be; None where nothing says so.
        row_tokens: of the longest row.
        answer_tokens: of them those of answers.
        eval_fraction: share that is held out.
        num_heads: K.
        batch_size: rows of a micro-batch.
    """
    origin = f"at most {row_tokens:,} tokens each, of them {answer_tokens:,} of answers"
    if conversations is None:
        conversations = PER_CONVERSATIONS
        origin = f"their number is not known: figures per {conversations:,}; {origin}"
    count = round(conversations * eval_fraction)
    train, held_out = (
        greatest_amount(
            part,
            row_tokens=row_tokens,
            answer_tokens=answer_tokens,
            num_heads=num_heads,
            batch_size=batch_size,
            origin=origin,
        )
        for part in (conversations - count, count)
    )
    return train, held_out


def batch_positions(amount: Amount, *, batch_size: int) -> int:
    """Source positions of the micro-batch of the rows with the most."""
    return sum(sorted(amount.most_positions, reverse=True)[:batch_size])
