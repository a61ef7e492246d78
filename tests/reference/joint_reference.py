"""Medusa-2's objective in plain Python loops, written from the paper's section 2.2.2.

Nothing here imports the package: an independent second opinion.
"""

from __future__ import annotations

import math

from tests.reference.losses_reference import cross_entropy, softmax


def next_token_loss(logits: list[list[float]], labels: list[int]) -> float:
    """The mean of -log p(label) over the supervised tokens."""
    terms = [cross_entropy(row, label) for row, label in zip(logits, labels, strict=True)]
    return sum(terms) / len(terms)


def divergence(original: list[list[float]], trained: list[list[float]]) -> float:
    """The mean of Σ_v q(v) · (log q(v) - log p(v)) over the supervised tokens."""
    total = 0.0
    for theirs, ours in zip(original, trained, strict=True):
        q, p = softmax(theirs), softmax(ours)
        total += sum(a * (math.log(a) - math.log(b)) for a, b in zip(q, p, strict=True))
    return total / len(original)


def head_loss_weight(
    step: int, *, num_steps: int, weight: float, kind: str, share: float, delay: float
) -> float:
    """λ0 at a step, counted from 0."""
    begin = delay if delay >= 1 else delay * num_steps
    if step < begin:
        return 0.0
    if kind == "constant":
        return weight
    progress = (step - begin) / (share * num_steps)
    if progress >= 1:
        return weight
    return weight * (progress if kind == "linear" else math.sin(math.pi / 2 * progress))
