"""Quantiles and bins of lengths."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from medusa_train.data.lengths import MAX_BINS, Bin, lengths_of


def test_figures_known_by_hand():
    found = lengths_of(range(1, 101))
    assert found.quantiles == {"p50": 50, "p90": 90, "p99": 99, "max": 100}
    assert found.bins[0] == Bin(0, 10, 9)
    assert found.bins[1] == Bin(10, 20, 10)
    assert found.bins[-1] == Bin(100, 101, 1)
    assert found.has_tail
    assert [b.label for b in found.bins[-2:]] == ["90–99", "100"]


def test_a_long_tail_is_one_bin():
    found = lengths_of([*[20] * 500, *[30] * 499, 40_000])
    assert found.bins[-1].end == 40_001
    assert found.bins[-1].count == 1
    assert found.bins[-1].label == "31–40,000"
    assert found.bins[0] == Bin(20, 21, 500)


def test_one_length_and_none():
    assert lengths_of([7]).bins == (Bin(7, 8, 1),)
    assert not lengths_of([7]).has_tail
    assert lengths_of([]).bins == ()
    assert lengths_of([]).quantiles == {}


@given(st.lists(st.integers(0, 100_000), min_size=1))
def test_every_length_is_in_one_bin(values):
    found = lengths_of(values)
    assert sum(b.count for b in found.bins) == found.num == len(values)
    assert len(found.bins) <= MAX_BINS + 1
    for b in found.bins:
        assert b.count == sum(b.start <= value < b.end for value in values)
    ordered = [*found.quantiles.values()]
    assert ordered == sorted(ordered)
    assert ordered[-1] == max(values)
    assert set(ordered) <= set(values)
