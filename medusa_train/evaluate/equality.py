"""Whether two ways of greedy decoding say the same, and whether a difference is a tie.

Two passes of different shapes add numbers in another order, so where the base's two greatest logits
are equal to the last steps of its dtype, either token may come out as the greater one. Such a first
difference is a *tie*; any other one is an error of the decoder.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

TIE_STEPS = 2
"""A tie is a gap of at most so many steps of the dtype."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two answers to one prompt first differ.

    Attributes:
        prompt: its number, from 0.
        position: of the token in the answer, from 0.
        plain_token: of plain decoding; None where it had ended.
        token: of decoding with heads; None where it had ended.
        gap_in_steps: how far the lower of the two tokens' logits lies below the base's greatest
            one, in steps of the dtype; None where one of the answers had ended.
        kind: ``tie`` or ``other``.
    """

    prompt: int
    position: int
    plain_token: int | None
    token: int | None
    gap_in_steps: float | None
    kind: Literal["tie", "other"]


def first_difference(plain: Sequence[int], ours: Sequence[int]) -> int | None:
    """The first position at which two answers differ; None where they are the same."""
    for position, (a, b) in enumerate(zip(plain, ours, strict=False)):
        if a != b:
            return position
    return None if len(plain) == len(ours) else min(len(plain), len(ours))


def step_of(value: float, dtype: torch.dtype) -> float:
    """The distance of neighbouring numbers of ``dtype`` at the magnitude of ``value``."""
    info = torch.finfo(dtype)
    magnitude = max(abs(value), info.tiny)
    return math.ldexp(info.eps, math.frexp(magnitude)[1] - 1)


def gap_in_steps(logits: Tensor, tokens: Sequence[int], *, dtype: torch.dtype) -> float:
    """How far the lowest of ``tokens`` lies below the greatest logit, in steps of ``dtype``.

    Args:
        logits: [V] of the base at the position.
        tokens: what was said there.
        dtype: that the base computes in.
    """
    values = logits.double()
    greatest = float(values.max())
    lowest = min(float(values[token]) for token in tokens)
    return (greatest - lowest) / step_of(greatest, dtype)


def classify(
    number: int,
    *,
    position: int,
    plain: Sequence[int],
    ours: Sequence[int],
    logits: Tensor,
    dtype: torch.dtype,
) -> Difference:
    """The first difference of two answers, as a tie or not.

    Args:
        number: of the prompt.
        position: of the difference.
        plain: the answer of plain decoding.
        ours: the answer of decoding with heads.
        logits: [V] of the base after the prompt and what both answers have in common.
        dtype: that the base computes in.
    """
    a, b = (ids[position] if position < len(ids) else None for ids in (plain, ours))
    if a is None or b is None:
        # One answer has ended without a stop token that the other would lack: no tie does that.
        return Difference(number, position, a, b, None, "other")
    gap = gap_in_steps(logits, [a, b], dtype=dtype)
    return Difference(number, position, a, b, gap, "tie" if gap <= TIE_STEPS else "other")


def equality_report(
    differences: Sequence[Difference], *, num_prompts: int, dtype: str
) -> dict[str, Any]:
    """``identical_outputs`` of ``speedup.json``."""
    kinds = Counter(difference.kind for difference in differences)
    return {
        "dtype": dtype,
        "identical": num_prompts - len(differences),
        "of": num_prompts,
        "ties": kinds["tie"],
        "other": kinds["other"],
        "differences": [asdict(difference) for difference in differences],
    }
