"""Hidden states in one byte a number: int8 with a scale of its own for every row.

Shapes: N source positions, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 127
"""int8 reaches from -127 to 127 here, the same on both sides of zero."""


def quantise_rows(states: Tensor) -> tuple[Tensor, Tensor]:
    """The nearest multiples of each row's scale, its greatest magnitude ÷ 127.

    Args:
        states: [N, D] of any float type.

    Returns:
        int8 [N, D] and fp32 scales [N]. No finite number is off by more than half its row's scale
        (and rounding in fp32); the scale of a row that is not finite is not finite either, so that
        the row is not taken for a good one.
    """
    values = states.float()
    scales = values.abs().amax(dim=1) / STEPS
    # A row of zeros has the scale 0.
    divisors = scales.where(scales != 0, 1.0)
    steps = (values / divisors[:, None]).round_().clamp_(-STEPS, STEPS)
    return steps.nan_to_num_(nan=0.0).to(torch.int8), scales


def dequantise_rows(steps: Tensor, scales: Tensor) -> Tensor:
    """fp32 [N, D] from int8 [N, D] and scales [N]."""
    return steps.float().mul_(scales[:, None])
