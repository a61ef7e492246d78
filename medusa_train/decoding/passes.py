"""Forward passes of the base model: over prompts, and over the nodes of a tree.

Shapes: B rows, T tokens, N tree nodes, D hidden, V rows of ``lm_head``, C columns of a cache's
storage, Hkv heads, S head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from medusa_train.base_model.packed_linear import PackedLinears
from medusa_train.decoding.cache import GrowingLayer
from medusa_train.decoding.masks import Mask

Outputs = tuple[Tensor, Tensor]
"""Logits [B, T, V], and the input of ``lm_head`` [B, T, D] at the same positions."""


class Passes:
    """Runs a model as it is.

    Args:
        model: the base model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._seen: Tensor | None = None
        self._packed = PackedLinears(model)

    @contextmanager
    def ready(self, *, num_tokens: int) -> Iterator[None]:
        """Run passes inside the block only; most of them have ``num_tokens`` rows of tokens."""
        hook = self.model.get_output_embeddings().register_forward_pre_hook(self._see)
        try:
            with self._weights(num_tokens):
                yield
        finally:
            hook.remove()
            self._seen = None

    def _weights(self, num_tokens: int) -> Any:
        return self._packed.in_use(num_rows=num_tokens)

    def _see(self, _module: Any, arguments: tuple[Tensor, ...]) -> None:
        self._seen = arguments[0]

    def __call__(self, **inputs: Any) -> Outputs:
        """One pass with the arguments of the model's forward."""
        logits: Tensor = self.model(**inputs, use_cache=True, return_dict=True).logits
        assert self._seen is not None, "the model's logits do not come from its output embedding"
        return logits, self._seen

    def over_tree(
        self, cache: Cache, *, input_ids: Tensor, position_ids: Tensor, attention_mask: Mask
    ) -> Outputs:
        """A pass over tree nodes [B, N], whose keys and values go behind those in the cache."""
        return self(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            cache=cache,
        )


class CompiledPasses(Passes):
    """Runs the passes over a tree as code that ``torch.compile`` made for its number of nodes.

    On a CPU the weights become constants of that code, laid out for its matrix units, so a change
    of the model's weights is not seen any more. Only passes of one row over a cache of growing
    layers are compiled, since the rows of a batch become fewer from step to step; others run as in
    :class:`Passes`.

    Args:
        model: the base model; its weights must not change.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        options: dict[str, Any] = {"freezing": True} if model.device.type == "cpu" else {}
        self._compiled: Callable[..., Outputs] = torch.compile(
            self._over_storage, dynamic=False, options=options
        )

    @contextmanager
    def _weights(self, num_tokens: int) -> Iterator[None]:
        del num_tokens
        yield

    def over_tree(
        self, cache: Cache, *, input_ids: Tensor, position_ids: Tensor, attention_mask: Mask
    ) -> Outputs:
        """A pass over tree nodes [B, N], whose keys and values go behind those in the cache."""
        layers = [layer for layer in cache.layers if isinstance(layer, GrowingLayer)]
        is_mapping = isinstance(attention_mask, dict)
        if len(input_ids) > 1 or is_mapping or len(layers) < len(cache.layers):
            return super().over_tree(
                cache,
                input_ids=input_ids,
                position_ids=position_ids,
                attention_mask=attention_mask,
            )
        assert isinstance(attention_mask, Tensor)
        num_nodes, before = input_ids.shape[1], layers[0].get_seq_length()
        stored = [layer.reserve(num_nodes) for layer in layers]
        capacity = stored[0][0].shape[2]
        hidden = attention_mask.new_full((1,), torch.finfo(attention_mask.dtype).min)
        behind = hidden.expand(*attention_mask.shape[:3], capacity - attention_mask.shape[3])
        mask = torch.cat([attention_mask, behind], dim=3)
        # One code for every size of the storage.
        torch._dynamo.mark_dynamic(mask, 3)
        for pair in stored:
            for tensor in pair:
                torch._dynamo.mark_dynamic(tensor, 2)
        outputs = self._compiled(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=mask,
            columns=torch.arange(before, before + num_nodes, device=input_ids.device),
            keys=[keys for keys, _ in stored],
            values=[values for _, values in stored],
        )
        for layer in layers:
            layer.show(before + num_nodes)
        return outputs

    def _over_storage(
        self, *, columns: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], **inputs: Tensor
    ) -> Outputs:
        """A pass with the cache's storages [1, Hkv, C, S], which all calls of a size share."""
        layers = [_WrittenLayer(*pair, columns) for pair in zip(keys, values, strict=True)]
        return self(**inputs, cache=Cache(layers=[*layers]))


class _WrittenLayer(DynamicLayer):
    """A cache layer of a fixed size [1, Hkv, C, S], written at given columns; masks hide others."""

    def __init__(self, keys: Tensor, values: Tensor, columns: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values = keys, values
        self.columns = columns
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new columns [1, Hkv, N, S]; returns all columns."""
        assert self.keys is not None
        assert self.values is not None
        self.keys.index_copy_(2, self.columns, key_states)
        self.values.index_copy_(2, self.columns, value_states)
        return self.keys, self.values
