"""How long a step takes by the number of tokens that it runs, as it was measured on a device."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatencyCurve:
    """Milliseconds of one step: the base over the root and the tree's nodes, and the heads.

    Between two sizes that were measured the curve is a straight line; below the smallest it is
    level; beyond the largest nothing is known.

    Attributes:
        sizes: tokens of a step, the root included, ascending; 1 is a step without candidates.
        times: milliseconds for each.
    """

    sizes: tuple[int, ...]
    times: tuple[float, ...]

    @classmethod
    def of(cls, times: Mapping[str, float] | Mapping[int, float]) -> LatencyCurve:
        """The curve of ``{size: milliseconds}``; JSON has sizes as text.

        Raises:
            ValueError: no sizes above one; a size or a time that can be none.
        """
        points: dict[int, float] = {}
        for key, value in times.items():
            size = int(key) if str(key).isascii() and str(key).isdecimal() else 0
            if size < 1:
                raise ValueError(f"{key!r} is no number of tokens")
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{value!r} is no time in milliseconds")
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{value!r} is no time in milliseconds")
            points[size] = float(value)
        if max(points, default=0) < 2:
            raise ValueError("has no time of a step of two or more tokens")
        sizes = tuple(sorted(points))
        return cls(sizes, tuple(points[size] for size in sizes))

    @property
    def largest(self) -> int:
        """The largest size that was measured."""
        return self.sizes[-1]

    def milliseconds(self, size: int) -> float:
        """The time of a step of ``size`` tokens, at most :attr:`largest`."""
        assert size <= self.largest
        right = bisect_right(self.sizes, size)
        if right == 0 or self.sizes[right - 1] == size:
            return self.times[max(0, right - 1)]
        (low, high), (fast, slow) = self.sizes[right - 1 : right + 1], self.times[right - 1 :][:2]
        return fast + (slow - fast) * (size - low) / (high - low)

    def as_json(self) -> dict[str, float]:
        """What was measured, as a file has it."""
        return {str(size): time for size, time in zip(self.sizes, self.times, strict=True)}
