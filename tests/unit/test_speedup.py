"""The figures of a speed measurement, and what counts as equal output."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from medusa_train.evaluate.accuracy import Ratio, bootstrap_weights
from medusa_train.evaluate.equality import (
    classify,
    equality_report,
    first_difference,
    gap_in_steps,
    step_of,
)
from medusa_train.evaluate.speedup import (
    WAYS,
    Sample,
    Timing,
    break_even,
    median_timing,
    quotient,
    speedup_figures,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [1.0, -1.5, 17.3, 0.0371, 100.0])
def test_a_step_is_the_distance_to_the_next_number(value: float, dtype: torch.dtype) -> None:
    """torch's own neighbour, away from zero."""
    start = torch.tensor(value, dtype=dtype)
    bits = {torch.float32: torch.int32}.get(dtype, torch.int16)
    following = (start.view(bits) + 1).view(dtype)
    assert step_of(float(start), dtype) == abs(float(following) - float(start))


def test_where_two_answers_first_differ() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [5]) == 0


def test_two_steps_are_a_tie_and_three_are_none() -> None:
    """In bf16 numbers from 16 to 32 are 1/8 apart."""

    def kind(logits: list[float]) -> str:
        difference = classify(
            7,
            position=1,
            plain=[9, 0],
            ours=[9, 2],
            logits=torch.tensor(logits, dtype=torch.bfloat16),
            dtype=torch.bfloat16,
        )
        assert (difference.prompt, difference.position) == (7, 1)
        assert (difference.plain_token, difference.token) == (0, 2)
        return difference.kind

    assert kind([20.0, 1.0, 20.0]) == "tie"
    assert kind([20.0, 1.0, 19.75]) == "tie"
    assert kind([20.0, 1.0, 19.625]) == "other"
    # Two tokens that are close to each other, and both far from what the base says.
    assert kind([20.0, 25.0, 20.0]) == "other"
    # In fp32 the same gap is no tie.
    logits = torch.tensor([20.0, 1.0, 19.75])
    assert gap_in_steps(logits, [0, 2], dtype=torch.float32) == 0.25 / 2.0**-19


def test_an_answer_that_ends_early_is_no_tie() -> None:
    difference = classify(
        0, position=1, plain=[4], ours=[4, 5], logits=torch.zeros(9), dtype=torch.float32
    )
    assert (difference.kind, difference.plain_token, difference.token) == ("other", None, 5)
    assert difference.gap_in_steps is None


def test_the_counts_of_equal_output() -> None:
    tie, other = (
        classify(n, position=0, plain=[0], ours=[1], logits=torch.tensor(row), dtype=torch.float32)
        for n, row in enumerate(([1.0, 1.0], [1.0, 0.5]))
    )
    report = equality_report([tie, other], num_prompts=5, dtype="float32")
    assert {key: report[key] for key in ("identical", "of", "ties", "other")} == {
        "identical": 3, "of": 5, "ties": 1, "other": 1,
    }  # fmt: skip
    assert report["differences"][0]["kind"] == "tie"


def _timing(tokens: int, seconds: float, *, prefill: float = 0.0, steps: int = 1) -> Timing:
    return Timing(tokens, seconds, prefill, num_steps=steps, num_passes=max(0, steps - 1))


