"""Conversations side by side in rows of one length, instead of each with padding behind it.

In a row, every conversation has the positions 0, 1, 2, … of its own, and by these transformers keep
attention inside it (:mod:`medusa_train.base_model.packed` proves that a model does). Labels come
from the conversation alone (:func:`medusa_train.data.examples.valid_pairs`), so none crosses a
border.

Shapes: R rows, T tokens of a row, C conversations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Some conversations in rows.

    Attributes:
        input_ids: [R, T] int64.
        position_ids: [R, T] int64; 0 at the first token of each conversation, and at padding.
        starts: [C] int64; where each conversation begins in the flattened [R · T].
    """

    input_ids: Tensor
    position_ids: Tensor
    starts: Tensor


def pack_rows(rows: Sequence[Sequence[int]], *, capacity: int, pad_id: int = 0) -> PackedRows:
    """Put C conversations into as few rows as first-fit decreasing finds.

    Args:
        rows: C lists of token ids.
        capacity: tokens of a row at most; a longer conversation has a row of its own.
        pad_id: what fills the gaps; nothing reads it.
    """
    lengths = [len(row) for row in rows]
    packs = first_fit_decreasing(lengths, capacity=capacity)
    width = max((sum(lengths[i] for i in pack) for pack in packs), default=0)
    input_ids = torch.full((len(packs), width), pad_id, dtype=torch.int64)
    position_ids = torch.zeros_like(input_ids)
    starts = torch.zeros(len(rows), dtype=torch.int64)
    for number, pack in enumerate(packs):
        first = 0
        for index in pack:
            last = first + lengths[index]
            input_ids[number, first:last] = torch.as_tensor(rows[index], dtype=torch.int64)
            position_ids[number, first:last] = torch.arange(lengths[index])
            starts[index] = number * width + first
            first = last
    return PackedRows(input_ids, position_ids, starts)


def first_fit_decreasing(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Which of some lengths go together: the longest first, each where it fits first.

    Args:
        lengths: to be packed.
        capacity: the greatest sum of a pack; a greater length is alone.

    Returns:
        The indices of each pack; equal lengths go by their order.
    """
    packs: list[list[int]] = []
    rooms: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        place = next((n for n, room in enumerate(rooms) if room >= length), None)
        if place is None:
            packs.append([index])
            rooms.append(max(0, capacity - length))
        else:
            packs[place].append(index)
            rooms[place] -= length
    return packs
