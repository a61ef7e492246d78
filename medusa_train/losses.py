"""Label offsets and the chunked cross-entropy over K heads. Pure tensors.

Shapes: N positions, D hidden, V rows of a head's ``lm_head``, K heads.

The logits of K heads over a vocabulary are the memory of head training, so they are never held:
:func:`chunked_cross_entropy` computes a chunk of rows, its loss and its gradients at once, and
keeps only the gradients of the hidden states and of the weight. Labels may be mixed with soft
targets, the base's own distribution at the target position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from medusa_train.loss_memory import LossMemory
from medusa_train.loss_products import add_products, block_rows, blocks, row_step
from medusa_train.loss_targets import SoftTargets, StoredTargets, StoredTeacher, Teacher

IGNORE = -100
"""The label of a pair that is not valid: no loss, no gradient, not counted."""

CHUNK_ELEMENTS = 1 << 25
"""Logits of one chunk when no chunk size is given: many rows make fast products."""

_HOPELESS = 1e-30
"""A probability below this has few bits in fp32, or none."""


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


class LogitAdjust(NamedTuple):
    """What a model does to its logits after ``lm_head``, elementwise.

    Attributes:
        apply: [..., V] → [..., V].
        slope: the derivative of ``apply``, from what it returned.
    """

    apply: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


def chunked_cross_entropy(
    hidden_states: Tensor,
    weight: Tensor,
    *,
    labels: Tensor,
    bias: Tensor | None = None,
    teacher: Teacher | StoredTeacher | None = None,
    teacher_states: Tensor | None = None,
    chunk_size: int | None = None,
    compute_dtype: torch.dtype | None = None,
    with_ranks: bool = False,
    num_candidates: int | None = None,
    memory: LossMemory | None = None,
    gradient_memory: LossMemory | None = None,
    adjust: LogitAdjust | None = None,
    leaves_out: bool = True,
) -> HeadLoss:
    """Summed cross-entropy of ``softmax(hidden_states @ weight.T + bias)`` against ``labels``.

    Args:
        hidden_states: [N, D] the output of a head's ResBlocks.
        weight: [V, D] the head's ``lm_head``.
        labels: [N] int64 true tokens; every one in [0, V).
        bias: [V] or None.
        teacher: gives soft targets, mixed with the labels; None for the labels alone.
        teacher_states: [N, D] the base's hidden state at the token before each row's target; not
            needed where the targets are stored.
        chunk_size: rows whose logits exist at one time; None chooses by V.
        compute_dtype: dtype of the matrix products; None is that of ``hidden_states``. The softmax
            and the sums are fp32 (or fp64 for fp64 input).
        with_ranks: whether to count, per row, the tokens that come before the true one.
        num_candidates: how many of the V logits, from the first, stand for tokens and have a rank;
            None is all.
        memory: large tensors of an earlier loss, used again; any heads may share it.
        gradient_memory: holds the weight's gradient, which the next loss with this object
            overwrites; only for callers that have dropped the gradient by then.
        adjust: what is done to the logits before the softmax; None is nothing.
        leaves_out: whether the products may leave small gradients out
            (:mod:`medusa_train.loss_products`). Not where two distributions are nearly the same,
            since then all are small; and never with ``adjust``.

    Returns:
        The loss sum and, if asked for, the ranks.
    """
    if not torch.is_grad_enabled():
        # A Function computes what its inputs ask for, whether or not anyone will read it.
        hidden_states, weight = hidden_states.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
    loss_sum, ranks = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_states,
        weight,
        bias,
        labels,
        teacher,
        teacher_states,
        chunk_size or default_chunk_size(weight.shape[0]),
        compute_dtype or hidden_states.dtype,
        (num_candidates or weight.shape[0]) if with_ranks else 0,
        memory or LossMemory(),
        gradient_memory or LossMemory(),
        adjust,
        leaves_out and adjust is None,
    )
    return HeadLoss(loss_sum, ranks)


def ranks_of(logits: Tensor, labels: Tensor, *, scratch: Tensor | None = None) -> Tensor:
    """The rank of each true token: tokens with a greater logit plus equal ones with a smaller id.

    Args:
        logits: [N, V], fp32 where exact ranks matter.
        labels: [N] int64 in [0, V).
        scratch: [N, V] fp32 or fp64, overwritten; None takes fresh memory.

    Returns:
        [N] int64; 0 is the token that an argmax would choose.
    """
    true = logits.gather(1, labels[:, None])
    if scratch is None:
        scratch = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    # Ones that are floats: a CPU adds them up in a thirtieth of the time of truth values.
    greater = torch.gt(logits, true, out=scratch).sum(dim=1).long()
    not_less = torch.ge(logits, true, out=scratch).sum(dim=1).long()
    # Ties are rare in fp32, so look at the rows that have one only.
    tied = (not_less - greater > 1).nonzero().squeeze(1)
    if tied.numel():
        ids = torch.arange(logits.shape[1], device=logits.device)
        before = (logits[tied] == true[tied]) & (ids[None, :] < labels[tied, None])
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
        teacher: Teacher | StoredTeacher | None,
        teacher_states: Tensor | None,
        chunk_size: int,
        compute_dtype: torch.dtype,
        num_ranked: int,
        memory: LossMemory,
        gradient_memory: LossMemory,
        adjust: LogitAdjust | None,
        leaves_out: bool,
    ) -> tuple[Tensor, Tensor]:
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        accumulate = torch.float64 if hidden_states.dtype == torch.float64 else torch.float32
        x = hidden_states.detach().to(compute_dtype)
        w = _cast(weight.detach(), compute_dtype, memory)
        (num_rows, _), vocab_size = x.shape, w.shape[0]
        step = row_step(chunk_size, device=x.device)
        num_padded = -(-num_rows // step) * step
        # Zero rows behind the last chunk's own; their gradients are zero too.
        x = torch.nn.functional.pad(x, (0, 0, 0, num_padded - num_rows))
        size = min(chunk_size // step * step, max(num_padded, 1))
        grad_hidden = torch.zeros_like(x, dtype=accumulate) if needs_hidden else None
        grad_weight = None
        if needs_weight:
            grad_weight = gradient_memory.empty("gradient", w.shape, like=w, dtype=accumulate)
            grad_weight.zero_()
        grad_bias = w.new_zeros(vocab_size, dtype=accumulate) if needs_bias else None
        loss_sum = x.new_zeros((), dtype=accumulate)
        ranks: list[Tensor] = []
        buffer = memory.empty("logits", (size, vocab_size), like=x, dtype=x.dtype)
        targets: SoftTargets | StoredTargets | None = None
        if isinstance(teacher, StoredTeacher):
            targets = StoredTargets(teacher)
        elif teacher is not None:
            assert teacher_states is not None
            teacher_buffer = memory.empty("teacher", buffer.shape, like=x, dtype=x.dtype)
            targets = SoftTargets(teacher, teacher_states, teacher_buffer)
        for start in range(0, num_rows, size):
            rows = slice(start, min(start + size, num_padded))
            own = slice(start, min(rows.stop, num_rows))
            logits = torch.mm(x[rows], w.T, out=buffer[: rows.stop - start])
            logits[own.stop - start :] = 0.0
            if targets is not None:
                targets.read(own)
            loss_sum += _logits_to_gradient(
                logits[: own.stop - start],
                labels[own],
                bias=None if bias is None else bias.detach(),
                grad_bias=grad_bias,
                targets=targets,
                ranks=ranks,
                num_ranked=num_ranked,
                dtype=accumulate,
                memory=memory,
                adjust=adjust,
            )
            add_products(
                logits,
                x[rows],
                w,
                grad_hidden=None if grad_hidden is None else grad_hidden[rows],
                grad_weight=grad_weight,
                leaves_out=leaves_out,
                memory=memory,
            )
        grad_hidden = None if grad_hidden is None else grad_hidden[:num_rows]
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
        return (*scaled, *[None] * 10)


def _cast(weight: Tensor, dtype: torch.dtype, memory: LossMemory) -> Tensor:
    if weight.dtype == dtype:
        return weight
    return memory.empty("weight", weight.shape, like=weight, dtype=dtype).copy_(weight)


def _logits_to_gradient(
    logits: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None,
    grad_bias: Tensor | None,
    targets: SoftTargets | StoredTargets | None,
    ranks: list[Tensor],
    num_ranked: int,
    dtype: torch.dtype,
    memory: LossMemory,
    adjust: LogitAdjust | None,
) -> Tensor:
    """Turn logits [n, V] in place into their gradient; return the summed loss [].

    The softmax and the sums are of ``dtype``; ``grad_bias`` and ``ranks`` are added to. The first
    ``num_ranked`` logits have a rank.
    """
    loss = logits.new_zeros((), dtype=dtype)
    soft_share = 0.0 if targets is None else targets.share
    step = block_rows(logits)
    # Fresh memory for each block would cost more in page faults than the softmax itself.
    buffers = memory.empty("blocks", (2, step, logits.shape[1]), like=logits, dtype=dtype)
    for rows in blocks(logits):
        values, gradient = buffers[:, : rows.stop - rows.start]
        values.copy_(logits[rows])
        if bias is not None:
            values += bias
        slopes = None
        if adjust is not None:
            values.copy_(adjust.apply(values))
            slopes = adjust.slope(values)
        if num_ranked:
            scratch = gradient[:, :num_ranked]
            ranks.append(ranks_of(values[:, :num_ranked], labels[rows], scratch=scratch))
        # A CPU's own exp is twenty times slower where results are denormal; softmax's is not.
        torch.softmax(values, dim=1, out=gradient)
        true = labels[rows, None]
        log_totals = _log_totals(values, gradient, true)
        loss += (1.0 - soft_share) * (log_totals - values.gather(1, true)[:, 0]).sum()
        if targets is not None:
            loss += targets.mix(values.sub_(log_totals[:, None]), gradient, rows=rows)
        gradient.scatter_(1, true, gradient.gather(1, true) - (1.0 - soft_share))
        if slopes is not None:
            gradient *= slopes
        if grad_bias is not None:
            grad_bias += gradient.sum(dim=0)
        logits[rows] = gradient
    return loss


def _log_totals(values: Tensor, probabilities: Tensor, true: Tensor) -> Tensor:
    """[n] log Σ exp of logits [n, V], from their softmax and the true tokens [n, 1].

    A token's logit less the log of its probability, whichever token: the true one's is at hand. Of
    one that is hopeless the probability has no bits left, and then the most likely token serves.
    """
    chosen = probabilities.gather(1, true)[:, 0]
    totals = values.gather(1, true)[:, 0] - chosen.log()
    hopeless = (chosen < _HOPELESS).nonzero().squeeze(1)
    if hopeless.numel():
        greatest = probabilities[hopeless].amax(dim=1)
        totals[hopeless] = values[hopeless].amax(dim=1) - greatest.log()
    return totals
