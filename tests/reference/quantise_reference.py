"""int8 with a scale for each row in plain Python loops.

Nothing here imports the package: an independent second opinion.
"""

from __future__ import annotations


def quantise(rows: list[list[float]]) -> tuple[list[list[int]], list[float]]:
    """Each row as whole multiples, from -127 to 127, of its greatest magnitude ÷ 127."""
    steps, scales = [], []
    for row in rows:
        scale = max(abs(value) for value in row) / 127
        steps.append([round(value / scale) if scale else 0 for value in row])
        scales.append(scale)
    return steps, scales
