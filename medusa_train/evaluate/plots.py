"""The pictures of the accuracy report.

matplotlib is imported where it draws, and through ``Figure`` alone: no global state, no display.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from medusa_train.evaluate.accuracy import num_accepted, walked_rows
from medusa_train.evaluate.ranks import Ranks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, told apart with every kind of colour vision; then again, dashed.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C8C")
SIZE = (7.0, 4.0)
DPI = 150
MIN_PAIRS_PER_BIN = 20
NUM_BINS = 12


@dataclass(frozen=True, slots=True)
class Plot:
    """One picture: its file's name without ending, words, and the PNG's bytes."""

    name: str
    title: str
    caption: str
    png: bytes


def make_plots(report: Mapping[str, Any], ranks: Ranks, *, metrics: Path | None) -> list[Plot]:
    """Every picture that there is something to draw for."""
    plots = [_top_n(report), _top_1(report), _accepted(report, ranks), _over_position(ranks)]
    curves = _read_curves(metrics) if metrics is not None and metrics.exists() else []
    if len(curves) > 1:
        plots.append(_training(curves, report["num_heads"]))
    return plots


def _draw(name: str, title: str, caption: str, *, axes: int, draw: Any) -> Plot:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(SIZE[0], SIZE[1] * axes), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    parts = [figure.add_subplot(axes, 1, i + 1) for i in range(axes)]
    for part in parts:
        part.grid(visible=True, alpha=0.25, linewidth=0.6)
        part.spines[["top", "right"]].set_visible(False)
    draw(*parts)
    parts[0].set_title(title, loc="left")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return Plot(name, title, caption, buffer.getvalue())


def _style(head: int) -> dict[str, Any]:
    dashed = head >= len(COLOURS)
    return {"color": COLOURS[head % len(COLOURS)], "linestyle": "--" if dashed else "-"}


def _label_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each line's name at its right end, moved apart where two would overlap."""
    low, high = axes.get_ylim()
    gap = (high - low) * 0.055
    last = -np.inf
    for x, y, text, colour in sorted(ends, key=lambda end: end[1]):
        last = max(y, last + gap)
        axes.annotate(
            text, (x, last), xytext=(6, 0), textcoords="offset points", color=colour, va="center"
        )


def _top_n(report: Mapping[str, Any]) -> Plot:
    def draw(axes: Axes) -> None:
        ends = []
        x = range(1, report["top_k"] + 1)
        for k, head in enumerate(report["heads"]):
            y = head["top_k_accuracy"]
            if y[0] is None:
                continue
            axes.plot(x, y, marker="o", markersize=3, **_style(k))
            ends.append((report["top_k"], y[-1], f"head {k + 1}", COLOURS[k % len(COLOURS)]))
        axes.set_xlabel("n: candidates taken from the head")
        axes.set_ylabel("share of true tokens among the n")
        axes.set_ylim(bottom=0)
        axes.set_xticks(list(x))
        _label_ends(axes, ends)

    caption = (
        "How often the true token is among a head's n most likely ones: a candidate tree that "
        f"offers n tokens of a head can accept that often. {report['num_conversations']} "
        "conversations."
    )
    return _draw("top_n_accuracy", "Top-n accuracy of each head", caption, axes=1, draw=draw)


def _top_1(report: Mapping[str, Any]) -> Plot:
    heads = [head for head in report["heads"] if head["top_k_accuracy"][0] is not None]

    def draw(axes: Axes) -> None:
        for offset, key, colour, name in (
            (-0.2, "top1", COLOURS[0], "top-1"),
            (0.2, "conditional", COLOURS[4], "given that all heads before are right"),
        ):
            values = [
                head["top_k_accuracy"][0] if key == "top1" else head["conditional_top1"] or 0.0
                for head in heads
            ]
            places = [head["head"] + offset for head in heads]
            axes.bar(places, values, width=0.38, color=colour, label=name)
            for x, y in zip(places, values, strict=True):
                axes.annotate(f"{y:.3f}", (x, 0), xytext=(0, 4), ha="center", fontsize=8,
                              textcoords="offset points", color="white")  # fmt: skip
        for head in heads:
            low, high = head["top1_ci95"]
            axes.plot([head["head"] - 0.2] * 2, [low, high], color="black", linewidth=1.2)
        axes.set_xticks([head["head"] for head in heads], [f"head {h['head']}" for h in heads])
        axes.set_ylabel("share of true tokens ranked first")
        axes.legend(frameon=False)

    caption = (
        "Bars: share of positions whose true token the head ranks first. Black: its 95 % interval "
        "(percentile bootstrap over conversations)."
    )
    return _draw("top_1_accuracy", "Top-1 accuracy of each head", caption, axes=1, draw=draw)


