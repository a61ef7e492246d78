"""Linear layers whose weights are laid out once for the CPU's matrix units.

With bfloat16 weights the library oneDNN rearranges a weight at each product; for batches of some
hundred rows that costs as much as the product. PyTorch's own compiler lays weights out ahead by
the operators used here. The sums are the same, in the same order.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

# The copies live beside the weights; a model beyond this size gains less and needs its memory.
MAX_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class _Copy:
    """A weight as it was laid out.

    Attributes:
        packed: the weight for the operators.
        source: where the weight was, and a sum of its bits.
        num_rows: that it was laid out for.
    """

    packed: Tensor
    source: tuple[int, int]
    num_rows: int


_Copies = weakref.WeakKeyDictionary[nn.Linear, _Copy]


class PackedLinears:
    """Packed copies of a model's weights, which last as long as this object.

    Laying out takes as long as a few passes, and its memory is that of the weights once more. So
    the copies stay between uses; only those of weights that changed are made again.

    Args:
        model: the model, whose linear layers may change between uses.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._copies: _Copies = weakref.WeakKeyDictionary()

    @contextmanager
    def in_use(self, *, num_rows: int) -> Iterator[bool]:
        """Let the linear layers use packed weights inside the block; none may change in there.

        Only bfloat16 on a CPU that multiplies it, without gradients; any other model stays as it
        is.

        Args:
            num_rows: how many rows a product usually has.

        Yields:
            Whether packed weights are in use.
        """
        layers = [module for module in self.model.modules() if type(module) is nn.Linear]
        num_bytes = sum(layer.weight.nbytes for layer in layers)
        if not all(map(_can_pack, layers)) or num_bytes > MAX_BYTES:
            self._copies.clear()
            yield False
            return
        try:
            for layer in layers:
                packed = self._packed(layer, num_rows=num_rows)
                layer.forward = partial(_forward, packed, layer.bias)  # type: ignore[method-assign]
            yield True
        finally:
            for layer in layers:
                layer.__dict__.pop("forward", None)

    def _packed(self, layer: nn.Linear, *, num_rows: int) -> Tensor:
        weight = layer.weight.detach()
        source = (weight.data_ptr(), _sum_of_bits(weight))
        known = self._copies.get(layer)
        if known is not None and (known.source, known.num_rows) == (source, num_rows):
            return known.packed
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, num_rows)
        self._copies[layer] = _Copy(packed, source, num_rows)
        return packed


@contextmanager
def packed_linears(model: PreTrainedModel, *, num_rows: int) -> Iterator[bool]:
    """Let the linear layers of ``model`` use packed weights inside the block, and keep no copy.

    Args:
        model: see :meth:`PackedLinears.in_use`.
        num_rows: how many rows a product usually has.

    Yields:
        Whether packed weights are in use.
    """
    with PackedLinears(model).in_use(num_rows=num_rows) as are_used:
        yield are_used


def _sum_of_bits(weight: Tensor) -> int:
    """What shows that a weight was written to, by whatever way: a twentieth of laying it out.

    The version that torch counts is no sign: adapters are merged through ``weight.data``.
    """
    words = weight.flatten()
    fills = not (words.storage_offset() % 4 or words.numel() % 4)
    return int(words.view(torch.int64 if fills else torch.int16).sum())


def _can_pack(layer: nn.Linear) -> bool:
    return (
        layer.weight.device.type == "cpu"
        and layer.weight.dtype == torch.bfloat16
        and "forward" not in layer.__dict__
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def _forward(packed: Tensor, bias: Tensor | None, hidden: Tensor) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, packed, bias, "none", [], "")
    return result
