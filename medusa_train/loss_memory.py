"""Large tensors that the loss of one step leaves for the next.

A C library gives large blocks back to the system as soon as they are freed, and a page that is
touched for the first time costs a CPU ten times what reading it does. The loss needs the same large
tensors for every head and step, so a training run keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class LossMemory:
    """Named tensors, each kept until another shape or dtype is asked for under its name.

    One loss at a time may use it. What a loss returns may lie in it too: the gradient of a weight
    is overwritten by the next loss that is given this object.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def empty(self, name: str, shape: Sequence[int], *, like: Tensor, dtype: torch.dtype) -> Tensor:
        """A tensor of any contents on the device of ``like``.

        It is another tensor object each time, so that autograd may take it for its own.
        """
        kept = self._kept.get(name)
        known = (torch.Size(shape), dtype, like.device)
        if kept is None or (kept.shape, kept.dtype, kept.device) != known:
            kept = torch.empty(shape, dtype=dtype, device=like.device)
            self._kept[name] = kept
        return kept.detach()
