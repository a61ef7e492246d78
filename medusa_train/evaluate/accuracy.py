"""From ranks to figures: accuracy per head, conditional accuracy, the chain's acceptance length.

Every figure is a ratio of sums over conversations, and its interval comes from resampling
conversations (percentile bootstrap), since the positions of one conversation are not independent.

Shapes: N source positions, C conversations, K heads, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from medusa_train import metrics
from medusa_train.evaluate.chain import StepWeights, num_heads_that_pay
from medusa_train.evaluate.ranks import MISS, Ranks

REPORT_VERSION = 1
MIN_CONVERSATIONS = 2
"""Resamples of one conversation are all alike, and an interval of no width would look certain."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Per-conversation numerators and denominators of one figure, each [C]."""

    numerator: Array
    denominator: Array

    @property
    def value(self) -> float | None:
        """The ratio of the sums; None where there is nothing to count."""
        total = self.denominator.sum()
        return float(self.numerator.sum() / total) if total else None

    def interval(self, weights: Array) -> list[float] | None:
        """The 95 % interval over resamples ``weights`` [num_bootstrap, C]; None for C = 1."""
        drawn = self.resampled(weights)
        if drawn is None:
            return None
        low, high = np.percentile(drawn, [2.5, 97.5])
        return [float(low), float(high)]

    def resampled(self, weights: Array) -> Array | None:
        """The ratio of each resample that has something to count; None for C = 1, or without."""
        if len(self.numerator) < MIN_CONVERSATIONS:
            return None
        below = weights @ self.denominator
        above = weights @ self.numerator
        drawn = below > 0
        ratios: Array = above[drawn] / below[drawn]
        return ratios if len(ratios) else None


def bootstrap_weights(num_conversations: int, *, num_bootstrap: int, seed: int) -> Array:
    """[num_bootstrap, C] how often each conversation is drawn in each resample."""
    generator = np.random.default_rng(seed)
    probabilities = np.full(num_conversations, 1.0 / num_conversations)
    return generator.multinomial(num_conversations, probabilities, num_bootstrap).astype(float)


def num_accepted(ranks: Ranks) -> npt.NDArray[np.int64]:
    """[N] candidates that a top-1 chain gets accepted when a decoder stands on the position."""
    is_hit = (ranks.ranks == 0) & ranks.valid
    leading: npt.NDArray[np.int64] = metrics.leading_hits(is_hit).numpy()
    return leading


def walked_rows(accepted: npt.NDArray[np.int64], ranks: Ranks) -> npt.NDArray[np.int64]:
    """The rows at which a decoder stands when it takes a step (:func:`metrics.walked_rows`).

    Args:
        accepted: [N] accepted candidates at each row.
        ranks: the rows.
    """
    return np.array(metrics.walked_rows(accepted.tolist(), spans_of(ranks)), dtype=np.int64)


def walk(accepted: npt.NDArray[np.int64], ranks: Ranks) -> Ratio:
    """Tokens emitted (numerator) and steps (denominator) per conversation.

    Each row of a span stands for one token that is emitted, whichever step emits it: no step passes
    the span's end, since a candidate beyond it is no valid pair.
    """
    conversation = ranks.conversation.numpy()
    steps = conversation[walked_rows(accepted, ranks)]
    size = int(conversation[-1]) + 1 if len(conversation) else 0
    return Ratio(
        np.bincount(conversation, minlength=size).astype(float),
        np.bincount(steps, minlength=size).astype(float),
    )


