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

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from medusa_train.errors import InputError

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class CachePlan:
    """How a model's layers attend.

    Attributes:
        layers: kind of layer (the library's name) → index of the first layer of that kind. One
            entry means that the model takes one mask; several, that it takes a mapping.
        num_layers: layers that have a cache.
        window: positions that a query of a sliding layer sees, itself included; None without such
            layers.
    """

    layers: dict[str, int]
    num_layers: int
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
    return CachePlan(kinds, len(layers), next(iter(windows), None))


def new_cache(
    model: PreTrainedModel, plan: CachePlan, *, num_rows: int, offloading: bool = False
) -> Cache:
    """An empty cache for ``num_rows`` rows.

    A sliding layer keeps the last columns of all rows together. Where rows accept different numbers
    of tokens those are not the last positions of each, so in a batch every layer keeps all columns
    and the window is a matter of the mask alone.
    """
    if num_rows > 1 and plan.window is not None:
        layers = [DynamicLayer() for _ in range(plan.num_layers)]
        return Cache(layers=[*layers], offloading=offloading)
    return DynamicCache(config=model.config.get_text_config(decoder=True), offloading=offloading)


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
