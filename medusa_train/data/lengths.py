"""How long rows and answers are: quantiles, and a histogram that a long tail does not flatten."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import ceil

MAX_BINS = 12
QUANTILES: Mapping[str, float] = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True, slots=True)
class Bin:
    """How many lengths lie in ``[start, end)``."""

    start: int
    end: int
    count: int

    @property
    def label(self) -> str:
        """The lengths of the bin, both ends included."""
        last = self.end - 1
        return f"{self.start:,}" if self.start == last else f"{self.start:,}–{last:,}"


@dataclass(frozen=True, slots=True)
class Lengths:
    """The distribution of some lengths in tokens.

    Attributes:
        num: how many there are.
        quantiles: ``p50``, ``p90``, ``p99`` and ``max``, each a length that occurs (the smallest
            one that so large a share does not exceed); empty without lengths.
        bins: ascending and side by side, all as wide as the first; where lengths lie beyond the
            99 % that those hold, the last one reaches to the greatest of them.
    """

    num: int
    quantiles: Mapping[str, int]
    bins: tuple[Bin, ...]

    @property
    def has_tail(self) -> bool:
        """Whether the last bin is wider than the others."""
        widths = [b.end - b.start for b in self.bins]
        return len(widths) > 1 and widths[-1] != widths[0]


def lengths_of(values: Iterable[int]) -> Lengths:
    """The distribution of ``values``."""
    ordered = sorted(values)
    if not ordered:
        return Lengths(0, {}, ())
    quantiles = {
        name: ordered[max(ceil(share * len(ordered)), 1) - 1] for name, share in QUANTILES.items()
    }
    return Lengths(len(ordered), quantiles, _bins(ordered, most=quantiles["p99"]))


def _bins(ordered: Sequence[int], *, most: int) -> tuple[Bin, ...]:
    """Bins of a round width up to the length ``most``, and one for what is longer."""
    widths = (factor * 10**power for power in count() for factor in (1, 2, 5))
    width = next(w for w in widths if most // w - ordered[0] // w < MAX_BINS)
    first, end = ordered[0] // width, (most // width + 1) * width
    counts = [0] * (end // width - first)
    tail = 0
    for length in ordered:
        if length < end:
            counts[length // width - first] += 1
        else:
            tail += 1
    bins = [
        Bin((first + i) * width, (first + i + 1) * width, number) for i, number in enumerate(counts)
    ]
    if tail:
        bins.append(Bin(end, ordered[-1] + 1, tail))
    return tuple(bins)
