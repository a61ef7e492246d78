"""The pictures of the speed report, and what each says in its caption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from medusa_train.evaluate.speedup import BASELINE, MEDUSA, SELF, WAYS
from medusa_train.evaluate.tables import counted, interval, number
from medusa_train.page.drawing import (
    COLOURS,
    INK,
    MAX_LABELLED_BARS,
    SIZE,
    Plot,
    in_font,
    render,
    write_above,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WAY_NAMES = {BASELINE: "model.generate", SELF: "our decoder, no heads", MEDUSA: "with heads"}
PLOT_NAMES = ("speed", "speed_by_category", "speed_by_prompt", "speed_by_batch_size")
_MAX_NAME = 24


def speed_plots(report: Mapping[str, Any]) -> list[Plot]:
    """Every picture that there is something to draw for."""
    plots = [_ways(report), _categories(report), _prompts(report), _batches(report)]
    return [plot for plot in plots if plot is not None]


def _ways(report: Mapping[str, Any]) -> Plot:
    def draw(axes: Axes) -> None:
        for side, key, colour, name in (
            (-0.2, "tokens_per_second", COLOURS[0], "whole call"),
            (0.2, "decode_tokens_per_second", COLOURS[5], "after the first token"),
        ):
            rates = [report[way][key] or 0.0 for way in WAYS]
            places = [place + side for place in range(len(WAYS))]
            axes.bar(places, rates, width=0.38, color=colour, label=name)
            for x, rate in zip(places, rates, strict=True):
                write_above(axes, x, rate, f"{rate:.1f}", 8)
        axes.set_xticks(
            range(len(WAYS)), [f"{WAY_NAMES[way]}\n{report[way]['dtype']}" for way in WAYS]
        )
        axes.set_ylabel("tokens per second")
        axes.set_ylim(0, axes.get_ylim()[1] * 1.2)
        axes.grid(visible=False, axis="x")
        axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")

    caption = (
        "Tokens written ÷ wall-clock time, one prompt at a time, greedy. Speed-up of the whole "
        f"call: {number(report['speedup'], digits=2)} (95 %: "
        f"{interval(report['speedup_ci95'], digits=2)}, percentile bootstrap over "
        f"{counted(report['num_prompts'], 'prompt')}, paired)."
    )
    return render("speed", "Tokens per second", caption=caption, draw=draw)


def _categories(report: Mapping[str, Any]) -> Plot | None:
    rows = [row for row in report["categories"] if row["speedup"] is not None]
    if not 1 < len(rows) <= 4 * MAX_LABELLED_BARS:
        return None

    def draw(axes: Axes) -> None:
        for y, row in enumerate(rows):
            low, high = row["speedup_ci95"] or (row["speedup"],) * 2
            axes.barh([y], [row["speedup"]], height=0.6, color=COLOURS[2])
            axes.errorbar(
                [row["speedup"]],
                [y],
                xerr=[[max(0.0, row["speedup"] - low)], [max(0.0, high - row["speedup"])]],
                color=INK,
                capsize=2,
            )
            axes.annotate(
                number(row["speedup"], digits=2),
                (high, y),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
        axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=":")
        names = [f"{_short(row['category'])} ({row['num_prompts']})" for row in rows]
        axes.set_yticks(range(len(rows)), names)
        axes.invert_yaxis()
        axes.set_xlim(0, axes.get_xlim()[1] * 1.08)
        axes.set_xlabel("speed-up against model.generate")
        axes.grid(visible=False, axis="y")

    caption = (
        "Speed-up by category, with 95 % intervals (percentile bootstrap over the category's "
        "prompts, paired). In brackets: prompts. The dotted line is plain decoding."
    )
    size = (SIZE[0], max(SIZE[1], 0.3 * len(rows) + 0.9))
    return render(
        "speed_by_category", "Speed-up by category", caption=caption, draw=draw, size=size
    )


def _prompts(report: Mapping[str, Any]) -> Plot | None:
    rows = [row for row in report["per_prompt"] if row[MEDUSA]["num_steps"]]
    if len(rows) < 2:
        return None
    lengths = [row[MEDUSA]["num_tokens"] / row[MEDUSA]["num_steps"] for row in rows]
    ratios = [_rate(row[MEDUSA]) / _rate(row[BASELINE]) for row in rows]

    def draw(axes: Axes) -> None:
        axes.plot(lengths, ratios, "o", color=COLOURS[0], markersize=4, alpha=0.7)
        axes.axhline(1.0, color=INK, linewidth=0.8, linestyle=":")
        axes.set_xlabel("tokens per step")
        axes.set_ylabel("speed-up")
        axes.set_ylim(bottom=0)

    caption = (
        f"One point per prompt ({len(rows)}): how many tokens its steps emit, and how much faster "
        "it is than model.generate. Above the dotted line heads gain."
    )
    return render("speed_by_prompt", "Speed-up by prompt", caption=caption, draw=draw)


def _batches(report: Mapping[str, Any]) -> Plot | None:
    rows: Sequence[Mapping[str, Any]] = report["batch_sizes"]
    if len(rows) < 2:
        return None

    def draw(axes: Axes) -> None:
        sizes = [row["batch_size"] for row in rows]
        for way, colour in ((BASELINE, COLOURS[1]), (MEDUSA, COLOURS[0])):
            rates = [row[way]["tokens_per_second"] for row in rows]
            axes.plot(sizes, rates, "-o", color=colour, markersize=4, label=WAY_NAMES[way])
        for row in rows:
            top = max(row[way]["tokens_per_second"] for way in (BASELINE, MEDUSA))
            axes.annotate(
                f"× {number(row['speedup'], digits=2)}",
                (row["batch_size"], top),
                xytext=(0, 6),
                textcoords="offset points",
                ha="center",
                fontsize=8,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.set_xticks([], minor=True)
        axes.margins(x=0.1)
        axes.set_ylim(0, axes.get_ylim()[1] * 1.12)
        axes.set_xlabel("prompts in a batch")
        axes.set_ylabel("tokens per second, all prompts")
        axes.legend(frameon=False, fontsize=8)

    count = rows[0]["num_prompts"]
    caption = (
        f"The same {counted(count, 'prompt')} in batches of each size, each side in its fastest "
        "dtype; above the points, the speed-up."
    )
    return render("speed_by_batch_size", "Speed by batch size", caption=caption, draw=draw)


def _rate(figures: Mapping[str, Any]) -> float:
    rate: float = figures["num_tokens"] / figures["seconds"]
    return rate


def _short(name: str) -> str:
    text = in_font(name)
    return text if len(text) <= _MAX_NAME else text[: _MAX_NAME - 1] + "…"
