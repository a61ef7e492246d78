"""From timed runs to figures: tokens per second, speed-up, step overhead, each with its interval.

Every figure is a ratio of sums over prompts. A comparison is paired: a resample of the prompts is
taken from both sides (percentile bootstrap), so that a hard prompt is hard for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from medusa_train.evaluate.accuracy import MIN_CONVERSATIONS, Array, Ratio, bootstrap_weights

BASELINE, SELF, MEDUSA = WAYS = ("baseline", "self", "medusa")
"""Plain ``model.generate``, our decoder without heads, and with them."""


@dataclass(frozen=True, slots=True)
class Timing:
    """What one call took.

    Attributes:
        num_tokens: written, stop tokens included, in all rows of the call.
        seconds: of the whole call.
        prefill_seconds: of them, up to the first token.
        num_steps: one root token and what is accepted after it, in all rows.
        num_passes: forward passes after the prefill.
        num_rows: answers that the call wrote.
    """

    num_tokens: int
    seconds: float
    prefill_seconds: float
    num_steps: int
    num_passes: int
    num_rows: int = 1


def median_timing(repeats: Sequence[Timing]) -> Timing:
    """The median times of several calls that wrote the same."""
    first = repeats[0]
    return Timing(
        num_tokens=first.num_tokens,
        seconds=median(timing.seconds for timing in repeats),
        prefill_seconds=median(timing.prefill_seconds for timing in repeats),
        num_steps=first.num_steps,
        num_passes=first.num_passes,
        num_rows=first.num_rows,
    )


class Sample:
    """The timings of one way of decoding, one per prompt, as ratios of sums."""

    def __init__(self, timings: Sequence[Timing]) -> None:
        def column(name: str) -> Array:
            return np.array([getattr(timing, name) for timing in timings], dtype=np.float64)

        tokens, seconds, prefill = map(column, ("num_tokens", "seconds", "prefill_seconds"))
        passes = column("num_passes")
        self.rate = Ratio(tokens, seconds)
        # The first token of an answer comes with the prefill.
        self.decode_rate = Ratio(tokens - column("num_rows"), seconds - prefill)
        self.length = Ratio(tokens, column("num_steps"))
        self.step = Ratio(seconds - prefill, passes)
        self._prefill = prefill

    def figures(self) -> dict[str, Any]:
        """The way's own figures."""
        step = self.step.value
        return {
            "tokens_per_second": self.rate.value,
            "decode_tokens_per_second": self.decode_rate.value,
            "num_tokens": int(self.rate.numerator.sum()),
            "seconds": float(self.rate.denominator.sum()),
            "prefill_seconds": float(self._prefill.sum()),
            "step_milliseconds": None if step is None else 1000 * step,
        }


def quotient(above: Ratio, below: Ratio, weights: Array) -> tuple[float | None, list[float] | None]:
    """One ratio of sums divided by another one over the same prompts, and its 95 % interval.

    Args:
        above: per prompt.
        below: per prompt, in the same order.
        weights: [num_bootstrap, prompts] how often each prompt is drawn in each resample.
    """
    over, under = above.value, below.value
    if over is None or not under:
        return None, None
    value = over / under
    if len(above.numerator) < MIN_CONVERSATIONS:
        return value, None
    tops, bottoms = (
        (weights @ ratio.numerator, weights @ ratio.denominator) for ratio in (above, below)
    )
    usable = (tops[1] > 0) & (bottoms[0] > 0) & (bottoms[1] > 0)
    drawn = tops[0][usable] / tops[1][usable] / (bottoms[0][usable] / bottoms[1][usable])
    if not len(drawn):
        return value, None
    low, high = np.percentile(drawn, [2.5, 97.5])
    return value, [float(low), float(high)]


def speedup_figures(
    timings: Mapping[str, Sequence[Timing]],
    *,
    categories: Sequence[str | None],
    num_bootstrap: int,
    seed: int,
) -> dict[str, Any]:
    """The figures of ``speedup.json`` that follow from the timed runs.

    Args:
        timings: of each of :data:`WAYS`, one per prompt, in the same order.
        categories: of each prompt.
        num_bootstrap: resamples of the prompts.
        seed: of the resampling.
    """
    samples = {way: Sample(timings[way]) for way in WAYS}
    weights = bootstrap_weights(len(categories), num_bootstrap=num_bootstrap, seed=seed)
    baseline, own, medusa = (samples[way] for way in WAYS)
    result: dict[str, Any] = {way: sample.figures() for way, sample in samples.items()}
    for name, above, below in (
        ("speedup", medusa.rate, baseline.rate),
        ("decode_speedup", medusa.decode_rate, baseline.decode_rate),
        ("speedup_vs_self", medusa.rate, own.rate),
        ("step_overhead", medusa.step, own.step),
    ):
        result[name], result[f"{name}_ci95"] = quotient(above, below, weights)
    result["acceptance_length"] = medusa.length.value
    result["acceptance_length_ci95"] = medusa.length.interval(weights)
    names = [name for name in dict.fromkeys(categories) if name is not None]
    result["categories"] = [
        _of_category(
            name,
            timings,
            [i for i, category in enumerate(categories) if category == name],
            num_bootstrap=num_bootstrap,
            seed=seed,
        )
        for name in names
    ]
    return result


def _of_category(
    name: str,
    timings: Mapping[str, Sequence[Timing]],
    members: Sequence[int],
    *,
    num_bootstrap: int,
    seed: int,
) -> dict[str, Any]:
    baseline, medusa = (Sample([timings[way][i] for i in members]) for way in (BASELINE, MEDUSA))
    weights = bootstrap_weights(len(members), num_bootstrap=num_bootstrap, seed=seed)
    value, ci95 = quotient(medusa.rate, baseline.rate, weights)
    return {
        "category": name,
        "num_prompts": len(members),
        "baseline_tokens_per_second": baseline.rate.value,
        "medusa_tokens_per_second": medusa.rate.value,
        "speedup": value,
        "speedup_ci95": ci95,
        "acceptance_length": medusa.length.value,
    }


def break_even(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The smallest batch that was measured at which heads gain nothing; None where there is none.

    Args:
        rows: ``batch_sizes`` of ``speedup.json``.
    """
    sizes = [row["batch_size"] for row in rows if row["speedup"] <= 1]
    return min(sizes, default=None)
