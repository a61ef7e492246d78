"""Counts the matrix products inside a block, and their FLOPs."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# Where the two factors are among the arguments of each.
_FACTORS = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::addmm_": (1, 2)}


class CountProducts(TorchDispatchMode):
    """Unlike torch's own counter it knows products that add to their result in place."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        factors = _FACTORS.get(func._schema.name)
        if factors is not None:
            left, right = (args[i] for i in factors)
            self.count += 1
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))
