"""Which positions a query sees: explicit 4-D masks for slots of different lengths.

Masks are additive, which both of the library's plain attention implementations take; sliding
windows are a matter of the mask alone, on a cache that keeps every position.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from medusa_train.errors import InputError

Mask = torch.Tensor | dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How a model's layers attend.

    Attributes:
        num_layers: the layers that have a cache.
        windows: kind of layer (the library's name) → sliding window, None for full attention. One
            entry means that the model takes one mask; several, that it takes a mapping.
        max_length: the greatest number of positions, None if the model names none.
    """

    num_layers: int
    windows: Mapping[str, int | None]
    max_length: int | None

    def step_mask(self, positions: torch.Tensor, *, length: int, dtype: torch.dtype) -> Mask:
        """For one query per row at ``positions`` [n] and ``length`` keys: [n, 1, 1, length]."""
        return self._masks(positions[:, None, None, None], length=length, dtype=dtype)

    def prompt_mask(
        self, *, start: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> Mask:
        """For queries at start … start + length - 1: [1, 1, length, start + length].

        Prompts are padded on the right, so causality alone hides the padding from real queries.
        """
        queries = torch.arange(start, start + length, device=device)
        return self._masks(queries[None, None, :, None], length=start + length, dtype=dtype)

    def _masks(self, queries: torch.Tensor, *, length: int, dtype: torch.dtype) -> Mask:
        keys = torch.arange(length, device=queries.device)
        seen = keys <= queries
        masks = {}
        for kind, window in self.windows.items():
            visible = seen if window is None else seen & (keys > queries - window)
            zeros = torch.zeros(visible.shape, dtype=dtype, device=queries.device)
            masks[kind] = zeros.masked_fill_(~visible, torch.finfo(dtype).min)
        return masks if len(masks) > 1 else next(iter(masks.values()))


def attention_plan(model: PreTrainedModel) -> AttentionPlan:
    """Read from the model's own cache how its layers attend.

    Raises:
        InputError: the model keeps something else than keys and values per position.
    """
    name = type(model).__name__
    parameters = inspect.signature(model.forward).parameters
    if not {"cache", "position_ids", "logits_to_keep"} <= parameters.keys():
        raise InputError(
            f"base_model: {name} takes no cache with explicit positions; "
            "it cannot generate in process"
        )
    config = model.config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers
    windows: dict[str, int | None] = {}
    for layer in layers:
        if type(layer) is DynamicSlidingWindowLayer:
            windows["sliding_attention"] = layer.sliding_window
        elif type(layer) is DynamicLayer:
            windows["full_attention"] = None
        else:
            raise InputError(
                f"base_model: {name} keeps state in {type(layer).__name__}, not keys and values "
                "per position; it cannot generate in process"
            )
    max_length = getattr(config, "max_position_embeddings", None)
    return AttentionPlan(len(layers), windows, max_length)
