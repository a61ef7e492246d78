"""Attention of one query per slot, without work on positions that a row does not have.

The library's sdpa function reads every row up to the longest one's length. Rows of a batch differ
much in length, and on a CPU reading keys and values is the greatest cost of a step, so here
attention runs over groups of neighbouring slots, each up to its own longest row, and grouped
heads share their keys inside the kernel. It is registered with the library, so that no model is
touched; what it does not know goes to the library's own function.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "medusa_slots"
# Keywords that models pass on and that change nothing here: masks and positions are explicit.
HARMLESS = frozenset({"sliding_window", "position_ids", "is_causal", "use_cache"})
MIN_GROUP_ROWS = 16
MAX_GROUPS = 8

# (first row, end row, length) of each group; set around each step.
Groups = tuple[tuple[int, int, int], ...]
_groups: ContextVar[Groups | None] = ContextVar("medusa_slot_groups", default=None)


def slot_attention_forward(  # noqa: PLR0917 — the library's signature
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in the form that models of the library call; returns [n, T, H, D].

    Args:
        module: the attention module.
        query: [n, H, T, D].
        key: [n, Hkv, L, D].
        value: [n, Hkv, L, D].
        attention_mask: additive, [n or 1, 1, T, L].
        dropout: 0 outside training.
        scaling: of the scores.
        **kwargs: what this function does not know is left to the library's sdpa function.
    """
    unknown = any(v is not None for k, v in kwargs.items() if k not in HARMLESS)
    if unknown or attention_mask is None or dropout:
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return result
    groups = _groups.get() if query.shape[2] == 1 else None
    if groups is None or attention_mask.shape[0] == 1:
        groups = ((0, len(query), key.shape[2]),)
    is_grouped = query.shape[1] != key.shape[1]
    parts = [
        F.scaled_dot_product_attention(
            query[first:end],
            key[first:end, :, :length],
            value[first:end, :, :length],
            attn_mask=attention_mask[first:end, :, :, :length],
            scale=scaling,
            enable_gqa=is_grouped,
        )
        for first, end, length in groups
    ]
    attended = parts[0] if len(parts) == 1 else torch.cat(parts)
    return attended.transpose(1, 2).contiguous(), None


def group_rows(positions: Sequence[int]) -> Groups:
    """Groups of neighbouring rows, each with the length that its greatest position needs."""
    size = max(MIN_GROUP_ROWS, -(-len(positions) // MAX_GROUPS))
    starts = range(0, len(positions), size)
    return tuple(
        (first, min(first + size, len(positions)), max(positions[first : first + size]) + 1)
        for first in starts
    )


@contextmanager
def grouped(groups: Groups | None) -> Iterator[None]:
    """Let steps inside the block attend by ``groups``."""
    token = _groups.set(groups)
    try:
        yield
    finally:
        _groups.reset(token)


@contextmanager
def slot_attention(model: PreTrainedModel) -> Iterator[bool]:
    """Let ``model`` use this attention inside the block, if it uses the library's sdpa now.

    Another choice of the user's (eager, say) stays. Yields whether it is in use.
    """
    if model.config._attn_implementation != "sdpa" or not model._supports_attention_backend:
        yield False
        return
    AttentionInterface.register(NAME, slot_attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    try:
        yield True
    finally:
        model.set_attn_implementation("sdpa")
