"""The model's own key/value cache, with the tree nodes that were accepted and without the others.

A step appends the N tree nodes behind all rows. Then each row's accepted nodes move to the end of
that row's own text, and what lies behind the longest row is cut off. So rows of a batch may accept
different numbers of tokens: a row's columns are its left padding, its text, and then, up to the
longest row's end, columns that its masks hide.

Shapes: B rows, Hkv heads, S columns, D head size, N tree nodes.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from medusa_train.errors import InputError

FULL, SLIDING = "full_attention", "sliding_attention"

ROOM = 256
"""The columns of a layer's storage are a multiple of this."""


@dataclass(frozen=True, slots=True)
class CachePlan:
    """How a model's layers attend.

    Attributes:
        layers: kind of layer (the library's name) → index of the first layer of that kind. One
            entry means that the model takes one mask; several, that it takes a mapping.
        window: positions that a query of a sliding layer sees, itself included; None without such
            layers.
    """

    layers: dict[str, int]
    window: int | None


def cache_plan(model: PreTrainedModel) -> CachePlan:
    """Read from the model's own cache how its layers attend.

    Raises:
        InputError: tree decoding cannot be exact on this model; it is named.
    """
    name = type(model).__name__
    parameters = inspect.signature(model.forward).parameters
    missing = {"cache", "position_ids", "logits_to_keep"} - parameters.keys()
    if missing:
        raise InputError(
            f"{name}: its forward takes no {', '.join(sorted(missing))}; it cannot decode "
            "with heads"
        )
    attention = getattr(model.config, "_attn_implementation", None)
    if attention not in {"sdpa", "eager"}:
        raise InputError(
            f"{name}: attention {attention!r} takes no tree masks; load the model with "
            "attn_implementation='sdpa' or 'eager'"
        )
    config = model.config.get_text_config(decoder=True)
    others = set(getattr(config, "layer_types", None) or ()) - {FULL, SLIDING}
    if others:
        raise InputError(
            f"{name}: has layers of type {', '.join(sorted(others))}, which cannot be rolled back "
            "to an accepted token; it cannot decode with heads"
        )
    kinds: dict[str, int] = {}
    windows: set[int] = set()
    layers = DynamicCache(config=config).layers
    for index, layer in enumerate(layers):
        if type(layer) is DynamicSlidingWindowLayer:
            kinds.setdefault(SLIDING, index)
            windows.add(layer.sliding_window)
        elif type(layer) is DynamicLayer:
            kinds.setdefault(FULL, index)
        else:
            raise InputError(
                f"{name}: keeps state in {type(layer).__name__}, not keys and values per position, "
                "so it cannot be rolled back to an accepted token; it cannot decode with heads"
            )
    if len(windows) > 1:
        raise InputError(
            f"{name}: its layers have different sliding windows, {sorted(windows)}; it cannot "
            "decode with heads"
        )
    return CachePlan(kinds, next(iter(windows), None))


class GrowingLayer(DynamicLayer):
    """A layer of the library whose keys and values have room behind them.

    The library's own layer copies everything it has with each step. Here ``keys`` and ``values``
    [B, Hkv, S, D] are the first columns of a storage of a multiple of :data:`ROOM` columns.

    Args:
        length: columns that will be needed at once, the prompt's.
    """

    def __init__(self, length: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._length = length
        self._storage: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new columns [B, Hkv, T, D] behind the others; returns all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        length = self.get_seq_length()
        end = length + key_states.shape[2]
        keys, values = self.reserve(key_states.shape[2])
        keys[:, :, length:end] = key_states
        values[:, :, length:end] = value_states
        self.show(end)
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def reserve(self, num_columns: int) -> tuple[Tensor, Tensor]:
        """The storage of keys and values, with room for some columns more."""
        assert self.keys is not None
        assert self.values is not None
        end = self.get_seq_length() + num_columns
        if self._storage is None or end > self._storage[0].shape[2]:
            capacity = -(-max(end, self._length) // ROOM) * ROOM
            self._storage = _grown(self.keys, capacity), _grown(self.values, capacity)
        return self._storage

    def show(self, length: int) -> None:
        """Let the layer have this many columns of its storage."""
        assert self._storage is not None
        self.keys, self.values = (stored[:, :, :length] for stored in self._storage)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        super().batch_select_indices(indices)
        # They were copied, and without room.
        self._storage = None

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._storage = None


def _grown(stored: Tensor, capacity: int) -> Tensor:
    """The columns [B, Hkv, S, D] with room behind them: zeros, since masked is not unread."""
    grown = stored.new_zeros(stored.shape[0], stored.shape[1], capacity, stored.shape[3])
    grown[:, :, : stored.shape[2]] = stored
    return grown


def new_cache(
    model: PreTrainedModel, *, num_rows: int, length: int = 0, offloading: bool = False
) -> Cache:
    """An empty cache for ``num_rows`` rows, with room for ``length`` columns from the start.

    A sliding layer keeps the last columns of all rows together. Where rows accept different numbers
    of tokens those are not the last positions of each, so in a batch every layer keeps all columns
    and the window is a matter of the mask alone.
    """
    config = model.config.get_text_config(decoder=True)
    if offloading:
        # The library moves what a layer has from device to device.
        layers = DynamicCache(config=config).layers
        if num_rows > 1:
            layers = [DynamicLayer() for _ in layers]
        return Cache(layers=layers, offloading=True)
    cache = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        if num_rows > 1 or type(layer) is DynamicLayer:
            cache.layers[index] = GrowingLayer(length)
    return cache


def keep_accepted(cache: Cache, *, sources: Tensor, targets: Tensor, num_dropped: int) -> None:
    """Move columns of the cache, then cut ``num_dropped`` columns off its end.

    Both are counted from the end of the cache, since a sliding layer has fewer columns than others.
    A row that keeps fewer columns than another repeats one of its own pairs.

    Args:
        cache: after the pass over the tree.
        sources: [B, M] columns to keep, as negative numbers.
        targets: [B, M] where they go; at or before the source, so nothing is overwritten unread.
        num_dropped: what is left behind the longest row.
    """
    if not torch.equal(sources, targets):
        for layer in cache.layers:
            assert isinstance(layer, DynamicLayer)
            for stored in (layer.keys, layer.values):
                assert stored is not None
                _move(stored, sources.to(stored.device), targets.to(stored.device))
    # Of zero columns too: sliding layers drop what has left the window.
    cache.crop(-num_dropped)


def _move(stored: Tensor, sources: Tensor, targets: Tensor) -> None:
    num_columns = stored.shape[2]
    if len(sources) == 1:
        kept = stored.index_select(2, sources[0] + num_columns)
        stored.index_copy_(2, targets[0] + num_columns, kept)
        return
    rows = torch.arange(len(sources), device=stored.device)[:, None]
    stored[rows, :, targets + num_columns] = stored[rows, :, sources + num_columns]
