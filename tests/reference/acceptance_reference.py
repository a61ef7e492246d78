"""Typical acceptance from the paper's section 3.2, path by path in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence


def softmax(logits: Sequence[float], temperature: float) -> list[float]:
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    return [weight / sum(weights) for weight in weights]


def accepted_on_path(
    tokens: Sequence[int],
    logits: Sequence[Sequence[float]],
    *,
    temperature: float,
    epsilon: float,
    delta: float,
) -> tuple[int, float]:
    """How many of ``tokens`` after the first are accepted, and their log-likelihood.

    Row i of ``logits`` is what the base says after ``tokens[i]``.
    """
    count, likelihood = 0, 0.0
    for i, token in enumerate(tokens[1:]):
        p = softmax(logits[i], temperature)
        entropy = -sum(x * math.log(x + 1e-5) for x in p)
        if p[token] <= min(epsilon, delta * math.exp(-entropy)):
            break
        count, likelihood = count + 1, likelihood + math.log(p[token])
    return count, likelihood
