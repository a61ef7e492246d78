"""From rows to what training and accuracy read: source positions, labels, padded batches.

Both use the same pairs: those that a decoder meets (design term: valid pair). Rows are padded by
their lengths, so a pad id that is also a real token cannot hide anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from medusa_train.losses import IGNORE, label_offset


@dataclass(frozen=True, slots=True)
class ValidPairs:
    """The source positions of one row and what each head should say there.

    Attributes:
        positions: [N] int64; for a span ``[s, e)`` the positions s-1 … e-2, ascending.
        labels: [N, K] int64; the token t + label_offset(k), or ``IGNORE`` where it lies beyond the
            span.
        spans: [N] int64; the index of each position's span.
    """

    positions: Tensor
    labels: Tensor
    spans: Tensor

    def trained(self, *, with_last: bool = False) -> ValidPairs:
        """Only the positions with at least one valid pair (a span's last one has none).

        Args:
            with_last: keep the last one too: the base's state there is the teacher's of the last
                target. The rows of a span are then all its positions, one after another.
        """
        if with_last:
            return self
        keep = (self.labels != IGNORE).any(dim=1)
        return ValidPairs(self.positions[keep], self.labels[keep], self.spans[keep])


def valid_pairs(
    input_ids: Sequence[int], spans: Sequence[tuple[int, int]], *, num_heads: int
) -> ValidPairs:
    """The source positions of a row and their labels; no label lies in another span.

    The last position of each span, e-2, is there although no head has a label at it: a decoder
    that walks the span can stand on it.

    Args:
        input_ids: the row's T token ids.
        spans: its assistant spans, half-open, ascending.
        num_heads: K.
    """
    ids = torch.as_tensor(input_ids, dtype=torch.int64)
    starts = [max(start - 1, 0) for start, _ in spans]
    counts = torch.tensor(
        [max(end - 1 - first, 0) for first, (_, end) in zip(starts, spans, strict=True)],
        dtype=torch.int64,
    )
    span_index = torch.repeat_interleave(torch.arange(len(spans)), counts)
    within = torch.arange(len(span_index)) - (counts.cumsum(0) - counts)[span_index]
    positions = torch.tensor(starts, dtype=torch.int64)[span_index] + within
    ends = torch.tensor([end for _, end in spans], dtype=torch.int64)[span_index]
    offsets = torch.tensor([label_offset(k) for k in range(num_heads)], dtype=torch.int64)
    targets = positions[:, None] + offsets
    is_valid = targets < ends[:, None]
    labels = torch.full_like(targets, IGNORE)
    labels[is_valid] = ids[targets[is_valid]]
    return ValidPairs(positions, labels, span_index)


def supervised_labels(
    input_ids: Sequence[int], spans: Sequence[tuple[int, int]], *, length: int | None = None
) -> Tensor:
    """[T] int64: the token id where the assistant speaks, else ``IGNORE``; padded to ``length``."""
    labels = torch.full((length or len(input_ids),), IGNORE, dtype=torch.int64)
    for start, end in spans:
        labels[start:end] = torch.as_tensor(input_ids[start:end], dtype=torch.int64)
    return labels


def pad_batch(
    rows: Sequence[Sequence[int]],
    *,
    pad_id: int | None,
    side: Literal["left", "right"] = "right",
    length: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Pad rows to one length, by their lengths alone.

    Args:
        rows: B rows of token ids.
        pad_id: what fills the gaps; may be 0, a stop id or None (then 0): nothing reads it.
        side: where the gaps are.
        length: T; None for the longest row.

    Returns:
        ``input_ids`` [B, T] int64 and ``attention_mask`` [B, T] int64, 1 on every real token.

    Raises:
        ValueError: a row is longer than ``length``.
    """
    longest = max((len(row) for row in rows), default=0)
    width = longest if length is None else length
    if longest > width:
        raise ValueError(f"a row has {longest} tokens, more than length {width}")
    input_ids = torch.full((len(rows), width), pad_id or 0, dtype=torch.int64)
    attention_mask = torch.zeros((len(rows), width), dtype=torch.int64)
    for index, row in enumerate(rows):
        first = 0 if side == "right" else width - len(row)
        input_ids[index, first : first + len(row)] = torch.as_tensor(row, dtype=torch.int64)
        attention_mask[index, first : first + len(row)] = 1
    return input_ids, attention_mask
