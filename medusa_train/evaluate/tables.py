"""The report's figures as words: one place for every form of the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from medusa_train.evaluate.accuracy import MIN_CONVERSATIONS

ABSENT = "–"
_DRAWN_BY = ("temperature", "top_p", "top_k")


def number(value: float | None, *, digits: int = 3) -> str:
    """A figure, or a dash where there was nothing to count."""
    return ABSENT if value is None else f"{value:.{digits}f}"


def interval(value: Sequence[float] | None, *, digits: int = 3) -> str:
    """An interval, or a dash."""
    return ABSENT if value is None else f"{value[0]:.{digits}f}–{value[1]:.{digits}f}"


def columns(report: Mapping[str, Any]) -> list[str]:
    """The names of the table's columns."""
    tops = [f"top-{n}" for n in range(2, report["top_k"] + 1)]
    return ["head", "predicts", "positions", "top-1", "95 %", "conditional", *tops]


def accuracy_rows(report: Mapping[str, Any]) -> list[list[str]]:
    """One row of cells per head."""
    rows = []
    for head in report["heads"]:
        top1, *others = head["top_k_accuracy"]
        rows.append(
            [
                str(head["head"]),
                head["predicts"],
                f"{head['positions']:,}",
                number(top1),
                interval(head["top1_ci95"]),
                number(head["conditional_top1"]),
                *(number(value) for value in others),
            ]
        )
    return rows


def plain_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as plain text, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def chain_line(report: Mapping[str, Any]) -> str:
    """What the top-1 chain does, in one sentence."""
    chain = report["chain"]
    return (
        f"Acceptance length of the top-1 chain of {report['num_heads']}: "
        f"{number(chain['acceptance_length'])} tokens per step "
        f"(95 %: {interval(chain['ci95'])})"
    )


PAYING = (
    "A head of the chain pays where it adds a greater share of tokens per step than of the weights "
    "that a step reads, which decide its time at batch size 1."
)
"""How the table of :func:`gain_rows` is to be read."""


def gain_columns() -> list[str]:
    """The names of the columns of :func:`gain_rows`."""
    return ["heads", "tokens per step", "95 %", "adds", "95 %", "more tokens", "more weights"]


def gain_rows(report: Mapping[str, Any]) -> list[list[str]]:
    """The top-1 chain of the first 1, 2, … heads; older reports do not have it."""
    rows, before = [], 1.0
    for row in report["chain"].get("by_length", []):
        length = row["acceptance_length"]
        rows.append(
            [
                str(row["num_heads"]),
                number(length),
                interval(row["ci95"]),
                number(row["gain"]),
                interval(row["gain_ci95"]),
                _percent(None if length is None else length / before - 1.0),
                _percent(row["weights_growth"]),
            ]
        )
        before = length
    return rows


def pay_lines(report: Mapping[str, Any]) -> list[str]:
    """Which heads are worth their time in a chain; nothing where it is not known."""
    chain, num_heads = report["chain"], report["num_heads"]
    kept = chain.get("num_heads_that_pay")
    if kept is None:
        return []
    if kept == num_heads:
        all_of_them = "The head pays" if num_heads == 1 else f"All {num_heads} heads pay"
        return [f"{all_of_them} in a chain at batch size 1"]
    lengths = [1.0, *(row["acceptance_length"] for row in chain["by_length"])]
    growth = math.prod(1.0 + row["weights_growth"] for row in chain["by_length"][kept:]) - 1.0
    is_one = kept + 1 == num_heads
    which = f"Head {num_heads} adds" if is_one else f"Heads {kept + 1} to {num_heads} add"
    advice = f"leave {'it' if is_one else 'them'} out with --num-heads {kept}"
    return [
        f"{which} {number(lengths[-1] - lengths[kept])} tokens per step to the chain, "
        f"{_percent(lengths[-1] / lengths[kept] - 1.0)}, and {_percent(growth)} to the weights "
        f"that a step reads: {advice if kept else 'no head pays at batch size 1'}"
    ]


def _percent(share: float | None) -> str:
    return ABSENT if share is None else f"{share:.1%}".replace("%", " %")


def tree_lines(report: Mapping[str, Any]) -> list[str]:
    """What the tree does, in one sentence; nothing where there is none."""
    tree = report["tree"]
    if tree is None:
        return []
    return [
        f"Acceptance length of the tree of {counted(tree['num_nodes'], 'node')}: "
        f"{number(tree['acceptance_length'])} tokens per step (95 %: {interval(tree['ci95'])}), "
        f"{counted(tree['num_conversations'], 'conversation')}"
    ]


def text_lines(report: Mapping[str, Any]) -> list[str]:
    """How much was measured, and what the text's sampling means for the figures."""
    counts = (
        f"{counted(report['num_conversations'], 'conversation')}, "
        f"{counted(report['num_positions'], 'position')}"
    )
    intervals = "intervals: 95 %, percentile bootstrap over conversations"
    if report["num_conversations"] < MIN_CONVERSATIONS:
        intervals = f"no intervals: they need {MIN_CONVERSATIONS} conversations"
    return [f"{counts}; {intervals}", f"text: {sampling_phrase(report['text_sampling'])}"]


def sampling_phrase(sampling: Any) -> str:
    """How the text was drawn, and for which decoding the acceptance length is exact."""
    if isinstance(sampling, Sequence) and not isinstance(sampling, str):
        ways = [_drawn_by(way) for way in sampling]
        if ways and all(way is not None and way == ways[0] for way in ways):
            sampling = sampling[0]  # the ways differ in the seed or the greatest length alone
        else:
            return "drawn in several ways; exact for no single way of decoding"
    if not isinstance(sampling, Mapping):
        return (
            "given, not written by the base model; the figures describe this text and say nothing "
            "exact about decoding"
        )
    temperature = sampling.get("temperature")
    if temperature == 0:
        return "the base model's greedy answers; the acceptance length is exact for greedy decoding"
    settings = [f"temperature {'unknown' if temperature is None else temperature}"]
    if sampling.get("top_p", 1.0) != 1.0:
        settings.append(f"top-p {sampling['top_p']}")
    if sampling.get("top_k"):
        settings.append(f"top-k {sampling['top_k']}")
    return (
        f"the base model's answers at {', '.join(settings)}; the acceptance length is "
        "exact for lossless sampling with the same settings, and not for greedy decoding"
    )


def _drawn_by(sampling: Any) -> tuple[Any, ...] | None:
    if not isinstance(sampling, Mapping):
        return None
    return tuple(sampling.get(key) for key in _DRAWN_BY)


def counted(count: int, noun: str) -> str:
    """``1 row``, ``2 rows``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