def accuracy_report(
    ranks: Ranks,
    *,
    base_model: str,
    num_bootstrap: int = 1000,
    seed: int = 0,
    step: StepWeights | None = None,
) -> dict[str, Any]:
    """``heads_accuracy.json`` (docs/formats.md).

    Args:
        ranks: of the true tokens.
        base_model: its name.
        num_bootstrap: resamples for the intervals.
        seed: of the resampling.
        step: what a step reads, for which heads pay; None where it is not known.
    """
    conversation = ranks.conversation.numpy()
    num_conversations = int(conversation.max()) + 1 if len(conversation) else 0
    weights = bootstrap_weights(num_conversations, num_bootstrap=num_bootstrap, seed=seed)
    return {
        "schema_version": REPORT_VERSION,
        "base_model": base_model,
        "num_heads": ranks.num_heads,
        "top_k": ranks.top_k,
        "num_conversations": num_conversations,
        "num_positions": len(conversation),
        "text_sampling": ranks.metadata.get("text_sampling"),
        "heads": [_head(ranks, head, weights) for head in range(ranks.num_heads)],
        "chain": _chain(ranks, weights, step),
        "tree": None,
    }


def _chain(ranks: Ranks, weights: Array, step: StepWeights | None) -> dict[str, Any]:
    """The top-1 chain of all heads, and that of the first 1, 2, … of them."""
    accepted = num_accepted(ranks)
    walks = [walk(np.minimum(accepted, count), ranks) for count in range(ranks.num_heads + 1)]
    by_length = [
        {
            "num_heads": count,
            "acceptance_length": longer.value,
            "ci95": longer.interval(weights),
            **_gain(shorter, longer, weights),
            "weights_growth": None if step is None else step.growth(count),
        }
        for count, (shorter, longer) in enumerate(pairwise(walks), start=1)
    ]
    return {
        "acceptance_length": walks[-1].value,
        "ci95": walks[-1].interval(weights),
        "by_length": by_length,
        "num_heads_that_pay": num_heads_that_pay(by_length),
    }


def _gain(shorter: Ratio, longer: Ratio, weights: Array) -> dict[str, Any]:
    """What one more head adds, and its interval over the same resamples."""
    if shorter.value is None or longer.value is None:
        return {"gain": None, "gain_ci95": None}
    gain = longer.value - shorter.value
    before, after = shorter.resampled(weights), longer.resampled(weights)
    if before is None or after is None:
        return {"gain": gain, "gain_ci95": None}
    # Both walks pass all rows, so both have steps in the same resamples.
    low, high = np.percentile(after - before, [2.5, 97.5])
    return {"gain": gain, "gain_ci95": [float(low), float(high)]}


def _head(ranks: Ranks, head: int, weights: Array) -> dict[str, Any]:
    num_conversations = weights.shape[1]
    conversation = ranks.conversation.numpy()
    is_valid = ranks.valid[:, head].numpy()
    rank = ranks.ranks[:, head].numpy()
    pairs = _per_conversation(is_valid, conversation, num_conversations)

    def within(top: int) -> Ratio:
        hits = is_valid & (rank != MISS) & (rank < top)
        return Ratio(_per_conversation(hits, conversation, num_conversations), pairs)

    before = ((ranks.ranks[:, :head] == 0).all(dim=1)).numpy() & is_valid
    conditional = Ratio(
        _per_conversation(before & (rank == 0), conversation, num_conversations),
        _per_conversation(before, conversation, num_conversations),
    )
    return {
        "head": head + 1,
        "predicts": f"t+{head + 2}",
        "positions": int(is_valid.sum()),
        "top_k_accuracy": [within(top).value for top in range(1, ranks.top_k + 1)],
        "top1_ci95": within(1).interval(weights),
        "conditional_top1": conditional.value,
    }


def _per_conversation(
    flags: npt.NDArray[np.bool_], conversation: npt.NDArray[np.int32], num_conversations: int
) -> Array:
    return np.bincount(conversation, weights=flags, minlength=num_conversations).astype(float)


def spans_of(ranks: Ranks) -> list[tuple[int, int]]:
    """Row ranges [start, end) of the assistant spans."""
    if not len(ranks.conversation):
        return []
    conversation, span = ranks.conversation.numpy(), ranks.span.numpy()
    is_new = (np.diff(conversation) != 0) | (np.diff(span) != 0)
    starts = [0, *(np.flatnonzero(is_new) + 1).tolist()]
    return list(zip(starts, [*starts[1:], len(conversation)], strict=True))
