"""A key/value cache whose rows are independent slots, each at its own length from position 0.

The library's dynamic cache concatenates (and so copies) everything at each step and keeps all rows
at one length, which costs left padding and keeps finished rows. Here storage is allocated ahead
and written in place; a row leaves by moving the last row into its slot. ``Cache`` and
``CacheLayerMixin`` are subclassed because that is the only form in which every model of the
library takes a cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

GROWTH = 64


@dataclass(slots=True)
class Writing:
    """What the next forward pass writes where; all layers read it.

    Attributes:
        slots: [n] the slots of the rows of the batch.
        positions: [n] where each row's token goes (a step), or None (prompts: from ``start`` on).
        start: where prompts begin, behind a prefix that all slots share.
        length: how many cached positions a step's attention sees (the greatest position + 1).
    """

    slots: torch.Tensor
    positions: torch.Tensor | None
    start: int
    length: int


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, each [S, Hkv, capacity, D]."""

    is_sliding = False

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate zeros: what is never written is masked, but must not be NaN."""
        num_slots, capacity = self._cache.num_slots, self._cache.capacity
        self.keys = key_states.new_zeros(
            num_slots, key_states.shape[1], capacity, key_states.shape[3]
        )
        self.values = value_states.new_zeros(
            num_slots, value_states.shape[1], capacity, value_states.shape[3]
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values [n, Hkv, T, D]; return those that the queries may see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        writing = self._cache.writing
        if writing.positions is not None:
            self.keys[writing.slots, :, writing.positions] = key_states[:, :, 0]
            self.values[writing.slots, :, writing.positions] = value_states[:, :, 0]
            num_rows = len(writing.slots)
            return (
                self.keys[:num_rows, :, : writing.length],
                self.values[:num_rows, :, : writing.length],
            )
        start, end = writing.start, writing.start + key_states.shape[2]
        self.keys[writing.slots, :, start:end] = key_states
        self.values[writing.slots, :, start:end] = value_states
        if start == 0:
            return key_states, value_states
        return self.keys[writing.slots, :, :end], self.values[writing.slots, :, :end]

    def grow(self, capacity: int) -> None:
        """Enlarge the storage to ``capacity`` positions per slot."""
        if self.keys is None or self.values is None:
            return
        self.keys = _enlarged(self.keys, capacity)
        self.values = _enlarged(self.values, capacity)

    def copy_slot(self, source: int, targets: slice, *, length: int) -> None:
        """Copy the first ``length`` positions of one slot to others."""
        for stored in (self.keys, self.values):
            if stored is not None:
                stored[targets, :, :length] = stored[source, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of positions that :meth:`update` returns; they start at 0."""
        writing = self._cache.writing
        is_step = writing.positions is not None
        return (writing.length if is_step else writing.start + query_length), 0

    def get_seq_length(self) -> int:
        """The positions seen before this pass; rows differ, so masks and positions are explicit."""
        writing = self._cache.writing
        return writing.start if writing.positions is None else writing.length - 1

    def get_max_length(self) -> int:
        """No bound."""
        return -1


class SlotCache(Cache):
    """``num_slots`` rows of keys and values; the first rows are the active ones.

    Args:
        num_layers: of the model.
        num_slots: S, the most rows decoded together.
        device: where slot indices live.

    Attributes:
        capacity: the positions that each slot has room for.
        bound: the most positions that will be needed; growth stops there.
    """

    def __init__(self, num_layers: int, *, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.capacity = 0
        self.bound = 0
        self.device = device
        self.writing = Writing(torch.zeros(0, dtype=torch.long, device=device), None, 0, 0)
        self.slot_layers = [SlotLayer(self) for _ in range(num_layers)]
        super().__init__(layers=list(self.slot_layers))

    def reserve(self, length: int) -> None:
        """Make room for ``length`` positions per slot, doubling when it grows up to the bound."""
        if length <= self.capacity:
            return
        wanted = max(length, min(2 * self.capacity, self.bound))
        self.capacity = -(-wanted // GROWTH) * GROWTH
        for layer in self.slot_layers:
            layer.grow(self.capacity)

    def write_prompts(self, slots: torch.Tensor, *, start: int, length: int) -> None:
        """Announce a pass over prompts [n, length] that go to ``slots`` from ``start`` on."""
        self.reserve(start + length)
        self.writing = Writing(slots, None, start, start + length)

    def write_step(self, positions: torch.Tensor, *, length: int) -> None:
        """Announce a pass over one token for each of the first rows, at ``positions`` [n]."""
        self.reserve(length)
        slots = torch.arange(len(positions), device=self.device)
        self.writing = Writing(slots, positions, 0, length)

    def copy_slot(self, source: int, targets: slice, *, length: int) -> None:
        """Copy the first ``length`` positions of one slot to others."""
        for layer in self.slot_layers:
            layer.copy_slot(source, targets, length=length)


def _enlarged(old: torch.Tensor, capacity: int) -> torch.Tensor:
    new = old.new_zeros(*old.shape[:2], capacity, old.shape[3])
    new[:, :, : old.shape[2]] = old
    return new
