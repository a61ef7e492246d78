"""Label offsets and the chunked cross-entropy over K heads. Pure tensors.

Shapes: N positions, D hidden, V rows of a head's ``lm_head``, K heads.

The logits of K heads over a vocabulary are the memory of head training, so they are never held:
:func:`chunked_cross_entropy` computes a chunk of rows, its loss and its gradients at once, and
keeps only the gradients of the hidden states and of the weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

IGNORE = -100
"""The label of a pair that is not valid: no loss, no gradient, not counted."""

CHUNK_ELEMENTS = 1 << 23
"""Logits of one chunk when no chunk size is given. Of the sizes tried on a 2-core CPU (2^21 to
2^26) the fastest: large enough for the products, small enough for the softmax to stay in cache."""


def label_offset(k: int) -> int:
    """How far ahead of its source position head ``k`` (0-based) predicts: t → t + 2 + k.

    ``lm_head`` itself predicts t + 1 (paper, section 2.1.1).
    """
    return k + 2


def head_weights(num_heads: int, *, decay: float) -> list[float]:
    """The weight λ of each head's loss: head n (1-based) has ``decay ** n`` (paper, eq. 1)."""
    return [decay**n for n in range(1, num_heads + 1)]


def default_chunk_size(vocab_size: int) -> int:
    """Rows per chunk for a projection to ``vocab_size`` logits."""
    return max(1, CHUNK_ELEMENTS // vocab_size)


class HeadLoss(NamedTuple):
    """What :func:`chunked_cross_entropy` returns.

    Attributes:
        loss_sum: [] the sum of the cross-entropy over the rows; has a gradient.
        ranks: [N] int64 rank of each row's true token, or an empty tensor where not asked for.
    """

    loss_sum: Tensor
    ranks: Tensor


def chunked_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    *,
    labels: Tensor,
    bias: Tensor | None = None,
    chunk_size: int | None = None,
    compute_dtype: torch.dtype | None = None,
    with_ranks: bool = False,
) -> HeadLoss:
    """Summed cross-entropy of ``softmax(hidden_states @ weight.T + bias)`` against ``labels``.

    Args:
        hidden_states: [N, D] the output of a head's ResBlocks.
        weight: [V, D] the head's ``lm_head``.
        labels: [N] int64 true tokens; every one in [0, V).
        bias: [V] or None.
        chunk_size: rows whose logits exist at one time; None chooses by V.
        compute_dtype: dtype of the matrix products; None is that of ``hidden_states``. The softmax
            and the sums are fp32 (or fp64 for fp64 input).
        with_ranks: whether to count, per row, the tokens that come before the true one.

    Returns:
        The loss sum and, if asked for, the ranks.
    """
    loss_sum, ranks = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_states,
        weight,
        bias,
        labels,
        chunk_size or default_chunk_size(weight.shape[0]),
        compute_dtype or hidden_states.dtype,
        with_ranks,
    )
    return HeadLoss(loss_sum, ranks)


def ranks_of(logits: Tensor, labels: Tensor) -> Tensor:
    """The rank of each true token: tokens with a greater logit plus equal ones with a smaller id.

    Args:
        logits: [N, V], fp32 where exact ranks matter.
        labels: [N] int64 in [0, V).

    Returns:
        [N] int64; 0 is the token that an argmax would choose.
    """
    true = logits.gather(1, labels[:, None])
    greater = (logits > true).sum(dim=1)
    equal = logits == true
    # Ties are rare in fp32, so look at the rows that have one only.
    tied = (equal.sum(dim=1) > 1).nonzero().squeeze(1)
    if tied.numel():
        ids = torch.arange(logits.shape[1], device=logits.device)
        before = equal[tied] & (ids[None, :] < labels[tied, None])
        greater[tied] += before.sum(dim=1)
    return greater


class _ChunkedCrossEntropy(Function):
    """The gradients are computed with the loss, chunk by chunk; backward only scales them."""

    @staticmethod
    def forward(  # noqa: PLR0917 — autograd passes no keywords
        ctx: Any,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        chunk_size: int,
        compute_dtype: torch.dtype,
        with_ranks: bool,
    ) -> tuple[Tensor, Tensor]:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        accumulate = torch.float64 if hidden_states.dtype == torch.float64 else torch.float32
        x = hidden_states.detach().to(compute_dtype)
        w = weight.detach().to(compute_dtype)
        num_rows, vocab_size = x.shape[0], w.shape[0]
        grad_hidden = torch.zeros_like(x, dtype=accumulate) if needs_hidden else None
        grad_weight = torch.zeros_like(w, dtype=accumulate) if needs_weight else None
        grad_bias = w.new_zeros(vocab_size, dtype=accumulate) if needs_bias else None
        loss_sum = x.new_zeros((), dtype=accumulate)
        ranks = []
        # One buffer for all chunks: a fresh one a chunk costs more in page faults than its softmax.
        buffer = x.new_empty((min(chunk_size, num_rows), vocab_size), dtype=accumulate)
        for start in range(0, num_rows, chunk_size):
            rows = slice(start, start + chunk_size)
            logits = buffer[: x[rows].shape[0]]
            logits.copy_(x[rows] @ w.T)
            if bias is not None:
                logits += bias.detach()
            if with_ranks:
                ranks.append(ranks_of(logits, labels[rows]))
            loss_sum += _softmax_minus_onehot(logits, labels[rows])
            if not (needs_hidden or needs_weight or needs_bias):
                continue
            grad_logits = logits.to(compute_dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = (grad_logits @ w).to(accumulate)
            if grad_weight is not None:
                grad_weight += grad_logits.T @ x[rows]
            if grad_bias is not None:
                grad_bias += logits.sum(dim=0)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = (hidden_states.dtype, weight.dtype, None if bias is None else bias.dtype)
        all_ranks = torch.cat(ranks) if ranks else labels.new_empty(0)
        ctx.mark_non_differentiable(all_ranks)
        return loss_sum, all_ranks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale = grads[0]
        # In place: a weight's gradient is as large as the weight, and backward runs once.
        scaled = [
            None if saved is None else saved.mul_(scale).to(dtype)
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None, None, None)


def _softmax_minus_onehot(logits: Tensor, labels: Tensor) -> Tensor:
    """Turn logits [n, V] in place into their gradient; return the summed cross-entropy []."""
    logits -= logits.amax(dim=1, keepdim=True)
    true = logits.gather(1, labels[:, None])
    logits.exp_()
    total = logits.sum(dim=1, keepdim=True)
    loss = (total.log() - true).sum()
    logits /= total
    logits.scatter_add_(1, labels[:, None], torch.full_like(true, -1.0))
    return loss
