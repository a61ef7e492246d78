"""The pictures of the accuracy report, and what each says in its caption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from medusa_train.evaluate.accuracy import num_accepted, walked_rows
from medusa_train.evaluate.ranks import Ranks
from medusa_train.evaluate.tables import counted, interval, number
from medusa_train.evaluate.tree_picture import PICTURE, tree_plot
from medusa_train.page.drawing import (
    COLOURS,
    INK,
    MAX_LABELLED_HEADS,
    Curves,
    Plot,
    draw_lines,
    render,
    write_above,
)
from medusa_train.page.training import LoggedRun, head_plots
from medusa_train.run_dir import read_json_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIN_PAIRS_PER_BIN = 20
NUM_BINS = 12
PLOT_NAMES = (
    "top_1_accuracy",
    "top_n_accuracy",
    "accepted",
    "position",
    PICTURE,
    "training_loss",
    "training_top1",
)


def make_plots(
    report: Mapping[str, Any],
    ranks: Ranks,
    *,
    metrics: Path | None,
    tree: Mapping[str, Any] | None = None,
) -> list[Plot]:
    """Every picture that there is something to draw for."""
    plots = [
        _top_1(report),
        _top_n(report) if report["top_k"] > 1 else None,
        _accepted(report, ranks),
        _along_the_answer(ranks),
        None if tree is None else tree_plot(tree),
        *([] if metrics is None else _training(metrics)),
    ]
    return [plot for plot in plots if plot is not None]


def _top_1(report: Mapping[str, Any]) -> Plot | None:
    heads = [head for head in report["heads"] if head["top_k_accuracy"][0] is not None]
    if not heads:
        return None
    size = 8 if len(heads) <= 5 else 6
    digits = 3 if len(heads) <= 5 else 2

    def bars(axes: Axes, side: float, colour: str, name: str, values: list[float | None]) -> None:
        drawn = [(h["head"] + side, v) for h, v in zip(heads, values, strict=True) if v is not None]
        places = [place for place, _ in drawn]
        axes.bar(places, [v for _, v in drawn], width=0.38, color=colour, label=name)

    def draw(axes: Axes) -> None:
        top1 = [head["top_k_accuracy"][0] for head in heads]
        conditional = [head["conditional_top1"] for head in heads]
        bars(axes, -0.2, COLOURS[0], "top-1, with its 95 % interval", top1)
        bars(axes, 0.2, COLOURS[4], "top-1 where all heads before it are right", conditional)
        for head, value, given in zip(heads, top1, conditional, strict=True):
            low, high = head["top1_ci95"] or (value, value)
            x = head["head"]
            axes.errorbar([x - 0.2], [value], [[value - low], [high - value]], color=INK, capsize=2)
            if len(heads) <= MAX_LABELLED_HEADS:
                write_above(axes, x - 0.2, high, number(value, digits=digits), size)
                write_above(axes, x + 0.2, given or 0.0, number(given, digits=digits), size)
        _name_heads(axes, heads)
        axes.set_ylabel("share of true tokens ranked first")
        axes.set_ylim(0, max(0.01, axes.get_ylim()[1]) * 1.22)
        axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper right", columnspacing=1.0)

    caption = (
        "Share of positions whose true token the head ranks first. n: the head's valid pairs. "
        "Intervals: 95 %, percentile bootstrap over "
        f"{counted(report['num_conversations'], 'conversation')}. The second bar counts only "
        "positions at which all heads before it are right, as a decoder does."
    )
    return render("top_1_accuracy", "Top-1 accuracy of each head", caption=caption, draw=draw)


def _name_heads(axes: Axes, heads: Sequence[Mapping[str, Any]]) -> None:
    if len(heads) > MAX_LABELLED_HEADS:
        axes.set_xticks([head["head"] for head in heads])
        axes.set_xlabel("head")
        return
    names = [f"head {head['head']}\nn = {head['positions']:,}" for head in heads]
    axes.set_xticks([head["head"] for head in heads], names, fontsize=9 if len(heads) <= 5 else 7)
    axes.set_xlim(heads[0]["head"] - 0.6, heads[-1]["head"] + 0.6)
    axes.grid(visible=False, axis="x")


def _top_n(report: Mapping[str, Any]) -> Plot | None:
    heads = [head for head in report["heads"] if head["top_k_accuracy"][0] is not None]
    if not heads:
        return None

    def draw(axes: Axes) -> None:
        x = np.arange(1, report["top_k"] + 1)
        draw_lines(axes, {head["head"]: (x, np.array(head["top_k_accuracy"])) for head in heads})
        axes.set_xlabel("n, tokens taken from the head")
        axes.set_ylabel("share of true tokens among the n")
        step = max(1, -(-report["top_k"] // 10))
        axes.set_xticks(range(1, report["top_k"] + 1, step))

    caption = (
        "How often the true token is among a head's n most likely ones, which is how often a tree "
        f"that offers n tokens of the head can accept one. n of positions as above, "
        f"{counted(report['num_conversations'], 'conversation')}."
    )
    return render("top_n_accuracy", "Top-n accuracy of each head", caption=caption, draw=draw)


def _accepted(report: Mapping[str, Any], ranks: Ranks) -> Plot | None:
    accepted = num_accepted(ranks)
    taken = accepted[walked_rows(accepted, ranks)]
    if not len(taken):
        return None
    shares = np.bincount(taken, minlength=ranks.num_heads + 1) / len(taken)

    def draw(axes: Axes) -> None:
        axes.bar(range(len(shares)), 100 * shares, color=COLOURS[2])
        for x, share in enumerate(shares):
            write_above(axes, x, 100 * share, f"{100 * share:.1f}", 8)
        axes.set_xticks(range(len(shares)))
        axes.set_xlabel("candidates accepted in a step")
        axes.set_ylabel("share of steps, %")
        axes.margins(y=0.12)
        axes.grid(visible=False, axis="x")

    chain = report["chain"]
    length, ci95 = number(chain["acceptance_length"]), interval(chain["ci95"])
    caption = (
        f"{counted(len(taken), 'step')} of the top-1 chain. Each emits the base model's own next "
        f"token and the candidates accepted after it: {length} tokens a step (95 %: {ci95}, "
        "percentile bootstrap over conversations)."
    )
    return render("accepted", "What a step of the top-1 chain accepts", caption=caption, draw=draw)


def _along_the_answer(ranks: Ranks) -> Plot | None:
    # The root at a span's first row is the answer's first token.
    place = _place_in_span(ranks) + 1
    longest = int(place.max(initial=1))
    edges = np.unique(np.geomspace(1, longest + 1, NUM_BINS + 1).round().astype(int))
    curves: Curves = {}
    for k in range(ranks.num_heads):
        valid = ranks.valid[:, k].numpy()
        hit = (ranks.ranks[:, k] == 0).numpy() & valid
        pairs, hits = (np.histogram(place[flags], edges)[0] for flags in (valid, hit))
        enough = pairs >= MIN_PAIRS_PER_BIN
        if enough.any():
            middle = np.sqrt(edges[:-1] * (edges[1:] - 1))
            curves[k + 1] = (middle[enough], hits[enough] / pairs[enough])
    if not curves:
        return None

    def draw(axes: Axes) -> None:
        axes.set_xscale("log")
        draw_lines(axes, curves)
        ticks = [t for t in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if t <= longest]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("place in the answer, tokens (logarithmic)")
        axes.set_ylabel("share of true tokens ranked first")

    caption = (
        "Top-1 accuracy by how far the answer has got. Bins grow with the distance; bins with "
        f"fewer than {MIN_PAIRS_PER_BIN} pairs are left out. {len(place):,} positions."
    )
    return render("position", "Top-1 accuracy along the answer", caption=caption, draw=draw)


def _place_in_span(ranks: Ranks) -> npt.NDArray[np.int64]:
    """[N] rows since the first row of the same span."""
    rows = np.arange(len(ranks.position))
    is_new = (np.diff(ranks.conversation.numpy()) != 0) | (np.diff(ranks.span.numpy()) != 0)
    is_first = np.concatenate([[True], is_new])
    return rows - np.maximum.accumulate(np.where(is_first, rows, 0))


def _training(metrics: Path) -> list[Plot]:
    run = LoggedRun("", read_json_lines(metrics))
    return head_plots(run, keys=("loss", "top1"), least=2)
