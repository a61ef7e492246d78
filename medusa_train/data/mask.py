"""The exact loss mask: which tokens of a rendered conversation the model itself would emit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """Token ids and the assistant's spans in them.

    Attributes:
        input_ids: the ids that a model sees and writes.
        assistant_spans: half-open ranges of supervised tokens.
        ended: for each span, whether its last token is an end of turn.
        num_messages: how many of the conversation's messages the row holds; 0 for plain text.
        retokenised: an answer was tokenised alone, since the full ids did not start with the
            prompt's.
        num_empty: answers without a token of their own (a call that the template leaves out);
            they are not supervised.
    """

    input_ids: tuple[int, ...]
    assistant_spans: tuple[tuple[int, int], ...]
    ended: tuple[bool, ...]
    num_messages: int = 0
    retokenised: bool = False
    num_empty: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer after its prompt: ``ids[start:end]`` is what the model would emit."""

    ids: Sequence[int]
    start: int
    end: int
    ended: bool
    retokenised: bool
    num_messages: int

    @property
    def is_empty(self) -> bool:
        """Whether nothing but an end of turn is there."""
        return self.end - self.start - self.ended <= 0


def rows_of_turns(turns: Sequence[Turn]) -> list[EncodedRow]:
    """One row for all answers when every earlier one stands unchanged in the last one's ids.

    Otherwise one row per answer, since a server would have seen other ids at each of them.
    """
    whole = turns[-1].ids
    if all(turn.ids[: turn.end] == whole[: turn.end] for turn in turns):
        return [_row(turns)]
    return [_row([turn]) for turn in turns]


def first_stop(ids: Sequence[int], *, start: int, stop_ids: frozenset[int]) -> int | None:
    """The position of the first stop id from ``start`` on: the end of turn, or None."""
    return next((i for i in range(start, len(ids)) if ids[i] in stop_ids), None)


def common_prefix(sequences: Sequence[Sequence[int]]) -> list[int]:
    """The longest beginning that all sequences share."""
    prefix = []
    for column in zip(*sequences, strict=False):
        if len(set(column)) > 1:
            break
        prefix.append(column[0])
    return prefix


def _row(turns: Sequence[Turn]) -> EncodedRow:
    supervised = [turn for turn in turns if not turn.is_empty]
    return EncodedRow(
        input_ids=tuple(turns[-1].ids),
        assistant_spans=tuple((turn.start, turn.end) for turn in supervised),
        ended=tuple(turn.ended for turn in supervised),
        num_messages=turns[-1].num_messages,
        retokenised=any(turn.retokenised for turn in turns),
        num_empty=len(turns) - len(supervised),
    )
