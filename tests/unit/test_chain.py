"""Which heads of a chain pay: figures against plain loops and by hand, and the words for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from medusa_train.evaluate.accuracy import accuracy_report, bootstrap_weights, num_accepted, walk
from medusa_train.evaluate.chain import (
    StepWeights,
    num_heads_that_pay,
    of_first_heads,
    step_weights,
)
from medusa_train.evaluate.ranks import MISS, Ranks
from medusa_train.evaluate.tables import gain_rows, pay_lines
from medusa_train.heads.config import HeadsConfig
from medusa_train.heads.model import MedusaHeads
from tests.models_for_tests import make_base, make_model


def _ranks(num_heads: int = 3, *, conversations: int = 8, length: int = 30) -> Ranks:
    """Heads that are right in 6, 4 and 1 of ten cases."""
    generator = torch.Generator().manual_seed(0)
    count = conversations * length
    position = torch.arange(length).repeat(conversations)
    num_valid = (length - 1 - position).clamp(max=num_heads)
    right = torch.tensor([0.6, 0.4, 0.1])[:num_heads]
    hits = torch.rand(count, num_heads, generator=generator) < right
    ranks = torch.where(hits, 0, 1)
    ranks[torch.arange(num_heads)[None] >= num_valid[:, None]] = MISS
    return Ranks(
        ranks=ranks.short(),
        num_valid=num_valid.short(),
        conversation=torch.arange(conversations).repeat_interleave(length).int(),
        position=position.int(),
        span=torch.zeros(count, dtype=torch.int32),
        metadata={"top_k": 3, "text_sampling": {"temperature": 0}},
    )


def _report(ranks: Ranks, step: StepWeights | None) -> dict[str, Any]:
    return accuracy_report(ranks, base_model="x", num_bootstrap=200, seed=3, step=step)


def test_the_chain_of_the_first_heads_is_their_own() -> None:
    ranks = _ranks()
    chain = _report(ranks, None)["chain"]
    for row in chain["by_length"]:
        count = row["num_heads"]
        alone = Ranks(
            ranks=ranks.ranks[:, :count],
            num_valid=ranks.num_valid.clamp(max=count),
            conversation=ranks.conversation,
            position=ranks.position,
            span=ranks.span,
            metadata=ranks.metadata,
        )
        own = _report(alone, None)["chain"]
        assert (row["acceptance_length"], row["ci95"]) == (own["acceptance_length"], own["ci95"])
    assert chain["acceptance_length"] == chain["by_length"][-1]["acceptance_length"]
    assert 1 + sum(row["gain"] for row in chain["by_length"]) == pytest.approx(
        chain["acceptance_length"]
    )
    assert [row["weights_growth"] for row in chain["by_length"]] == [None] * 3
    assert chain["num_heads_that_pay"] is None


def test_the_interval_of_a_gain_pairs_both_chains() -> None:
    """Plain loops over the same resamples; the two chains' own intervals are far wider."""
    ranks = _ranks()
    row = _report(ranks, None)["chain"]["by_length"][2]
    accepted = num_accepted(ranks)
    shorter, longer = (walk(np.minimum(accepted, count), ranks) for count in (2, 3))
    differences = []
    for draw in bootstrap_weights(8, num_bootstrap=200, seed=3):
        tokens = sum(w * t for w, t in zip(draw, longer.numerator, strict=True))
        few = sum(w * s for w, s in zip(draw, longer.denominator, strict=True))
        many = sum(w * s for w, s in zip(draw, shorter.denominator, strict=True))
        differences.append(tokens / few - tokens / many)
    expected = [float(np.percentile(differences, q)) for q in (2.5, 97.5)]
    assert row["gain_ci95"] == pytest.approx(expected)
    low, high = row["gain_ci95"]
    assert low < row["gain"] < high
    assert high - low < (row["ci95"][1] - row["ci95"][0]) / 2


def _by_length(lengths: list[float | None], growth: list[float | None]) -> list[dict[str, Any]]:
    return [
        {
            "num_heads": n,
            "acceptance_length": a,
            "ci95": None,
            "gain": None,
            "gain_ci95": None,
            "weights_growth": g,
        }
        for n, (a, g) in enumerate(zip(lengths, growth, strict=True), start=1)
    ]


