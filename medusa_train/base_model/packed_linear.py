"""Linear layers whose weights are laid out once for the CPU's matrix units.

With bfloat16 weights the library oneDNN rearranges a weight at each product; for batches of some
hundred rows that costs as much as the product. PyTorch's own compiler lays weights out ahead by
the operators used here. The sums are the same, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

# The copies live beside the weights; a model beyond this size gains less and needs its memory.
MAX_BYTES = 2**30


@contextmanager
def packed_linears(model: PreTrainedModel, *, num_rows: int) -> Iterator[bool]:
    """Let the linear layers of ``model`` use packed copies of their weights inside the block.

    Only bfloat16 on a CPU that multiplies it, without gradients; any other model stays as it is.

    Args:
        model: its weights must not change inside the block.
        num_rows: how many rows a product usually has.

    Yields:
        Whether packed weights are in use.
    """
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    num_bytes = sum(layer.weight.nbytes for layer in layers)
    if not all(map(_can_pack, layers)) or num_bytes > MAX_BYTES:
        yield False
        return
    try:
        for layer in layers:
            packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), num_rows)
            layer.forward = partial(_forward, packed, layer.bias)  # type: ignore[method-assign]
        yield True
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _can_pack(layer: nn.Linear) -> bool:
    return (
        layer.weight.device.type == "cpu"
        and layer.weight.dtype == torch.bfloat16
        and "forward" not in layer.__dict__
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def _forward(packed: torch.Tensor, bias: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(hidden, packed, bias, "none", [], "")
    return result
