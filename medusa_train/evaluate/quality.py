"""From the drift at each position to figures: KL, perplexity ratio and greedy agreement.

A changed model is measured against the original on one text, position by position. Every figure is
a ratio of sums over conversations, and its interval comes from resampling conversations, as in
:mod:`medusa_train.evaluate.accuracy`.

Shapes: N supervised positions, C conversations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from medusa_train.evaluate.accuracy import Array, Ratio, bootstrap_weights

NUM_BINS = 12
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True, slots=True, eq=False)
class Drift:
    """The changed model against the original at each supervised position, one row each.

    The rows of a conversation follow each other, and every conversation has one or more.

    Attributes:
        conversation: [N] index of the conversation, ascending from 0.
        place: [N] of the token in its answer, from 1.
        kl: [N] KL(original ‖ changed) of the distributions there, in nats.
        original_nll: [N] −log of the original's probability of the text's token.
        changed_nll: [N] the same of the changed model.
        agrees: [N] bool; whether both have the same most likely token.
    """

    conversation: npt.NDArray[np.int64]
    place: npt.NDArray[np.int64]
    kl: Array
    original_nll: Array
    changed_nll: Array
    agrees: npt.NDArray[np.bool_]


def quality_figures(drift: Drift, *, num_bootstrap: int, seed: int) -> dict[str, Any]:
    """The figures of one text, over all of it, along its answers, and by conversation.

    Args:
        drift: of at least one position.
        num_bootstrap: resamples of the conversations.
        seed: of the resampling.
    """
    num_conversations = int(drift.conversation[-1]) + 1
    weights = bootstrap_weights(num_conversations, num_bootstrap=num_bootstrap, seed=seed)
    everywhere = np.ones(len(drift.place), dtype=bool)
    quantiles = np.quantile(drift.kl, list(QUANTILES.values()), method="higher")
    return {
        "num_conversations": num_conversations,
        "num_positions": len(drift.place),
        **_figures(drift, everywhere, weights),
        "original_perplexity": math.exp(drift.original_nll.mean()),
        "changed_perplexity": math.exp(drift.changed_nll.mean()),
        "kl_quantiles": dict(zip(QUANTILES, quantiles.tolist(), strict=True)),
        "by_place": _along_the_answers(drift, weights),
        "per_conversation": _per_conversation(drift, num_conversations),
    }


def verdict(
    figures: Mapping[str, Any], *, min_agreement: float, max_perplexity_ratio: float
) -> dict[str, Any]:
    """Whether the changed model is still the original, as far as the text can tell.

    ``kept`` is true where the whole interval of the greedy agreement and that of the perplexity
    ratio keep their limits, false where one of them lies wholly beyond its limit, and else null:
    more text would tell. Without intervals the figures themselves decide.

    Args:
        figures: of :func:`quality_figures`.
        min_agreement: the least greedy agreement.
        max_perplexity_ratio: the greatest perplexity ratio.
    """
    agreement, ratio = figures["greedy_top1_agreement"], figures["perplexity_ratio"]
    low, high = figures["greedy_top1_agreement_ci95"] or (agreement, agreement)
    ratio_low, ratio_high = figures["perplexity_ratio_ci95"] or (ratio, ratio)
    kept = None
    if low >= min_agreement and ratio_high <= max_perplexity_ratio:
        kept = True
    elif high < min_agreement or ratio_low > max_perplexity_ratio:
        kept = False
    return {
        "kept": kept,
        "retained_share": agreement,
        "retained_share_ci95": figures["greedy_top1_agreement_ci95"],
        "min_agreement": min_agreement,
        "max_perplexity_ratio": max_perplexity_ratio,
    }


def _figures(drift: Drift, chosen: npt.NDArray[np.bool_], weights: Array) -> dict[str, Any]:
    """KL, perplexity ratio and agreement over the rows that ``chosen`` [N] names."""
    conversation = drift.conversation[chosen]

    def ratio(values: npt.NDArray[Any]) -> Ratio:
        size = weights.shape[1]
        return Ratio(
            np.bincount(conversation, weights=values[chosen], minlength=size).astype(float),
            np.bincount(conversation, minlength=size).astype(float),
        )

    kl, agreement = ratio(drift.kl), ratio(drift.agrees)
    # The ratio of two geometric means is the exponential of the mean difference.
    difference = ratio(drift.changed_nll - drift.original_nll)
    middle, ends = difference.value, difference.interval(weights)
    return {
        "kl": kl.value,
        "kl_ci95": kl.interval(weights),
        "perplexity_ratio": None if middle is None else math.exp(middle),
        "perplexity_ratio_ci95": ends and [math.exp(end) for end in ends],
        "greedy_top1_agreement": agreement.value,
        "greedy_top1_agreement_ci95": agreement.interval(weights),
    }


def _along_the_answers(drift: Drift, weights: Array) -> list[dict[str, Any]]:
    """The figures by place in the answer, in bins that grow with the distance."""
    longest = int(drift.place.max())
    edges = np.unique(np.geomspace(1, longest + 1, NUM_BINS + 1).round().astype(int))
    rows = []
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        chosen = (drift.place >= start) & (drift.place < end)
        if not chosen.any():
            continue  # the first token of plain text has nothing before it
        rows.append(
            {
                "first_place": start,
                "last_place": end - 1,
                "num_positions": int(chosen.sum()),
                **_figures(drift, chosen, weights),
            }
        )
    return rows


def _per_conversation(drift: Drift, num_conversations: int) -> list[dict[str, Any]]:
    def means(values: npt.NDArray[Any]) -> list[float]:
        sums = np.bincount(drift.conversation, weights=values, minlength=num_conversations)
        averages: list[float] = (sums / counts).tolist()
        return averages

    counts = np.bincount(drift.conversation, minlength=num_conversations)
    columns = {
        "num_positions": counts.tolist(),
        "kl": means(drift.kl),
        "original_nll": means(drift.original_nll),
        "changed_nll": means(drift.changed_nll),
        "greedy_top1_agreement": means(drift.agrees),
    }
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