@pytest.mark.parametrize(
    ("lengths", "growth", "expected"),
    [
        ([1.5, 1.7, 1.75], [0.1, 0.09, 0.08], 2),
        ([1.5, 1.7, 1.85], [0.1, 0.09, 0.08], 3),
        ([1.05, 1.06, 1.06], [0.1, 0.09, 0.08], 0),
        # One that pays less than it costs may be followed by one that makes up for it.
        ([1.05, 1.5, 1.5], [0.1, 0.09, 0.08], 2),
        ([1.5, 1.5, 1.5], [0.5, 0.0, 0.0], 0),
        ([1.5, None, None], [0.1, 0.1, 0.1], None),
        ([1.5, 1.7, 1.8], [None, None, None], None),
    ],
)
def test_the_heads_that_pay_by_hand(
    lengths: list[float | None], growth: list[float | None], expected: int | None
) -> None:
    assert num_heads_that_pay(_by_length(lengths, growth)) == expected


def test_growth_is_of_what_a_step_reads_before() -> None:
    step = StepWeights(base=100, head=10, first=40)
    assert [step.with_heads(n) for n in range(3)] == [100, 150, 160]
    assert step.growth(1) == 0.5
    assert step.growth(2) == pytest.approx(10 / 150)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", ["full", "shared"])
@pytest.mark.parametrize("truncated", [False, True])
def test_the_weights_of_a_step(tied: bool, layout: str, truncated: bool) -> None:
    base = make_base(make_model(tied=tied, dtype=torch.bfloat16))
    token_map = torch.arange(1, 40, 3) if truncated else None
    size = None if token_map is None else len(token_map)
    heads = MedusaHeads(HeadsConfig(3, 2, layout, 32, 64, size), token_map=token_map)  # type: ignore[arg-type]
    named = dict(base.model.named_parameters())
    read = sum(p.numel() for n, p in named.items() if tied or "embed_tokens" not in n)
    assert ("lm_head.weight" in named) is not tied
    step = step_weights(base, heads.config)
    assert step.base == 2 * read
    assert step.head == 2 * sum(p.numel() for p in heads.parameters()) / 3
    rows = size or 64
    assert step.first == (2 * rows * 32 if layout == "shared" else 0)


def test_the_words_say_what_to_leave_out() -> None:
    ranks = _ranks()
    lengths = [row["acceptance_length"] for row in _report(ranks, None)["chain"]["by_length"]]
    report = _report(ranks, StepWeights(base=1000, head=100))
    assert report["chain"]["num_heads_that_pay"] == 2
    gain, share = lengths[2] - lengths[1], lengths[2] / lengths[1] - 1
    assert pay_lines(report) == [
        f"Head 3 adds {gain:.3f} tokens per step to the chain, {100 * share:.1f} %, and 8.3 % to "
        "the weights that a step reads: leave it out with --num-heads 2"
    ]
    assert [row[0] for row in gain_rows(report)] == ["1", "2", "3"]
    assert gain_rows(report)[2][5:] == [f"{100 * share:.1f} %", "8.3 %"]
    # Heads 2 and 3 together: what two heads add to the base and the first.
    heavy = _report(ranks, StepWeights(base=1000, head=300))
    assert heavy["chain"]["num_heads_that_pay"] == 1
    [line] = pay_lines(heavy)
    assert line.startswith(f"Heads 2 to 3 add {lengths[2] - lengths[0]:.3f} tokens per step")
    assert "and 46.2 % to the weights that a step reads: leave them out with --num-heads 1" in line
    [none] = pay_lines(_report(ranks, StepWeights(base=10, head=1000)))
    assert none.endswith("no head pays at batch size 1")
    assert "--num-heads" not in none
    light = _report(ranks, StepWeights(base=10**9, head=1))
    assert pay_lines(light) == ["All 3 heads pay in a chain at batch size 1"]
    one = _report(_ranks(1), StepWeights(base=10**9, head=1))
    assert pay_lines(one) == ["The head pays in a chain at batch size 1"]
    assert pay_lines(_report(ranks, None)) == []


def test_a_report_of_the_first_heads() -> None:
    ranks = _ranks()
    report = _report(ranks, StepWeights(base=1000, head=100))
    fewer = of_first_heads(report, 2)
    assert fewer["num_heads"] == 2
    assert fewer["heads"] == report["heads"][:2]
    row = report["chain"]["by_length"][1]
    assert fewer["chain"]["acceptance_length"] == row["acceptance_length"]
    assert fewer["chain"]["ci95"] == row["ci95"]
    assert fewer["chain"]["num_heads_that_pay"] == 2
    # A report of an older version knows no shorter chains.
    del report["chain"]["by_length"]
    assert of_first_heads(report, 2)["chain"] is None
