"""The pictures of the quality report, and what each says in its caption."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from medusa_train.evaluate.tables import counted
from medusa_train.page.drawing import COLOURS, INK, Plot, render

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_NAMES = ("quality_agreement", "quality_kl", "quality_conversations")
MIN_PER_BIN = 20
_TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


def quality_plots(report: Mapping[str, Any]) -> list[Plot]:
    """Every picture that there is something to draw for."""
    plots = [_agreement(report), _kl(report), _conversations(report)]
    return [plot for plot in plots if plot is not None]


def _agreement(report: Mapping[str, Any]) -> Plot | None:
    rows = _enough(report)
    if not rows:
        return None
    caption = (
        "Share of positions at which both models have the same most likely token, by how far the "
        f"answer has got. The dotted line is what the verdict wants. {_how(report)}"
    )
    return render(
        "quality_agreement",
        "Greedy agreement along the answer",
        caption=caption,
        draw=_along(
            rows,
            key="greedy_top1_agreement",
            factor=100.0,
            colour=COLOURS[0],
            label="same most likely token, %",
            line=100 * report["verdict"]["min_agreement"],
        ),
    )


def _kl(report: Mapping[str, Any]) -> Plot | None:
    rows = _enough(report)
    if not rows:
        return None
    caption = (
        "Mean KL(original ‖ changed) of the next token's distribution, by how far the answer has "
        f"got. {_how(report)}"
    )
    return render(
        "quality_kl",
        "KL along the answer",
        caption=caption,
        draw=_along(
            rows, key="kl", factor=1.0, colour=COLOURS[1], label="KL, nats", from_zero=True
        ),
    )


def _along(
    rows: Sequence[Mapping[str, Any]],
    *,
    key: str,
    factor: float,
    colour: str,
    label: str,
    line: float | None = None,
    from_zero: bool = False,
) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        x = [math.sqrt(row["first_place"] * row["last_place"]) for row in rows]
        y = [factor * row[key] for row in rows]
        ends = [row[f"{key}_ci95"] or [row[key]] * 2 for row in rows]
        low, high = ([factor * end[i] for end in ends] for i in (0, 1))
        axes.set_xscale("log")
        axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(x, y, "-o", color=colour, markersize=3, linewidth=1.5)
        if line is not None:
            axes.axhline(line, color=INK, linewidth=0.8, linestyle=":")
        if from_zero:
            axes.set_ylim(bottom=0)
        longest = rows[-1]["last_place"]
        ticks = [tick for tick in _TICKS if tick <= longest]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("place in the answer, tokens (logarithmic)")
        axes.set_ylabel(label)

    return draw


def _conversations(report: Mapping[str, Any]) -> Plot | None:
    rows = report["per_conversation"]
    if len(rows) < 2:
        return None

    def draw(axes: Axes) -> None:
        x = [row["original_nll"] for row in rows]
        y = [row["changed_nll"] for row in rows]
        low, high = min(x + y), max(x + y)
        axes.plot([low, high], [low, high], ":", color=INK, linewidth=0.8)
        axes.plot(x, y, "o", color=COLOURS[2], markersize=4, alpha=0.6, markeredgewidth=0)
        axes.set_xlabel("cross-entropy of the original, nats per token")
        axes.set_ylabel("cross-entropy of the changed model")

    caption = (
        f"One point per conversation ({len(rows):,}): the logarithm of its perplexity. On the "
        "dotted line the changed model finds the text as likely as the original does; above it, "
        "less likely."
    )
    return render(
        "quality_conversations", "Cross-entropy by conversation", caption=caption, draw=draw
    )


def _enough(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in report["by_place"] if row["num_positions"] >= MIN_PER_BIN]


def _how(report: Mapping[str, Any]) -> str:
    return (
        f"Bins grow with the distance; those with fewer than {MIN_PER_BIN} positions are left out. "
        f"Band: 95 %, percentile bootstrap over "
        f"{counted(report['num_conversations'], 'conversation')}."
    )
