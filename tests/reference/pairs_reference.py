"""Masks and pairs by plain loops, written from their definitions."""

from __future__ import annotations

from collections.abc import Sequence


def pairs(
    ids: Sequence[int], spans: Sequence[tuple[int, int]], num_heads: int
) -> list[tuple[int, int, int, int]]:
    """Every valid pair as (span, t, k, label): tokens t+1 … t+2+k all lie in one span."""
    found = []
    for number, (start, end) in enumerate(spans):
        for t in range(len(ids)):
            for k in range(num_heads):
                if all(start <= position < end for position in range(t + 1, t + 2 + k + 1)):
                    found.append((number, t, k, ids[t + 2 + k]))
    return found


def walked_positions(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Every (span, t) whose next token lies in the span and is not its last one, or is it alone.

    A decoder stands on t once token t+1 is the root of a step; t+1 is at most the last token.
    """
    found = []
    for number, (start, end) in enumerate(spans):
        found += [(number, t) for t in range(start - 1, end - 1) if t >= 0]
    return found


def speakers(
    texts: Sequence[tuple[str, str]], *, end_id: int, encode: object
) -> tuple[list[int], list[bool]]:
    """Ids and mask of pieces (``prompt`` or ``answer``), each tokenised by itself; an answer's
    ids are its own and the end of turn."""
    ids: list[int] = []
    mask: list[bool] = []
    for kind, text in texts:
        piece = list(encode(text))  # type: ignore[operator]
        if kind == "answer":
            piece.append(end_id)
        ids += piece
        mask += [kind == "answer"] * len(piece)
    return ids, mask