def test_the_figures_are_ratios_of_sums() -> None:
    timings = {
        "baseline": [_timing(10, 5.0, prefill=0.5, steps=10), _timing(30, 15.0, prefill=1.5)],
        "self": [_timing(10, 4.0, prefill=1.0, steps=10), _timing(30, 12.0, prefill=1.0, steps=30)],
        "medusa": [_timing(10, 3.0, prefill=1.0, steps=6), _timing(30, 5.0, prefill=1.0, steps=15)],
    }
    report = speedup_figures(timings, categories=["a", None], num_bootstrap=50, seed=0)
    assert report["baseline"]["tokens_per_second"] == 40 / 20
    assert report["baseline"]["decode_tokens_per_second"] == 38 / 18
    assert report["medusa"]["tokens_per_second"] == 40 / 8
    assert report["speedup"] == pytest.approx((40 / 8) / (40 / 20))
    assert report["speedup_vs_self"] == pytest.approx((40 / 8) / (40 / 16))
    assert report["decode_speedup"] == pytest.approx((38 / 6) / (38 / 18))
    assert report["acceptance_length"] == 40 / 21
    assert report["step_overhead"] == pytest.approx((6 / 19) / (14 / 38))
    assert report["medusa"]["step_milliseconds"] == pytest.approx(6000 / 19)
    [category] = report["categories"]
    assert (category["category"], category["num_prompts"]) == ("a", 1)
    assert category["speedup"] == pytest.approx((10 / 3) / (10 / 5))
    assert category["speedup_ci95"] is None


def test_the_interval_is_that_of_all_resamples() -> None:
    """Three prompts have 27 equally likely resamples, which a plain loop goes through.

    The extreme ones have a share of 1/27 each, which is more than the 2.5 % that an end leaves out.
    """
    above, below = [(4, 1.0), (9, 3.0), (2, 0.25)], [(4, 2.0), (9, 3.5), (2, 1.0)]
    ratios = []
    for drawn in itertools.product(range(3), repeat=3):
        tokens = [sum(side[i][0] for i in drawn) for side in (above, below)]
        seconds = [sum(side[i][1] for i in drawn) for side in (above, below)]
        ratios.append(tokens[0] / seconds[0] / (tokens[1] / seconds[1]))
    fast, slow = (
        Ratio(*(np.array(column, dtype=float) for column in zip(*side, strict=True)))
        for side in (above, below)
    )
    value, ci95 = quotient(fast, slow, bootstrap_weights(3, num_bootstrap=20_000, seed=1))
    assert value == pytest.approx((15 / 4.25) / (15 / 6.5))
    assert ci95 == pytest.approx([min(ratios), max(ratios)])


def test_the_pairs_are_drawn_together() -> None:
    """One side is twice as fast on each prompt, however different prompts are: no doubt at all."""
    slow = [_timing(10, seconds) for seconds in (1.0, 7.0, 0.1, 30.0)]
    fast = [_timing(10, timing.seconds / 2) for timing in slow]
    weights = bootstrap_weights(4, num_bootstrap=100, seed=0)
    value, ci95 = quotient(Sample(fast).rate, Sample(slow).rate, weights)
    assert value == pytest.approx(2)
    assert ci95 == pytest.approx([2, 2])


def test_nothing_to_count_gives_no_figure() -> None:
    """Answers of one token: there is no time after the prefill, and no step."""
    timings = {way: [Timing(1, 0.5, 0.5, 1, 0)] * 2 for way in WAYS}
    report = speedup_figures(timings, categories=[None, None], num_bootstrap=10, seed=0)
    assert report["speedup"] == 1
    for name in ("decode_speedup", "step_overhead"):
        assert report[name] is None
        assert report[f"{name}_ci95"] is None
    assert report["medusa"]["step_milliseconds"] is None


def test_the_median_of_repeats() -> None:
    repeats = [_timing(8, seconds, prefill=seconds / 4, steps=3) for seconds in (4.0, 1.0, 2.0)]
    assert median_timing(repeats) == _timing(8, 2.0, prefill=0.5, steps=3)


def test_the_batch_at_which_heads_gain_nothing() -> None:
    def rows(speedups: dict[int, float]) -> list[dict[str, float]]:
        return [{"batch_size": size, "speedup": value} for size, value in speedups.items()]

    assert break_even(rows({8: 0.8, 1: 1.5, 4: 1.0})) == 4
    assert break_even(rows({1: 1.5, 4: 1.1})) is None
    assert break_even([]) is None
    assert math.isfinite(step_of(0.0, torch.bfloat16))