def _accepted(report: Mapping[str, Any], ranks: Ranks) -> Plot:
    accepted = num_accepted(ranks)
    taken = accepted[walked_rows(accepted, ranks)]
    shares = np.bincount(taken, minlength=ranks.num_heads + 1) / max(len(taken), 1)

    def draw(axes: Axes) -> None:
        axes.bar(range(len(shares)), shares, color=COLOURS[2])
        for x, share in enumerate(shares):
            axes.annotate(f"{share:.1%}", (x, share), xytext=(0, 3), ha="center",
                          textcoords="offset points")  # fmt: skip
        axes.set_xticks(range(len(shares)))
        axes.set_xlabel("accepted candidates in a step of the top-1 chain")
        axes.set_ylabel("share of steps")
        axes.margins(y=0.15)

    length = report["chain"]["acceptance_length"]
    caption = (
        f"{len(taken):,} steps. Each emits the base model's own next token and what is accepted "
        f"after it: {length:.3f} tokens a step."
        if length is not None
        else "No step was taken."
    )
    return _draw("accepted", "What the top-1 chain accepts", caption, axes=1, draw=draw)


def _over_position(ranks: Ranks) -> Plot:
    starts = np.flatnonzero(np.r_[True, np.diff(ranks.conversation.numpy()) != 0]
                            | np.r_[True, np.diff(ranks.span.numpy()) != 0])  # fmt: skip
    span_of_row = np.cumsum(np.isin(np.arange(len(ranks.position)), starts)) - 1
    offset = ranks.position.numpy() - ranks.position.numpy()[starts][span_of_row]
    edges = np.unique(np.geomspace(1, max(2, int(offset.max()) + 2), NUM_BINS).astype(int)) - 1

    def draw(axes: Axes) -> None:
        ends = []
        for k in range(ranks.num_heads):
            valid = ranks.valid[:, k].numpy()
            hit = (ranks.ranks[:, k] == 0).numpy() & valid
            pairs, _ = np.histogram(offset[valid], edges)
            hits, _ = np.histogram(offset[hit], edges)
            enough = pairs >= min(MIN_PAIRS_PER_BIN, max(1, int(pairs.max(initial=0))))
            if not enough.any():
                continue
            x = ((edges[:-1] + edges[1:]) / 2)[enough]
            y = hits[enough] / pairs[enough]
            axes.plot(x, y, marker="o", markersize=3, **_style(k))
            ends.append((x[-1], y[-1], f"head {k + 1}", COLOURS[k % len(COLOURS)]))
        axes.set_xlabel("tokens since the beginning of the answer")
        axes.set_ylabel("share of true tokens ranked first")
        axes.set_ylim(bottom=0)
        _label_ends(axes, ends)

    caption = (
        "Top-1 accuracy along the answer, in bins that grow with the distance; bins with fewer "
        f"than {MIN_PAIRS_PER_BIN} positions are left out."
    )
    return _draw("position", "Top-1 accuracy along the answer", caption, axes=1, draw=draw)


def _training(curves: list[dict[str, Any]], num_heads: int) -> Plot:
    def draw(loss: Axes, top1: Axes) -> None:
        for axes, key in ((loss, "loss"), (top1, "top1")):
            ends = []
            for k in range(num_heads):
                points = [(c["step"], c[f"head{k + 1}_{key}"]) for c in curves
                          if f"head{k + 1}_{key}" in c]  # fmt: skip
                if not points:
                    continue
                x, y = zip(*points, strict=True)
                axes.plot(x, y, **_style(k))
                ends.append((x[-1], y[-1], f"head {k + 1}", COLOURS[k % len(COLOURS)]))
            _label_ends(axes, ends)
        loss.set_ylabel("cross-entropy, nats")
        top1.set_ylabel("top-1 accuracy of one batch")
        top1.set_xlabel("optimizer step")

    caption = "Training: each head's loss since the last log, and its top-1 accuracy at that step."
    return _draw("training", "Training", caption, axes=2, draw=draw)


def _read_curves(path: Path) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if "loss" in line]
