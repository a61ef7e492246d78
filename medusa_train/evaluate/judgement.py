"""From a judge's single answers to figures: win rate, scores, and the share that is retained.

Each pair of answers is shown twice, with the sides swapped: a side wins where it is preferred both
times, and all else is a tie. Intervals come from resampling prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from medusa_train.evaluate.accuracy import Array, Ratio, bootstrap_weights

Preference = Literal["original", "changed", "tie"]


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a judge says of both answers to one prompt; None where it said nothing usable.

    Attributes:
        orders: who is preferred with the original shown first, and with it shown second.
        original_score: of the original's answer, 1 to 10.
        changed_score: of the changed model's answer.
    """

    orders: tuple[Preference | None, Preference | None]
    original_score: int | None
    changed_score: int | None

    @property
    def preference(self) -> Preference | None:
        """Who wins both times, or ``tie``; None where one of the two is not known."""
        first, second = self.orders
        if first is None or second is None:
            return None
        return first if first == second else "tie"


def judge_figures(
    judgements: Sequence[Judgement], *, num_bootstrap: int, seed: int
) -> dict[str, Any]:
    """``pairwise``, ``single`` and ``rows`` of the judge's part of ``quality.json``."""
    return {
        "pairwise": _pairwise(judgements, num_bootstrap=num_bootstrap, seed=seed),
        "single": _single(judgements, num_bootstrap=num_bootstrap, seed=seed),
        "rows": [
            {
                "preference": judgement.preference,
                "orders": list(judgement.orders),
                "original_score": judgement.original_score,
                "changed_score": judgement.changed_score,
            }
            for judgement in judgements
        ],
    }


def _pairwise(judgements: Sequence[Judgement], *, num_bootstrap: int, seed: int) -> dict[str, Any]:
    known = [judgement for judgement in judgements if judgement.preference is not None]
    counts = Counter(judgement.preference for judgement in known)
    points = {"changed": 1.0, "tie": 0.5, "original": 0.0}
    won = np.array([points[str(judgement.preference)] for judgement in known])
    rate = Ratio(won, np.ones(len(known)))
    weights = bootstrap_weights(max(len(known), 1), num_bootstrap=num_bootstrap, seed=seed)
    return {
        "num_prompts": len(known),
        "changed_wins": counts["changed"],
        "original_wins": counts["original"],
        "ties": counts["tie"],
        "num_inconsistent": sum(set(row.orders) == {"original", "changed"} for row in known),
        "win_rate": rate.value,
        "win_rate_ci95": rate.interval(weights),
    }


def _single(judgements: Sequence[Judgement], *, num_bootstrap: int, seed: int) -> dict[str, Any]:
    scores = [
        (row.original_score, row.changed_score)
        for row in judgements
        if row.original_score is not None and row.changed_score is not None
    ]
    original: Array = np.array([first for first, _ in scores], dtype=float)
    changed: Array = np.array([second for _, second in scores], dtype=float)
    weights = bootstrap_weights(max(len(scores), 1), num_bootstrap=num_bootstrap, seed=seed)
    each = np.ones(len(scores))
    ratios = {
        "original_score": Ratio(original, each),
        "changed_score": Ratio(changed, each),
        "retained_share": Ratio(changed, original),
    }
    figures: dict[str, Any] = {"num_prompts": len(scores)}
    for name, ratio in ratios.items():
        figures |= {name: ratio.value, f"{name}_ci95": ratio.interval(weights)}
    return figures
