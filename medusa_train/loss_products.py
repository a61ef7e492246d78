"""The two products that carry a chunk's gradient on: to the hidden states and to the weight.

A softmax over a vocabulary has few numbers of any size. On a CPU in bf16, where these products
take most of the time of the loss, a slice of rows leaves out the columns in which none of its rows
has a gradient of :data:`SMALLEST` or more (the gradient filter of Wijmans et al. 2024, "Cut your
losses", arXiv 2411.09009, section 3.3). A row's gradients add up to zero, so the sum of what was
left out is known; the hidden states get it times the mean row of the weight. The loss itself is
that of the whole vocabulary. In fp32, and elsewhere, nothing is left out.

Shapes: n rows of a chunk, D hidden, V rows of a head's ``lm_head``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from medusa_train.loss_memory import LossMemory

BLOCK_ELEMENTS = 1 << 21
"""Elements that a CPU passes over several times before it goes on: they stay in its cache."""

SMALLEST = 2.0**-12
"""A row's probabilities add up to 1; bf16 keeps 8 bits of each."""

SLICE_ROWS = 128
"""Rows that share their columns: more have more columns between them, fewer make more products."""

ROW_STEP, COLUMN_STEP = 64, 1_024
"""A CPU's library keeps code and memory for every shape of a product, so there are only a few."""

FEWEST_COLUMNS = 1 << 14
"""Of fewer columns none is left out: choosing them would cost more than their products."""

_MAGNITUDE = 0x7FFF
"""All bits of a bf16 but its sign; as whole numbers they have the order of the magnitudes."""


def add_products(
    slopes: Tensor,
    hidden_states: Tensor,
    weight: Tensor,
    *,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
    leaves_out: bool = True,
    memory: LossMemory | None = None,
) -> None:
    """Set a chunk's gradient of the hidden states, and add its part to the weight's.

    Args:
        slopes: [n, V] the gradient of the logits.
        hidden_states: [n, D] of the dtype of ``slopes``, as ``weight``.
        weight: [V, D].
        grad_hidden: [n, D], is set to ``slopes @ weight``; None where nobody needs it.
        grad_weight: [V, D], has ``slopes.T @ hidden_states`` added; None where nobody needs it.
        leaves_out: whether small gradients may be left out; only for rows that add up to zero.
        memory: large tensors of an earlier call, used again.
    """
    is_fast = slopes.dtype == torch.bfloat16 and slopes.device.type == "cpu"
    if not (leaves_out and is_fast and slopes.shape[1] >= FEWEST_COLUMNS):
        if grad_hidden is not None:
            grad_hidden.copy_(slopes @ weight)
        if grad_weight is not None:
            _add_whole(grad_weight, slopes, hidden_states)
        return
    if grad_hidden is None and grad_weight is None:
        return
    mean = _mean_row(weight)
    shape = (min(SLICE_ROWS, len(slopes)), slopes.shape[1])
    scratch = (memory or LossMemory()).empty("magnitudes", shape, like=slopes, dtype=torch.int16)
    for start in range(0, len(slopes), SLICE_ROWS):
        rows = slice(start, start + SLICE_ROWS)
        columns, count = _filled_up(
            large_columns(slopes[rows], scratch=scratch), most=slopes.shape[1]
        )
        chosen = slopes[rows].index_select(1, columns)
        chosen[:, count:] = 0.0
        if grad_hidden is not None:
            grad_hidden[rows] = chosen @ weight.index_select(0, columns)
            left_out = -chosen.sum(dim=1, dtype=grad_hidden.dtype)
            grad_hidden[rows].addr_(left_out, mean)
        if grad_weight is not None:
            part = (chosen.T @ hidden_states[rows]).to(grad_weight.dtype)
            grad_weight.index_add_(0, columns, part)


def large_columns(slopes: Tensor, *, scratch: Tensor) -> Tensor:
    """The columns of bf16 [n, V] in which any magnitude is :data:`SMALLEST` or more, or no number.

    Args:
        slopes: [n, V].
        scratch: [n or more, V] int16, overwritten: fresh memory costs more than the work.

    Returns:
        [m] int64, ascending.
    """
    least = torch.tensor(SMALLEST, dtype=torch.bfloat16).view(torch.int16)
    magnitudes = scratch[: len(slopes)]
    torch.bitwise_and(slopes.view(torch.int16), _MAGNITUDE, out=magnitudes)
    return (magnitudes.amax(dim=0) >= least).nonzero().squeeze(1)


def row_step(chunk_size: int, *, device: torch.device) -> int:
    """The rows of a chunk are a multiple of this, those behind its own zero."""
    return min(ROW_STEP, chunk_size) if device.type == "cpu" else 1


def _filled_up(columns: Tensor, *, most: int) -> tuple[Tensor, int]:
    """Column 0 behind the columns, up to a whole step; and how many there were."""
    count = len(columns)
    size = min(most, max(1, -(-count // COLUMN_STEP)) * COLUMN_STEP)
    return torch.nn.functional.pad(columns, (0, size - count)), count


def blocks(matrix: Tensor) -> Iterator[slice]:
    """Slices of the rows of a matrix [n, m]: what a CPU's cache holds, elsewhere all of them."""
    step = block_rows(matrix)
    for start in range(0, len(matrix), step):
        yield slice(start, min(start + step, len(matrix)))


def block_rows(matrix: Tensor) -> int:
    """How many rows of a matrix [n, m] are passed over at a time."""
    num_rows, width = matrix.shape
    most = BLOCK_ELEMENTS // width if matrix.device.type == "cpu" else num_rows
    return max(1, min(most, num_rows))


def _mean_row(weight: Tensor) -> Tensor:
    """[D] in fp32; a product is the fastest sum of so many rows."""
    ones = weight.new_full((1, len(weight)), 1.0)
    return (ones @ weight)[0].float() / len(weight)


def _add_whole(total: Tensor, left: Tensor, right: Tensor) -> None:
    """``total`` [V, D] += left.T @ right, for [n, V] and [n, D]."""
    if total.dtype == left.dtype:
        total.addmm_(left.T, right)
        return
    for rows in blocks(total):
        total[rows] += (left[:, rows].T @ right).to(total.dtype)
