"""Targets of a loss that are distributions: a teacher's own, or what was stored of it.

Shapes: N positions, n rows of a chunk, D hidden, V rows of a head's ``lm_head``, S entries
stored of a position.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Teacher(NamedTuple):
    """The base's own distribution at a target: ``softmax(adjust(h @ weight.T + bias))``.

    Attributes:
        weight: [V, D] the base's ``lm_head``, its rows in the order of the head's logits; where
            these are some rows only, the softmax renormalises over them.
        bias: [V] or None.
        share: weight in [0, 1] of this distribution; the label has the rest.
        adjust: what the base does to its logits [..., V] after ``lm_head``.
        as_divergence: the loss against this distribution is KL(teacher ‖ model), which is 0 where
            the two are the same, instead of the cross-entropy, which is greater by the teacher's
            entropy; the gradients are the same.
    """

    weight: Tensor
    bias: Tensor | None
    share: float
    adjust: Callable[[Tensor], Tensor]
    as_divergence: bool = False


class StoredTeacher(NamedTuple):
    """What was stored of a teacher's distribution at each target; the loss is a divergence.

    Attributes:
        token_ids: [N, S] int64.
        logprobs: [N, S] fp32.
        kind: ``top``: the S most likely tokens. The others count as one token, so the loss is
            KL over S + 1 events, which is at most that over all tokens. ``samples``: S tokens drawn
            from it, so that Σ (log q - log p) ÷ S estimates the divergence without bias.
    """

    token_ids: Tensor
    logprobs: Tensor
    kind: Literal["top", "samples"]


class SoftTargets:
    """A teacher's distributions of one chunk at a time; their logits lie in one buffer.

    Args:
        teacher: gives them.
        states: [N, D] the teacher's, one row before each target.
        buffer: [n, V] of the dtype of the products.
    """

    def __init__(self, teacher: Teacher, states: Tensor, buffer: Tensor) -> None:
        self.share = teacher.share
        self._teacher = teacher
        self._states = states.detach().to(buffer.dtype)
        self._weight = teacher.weight.detach().to(buffer.dtype)
        self._logits = self._buffer = buffer

    def read(self, rows: slice) -> None:
        """Compute the logits of a chunk."""
        out = self._buffer[: rows.stop - rows.start]
        self._logits = torch.mm(self._states[rows], self._weight.T, out=out)

    def mix(self, log_probs: Tensor, gradient: Tensor, *, rows: slice) -> Tensor:
        """The loss [] of some rows of the chunk; their part is taken from the gradient.

        Args:
            log_probs: [n, V] of the model; overwritten.
            gradient: [n, V] of the logits: the model's probabilities, to begin with.
            rows: of the chunk.
        """
        logits = self._logits[rows].to(log_probs.dtype)
        if self._teacher.bias is not None:
            logits = logits + self._teacher.bias
        log_soft = torch.log_softmax(self._teacher.adjust(logits), dim=1)
        soft = log_soft.exp()
        if self._teacher.as_divergence:
            # Nearly equal numbers are subtracted before they are summed.
            log_probs.sub_(log_soft)
        gradient.sub_(soft, alpha=self.share)
        return -self.share * torch.dot(soft.view(-1), log_probs.view(-1))


class StoredTargets:
    """The same of what was stored.

    Args:
        teacher: of all N rows.
    """

    share = 1.0

    def __init__(self, teacher: StoredTeacher) -> None:
        self._teacher = teacher
        self._first = 0

    def read(self, rows: slice) -> None:
        """Nothing is computed; where the chunk begins."""
        self._first = rows.start

    def mix(self, log_probs: Tensor, gradient: Tensor, *, rows: slice) -> Tensor:
        """As :meth:`SoftTargets.mix`."""
        chosen = slice(self._first + rows.start, self._first + rows.stop)
        ids = self._teacher.token_ids[chosen]
        log_q = self._teacher.logprobs[chosen].to(log_probs.dtype)
        log_p = log_probs.gather(1, ids)
        if self._teacher.kind == "samples":
            share = 1.0 / max(1, ids.shape[1])
            gradient.scatter_add_(1, ids, torch.full_like(log_q, -share))
            return (log_q - log_p).sum() * share
        q, p = log_q.exp(), log_p.exp()
        least = torch.finfo(log_probs.dtype).tiny
        rest_q = (1.0 - q.sum(dim=1, keepdim=True)).clamp(min=0.0)
        rest_p = (1.0 - p.sum(dim=1, keepdim=True)).clamp(min=torch.finfo(p.dtype).eps)
        loss = (q * (log_q - log_p)).sum()
        loss = loss + (rest_q * (rest_q.clamp(min=least).log() - rest_p.log())).sum()
        # What all other tokens have in common is divided as the model divides it.
        gradient.mul_(1.0 - rest_q / rest_p)
        gradient.scatter_(1, ids, p - q)
        return loss
