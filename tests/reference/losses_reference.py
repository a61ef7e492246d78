"""The losses and labels in plain Python loops, written from the paper's section 2 and design terms.

Nothing here imports the package: an independent second opinion.
"""

from __future__ import annotations

import math

IGNORE = -100


def labels_of_span(ids: list[int], start: int, end: int, num_heads: int) -> dict[int, list[int]]:
    """source position t → the label of each head 1…K (token t + 1 + n), for one assistant span."""
    result: dict[int, list[int]] = {}
    for t in range(start - 1, end - 1):
        if t < 0:
            continue
        row = []
        for n in range(1, num_heads + 1):
            target = t + 1 + n
            row.append(ids[target] if target < end else IGNORE)
        result[t] = row
    return result


def cross_entropy(logits: list[float], label: int) -> float:
    """-log softmax(logits)[label]."""
    greatest = max(logits)
    total = sum(math.exp(value - greatest) for value in logits)
    return math.log(total) + greatest - logits[label]


def rank(logits: list[float], label: int) -> int:
    """Greater logits, plus equal ones with a smaller id."""
    before = 0
    for token, value in enumerate(logits):
        if value > logits[label] or (value == logits[label] and token < label):
            before += 1
    return before


def medusa1_loss(
    logits: list[list[list[float]]], labels: list[list[int]], *, decay: float
) -> float:
    """Σ_n decay^n · mean over head n's valid pairs; logits [K][N][V], labels [N][K]."""
    loss = 0.0
    for k, head in enumerate(logits):
        terms = [cross_entropy(head[i], row[k]) for i, row in enumerate(labels) if row[k] != IGNORE]
        if terms:
            loss += decay ** (k + 1) * sum(terms) / len(terms)
    return loss


def mixed_loss_and_gradients(
    x: list[list[float]],
    w: list[list[float]],
    b: list[float],
    labels: list[int],
    *,
    teacher_logits: list[list[float]],
    share: float,
) -> tuple[float, list[list[float]], list[list[float]], list[float]]:
    """Σ over rows of (1 - share) · CE(label) + share · CE(teacher), and d/dx, d/dw, d/db.

    x [N][D], w [V][D], b [V], teacher_logits [N][V]. With p the head's distribution and q the
    mixed target, the gradient of a row's logits is p - q.
    """
    loss = 0.0
    dx = [[0.0] * len(x[0]) for _ in x]
    dw = [[0.0] * len(x[0]) for _ in w]
    db = [0.0] * len(w)
    for i, row in enumerate(x):
        logits = [
            b[v] + sum(left * right for left, right in zip(row, w[v], strict=True))
            for v in range(len(w))
        ]
        target = [share * q for q in softmax(teacher_logits[i])]
        target[labels[i]] += 1 - share
        for v, p in enumerate(softmax(logits)):
            loss += target[v] * cross_entropy(logits, v)
            slope = p - target[v]
            db[v] += slope
            for d in range(len(row)):
                dx[i][d] += slope * w[v][d]
                dw[v][d] += slope * row[d]
    return loss, dx, dw, db


def softmax(logits: list[float]) -> list[float]:
    """exp(z) ÷ Σ exp(z)."""
    greatest = max(logits)
    powers = [math.exp(value - greatest) for value in logits]
    return [power / sum(powers) for power in powers]
