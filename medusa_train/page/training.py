"""The pictures of a training run, or of several for comparison, from what they logged.

One run: a colour for each head. Several runs: a colour for each run, and a picture for each head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from medusa_train.page.drawing import (
    COLOURS,
    Curves,
    Plot,
    Points,
    colour_of,
    draw_lines,
    in_font,
    render,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Line = Mapping[str, float]
"""What was logged at one step: ``step`` and figures by their names."""

MAX_MARKED = 30
MAX_NAME = 36


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """A run's name, for the legend, and its lines by ascending step."""

    name: str
    lines: Sequence[Line]

    @property
    def num_heads(self) -> int:
        """K, as the names of the figures tell it."""
        heads = [int(n[4 : n.index("_")]) for n in self.names() if n.startswith("head")]
        return max(heads, default=0)

    def names(self) -> set[str]:
        """Of all figures that were logged."""
        return {name for line in self.lines for name in line}


class _Figure(NamedTuple):
    title: str
    label: str
    caption: str
    from_zero: bool = True


_HELD_OUT = " Circles: on the held-out conversations."
_OF_HEADS = {
    "loss": _Figure(
        "Loss while training",
        "cross-entropy, nats",
        "Each head's loss on the training text, mean since the last log.",
        from_zero=False,
    ),
    "top1": _Figure(
        "Top-1 accuracy while training",
        "share of true tokens ranked first",
        "Each head's top-1 accuracy on training text, of the batches at each log.",
    ),
    "top5": _Figure(
        "Top-5 accuracy while training",
        "share of true tokens in the first five",
        "Each head's top-5 accuracy on training text, of the batches at each log.",
    ),
}
_OF_RUN = {
    "eval_acceptance_length": _Figure(
        "Acceptance length on the held-out conversations",
        "tokens per step",
        "Tokens that a decoder emits per step of the top-1 chain, with the heads as they were at "
        "that step; one is plain decoding.",
        from_zero=False,
    ),
    "base_kl": _Figure(
        "How far the base has moved",
        "KL(original ‖ trained), nats per token",
        "Divergence of the base that is trained from its original, mean over the supervised tokens "
        "of the training text since the last log; with another loss of the base, of the held-out "
        "conversations.",
    ),
    "base_cross_entropy": _Figure(
        "Loss of the base",
        "cross-entropy, nats per token",
        "Next-token loss of the base that is trained, on the training text, mean since the last "
        "log.",
        from_zero=False,
    ),
    "lambda0": _Figure(
        "Weight of the heads' loss",
        "λ0",
        "The weight of all heads' loss against the base's, as the schedule and a guard set it.",
    ),
    "learning_rate": _Figure(
        "Learning rate", "learning rate", "As the schedule set it; the base's where it is trained."
    ),
    "grad_norm": _Figure(
        "Gradient norm", "gradient norm", "Norm of all gradients before they are clipped."
    ),
    "positions_per_second": _Figure(
        "Speed",
        "positions per second",
        "Supervised positions that went through the loss, per second of training since the last "
        "log; evaluating and saving are not counted.",
    ),
    "model_flops_utilisation": _Figure(
        "Utilisation",
        "share of the device's measured rate",
        "FLOPs of the heads' matrix products per second of training, as a share of what one large "
        "product reached on this device at the start.",
    ),
    "memory_mib": _Figure(
        "Memory",
        "MiB",
        "On an accelerator the most that tensors took so far, on a CPU what the process took then.",
    ),
}


def head_plots(
    run: LoggedRun, *, keys: Sequence[str] = tuple(_OF_HEADS), least: int = 1
) -> list[Plot]:
    """Each head's curve of each figure in ``keys`` that was logged at ``least`` steps."""
    plots = []
    for key in keys:
        figure, curves = _OF_HEADS[key], _curves(run, key)
        held_out = _curves(run, key, prefix="eval_")
        if max((len(x) for x, _ in curves.values()), default=0) < least:
            continue

        def draw(
            axes: Axes,
            *,
            curves: Curves = curves,
            held_out: Curves = held_out,
            figure: _Figure = figure,
        ) -> None:
            for head, points in held_out.items():
                _draw_held_out(axes, points, colour_of(head))
            marker = _marker(curves.values())
            draw_lines(axes, curves, marker=marker, from_zero=figure.from_zero)
            _finish(axes, figure)

        caption = figure.caption + (_HELD_OUT if held_out else "")
        plots.append(render(f"training_{key}", figure.title, caption=caption, draw=draw))
    return plots


def run_plots(runs: Sequence[LoggedRun], *, prefix: str = "training") -> list[Plot]:
    """The curves that a run has one of, all ``runs`` in each picture."""
    plots = []
    for key, figure in _OF_RUN.items():
        held_out = {
            i: points for i, run in enumerate(runs) if (points := _points(run, f"eval_{key}"))
        }
        # A base that learns from another loss has its divergence on the held-out text alone.
        curves = held_out | {
            i: points for i, run in enumerate(runs) if (points := _points(run, key))
        }
        if curves:
            name = f"{prefix}_{key.removeprefix('eval_')}"
            plots.append(_comparison(name, figure, runs, curves=curves, held_out=held_out))
    return plots


def comparison_plots(runs: Sequence[LoggedRun]) -> list[Plot]:
    """Several runs in each picture: one picture for each head's figures, and the runs' own."""
    plots = []
    for head in range(1, max(run.num_heads for run in runs) + 1):
        for key, figure in _OF_HEADS.items():
            name = f"head{head}_{key}"
            curves = {i: points for i, run in enumerate(runs) if (points := _points(run, name))}
            held_out = {
                i: points for i, run in enumerate(runs) if (points := _points(run, f"eval_{name}"))
            }
            if curves:
                caption = figure.caption.replace("Each head", f"Head {head}")
                named = figure._replace(title=f"{figure.title}, head {head}", caption=caption)
                plots.append(
                    _comparison(f"comparison_{name}", named, runs, curves=curves, held_out=held_out)
                )
    return [*run_plots(runs, prefix="comparison"), *plots]


def _comparison(
    name: str,
    figure: _Figure,
    runs: Sequence[LoggedRun],
    *,
    curves: Mapping[int, Points],
    held_out: Mapping[int, Points],
) -> Plot:
    """One curve for each run (0-based), with a legend where there are several runs."""

    def draw(axes: Axes) -> None:
        marker = _marker(curves.values())
        handles = []
        for i, (x, y) in curves.items():
            dashes = "-" if i < len(COLOURS) else "--"
            colour = colour_of(i + 1)
            handles += axes.plot(
                x, y, dashes, color=colour, marker=marker, markersize=3, linewidth=1.5
            )
            if i in held_out:
                _draw_held_out(axes, held_out[i], colour)
        if figure.from_zero:
            axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.05)
        _finish(axes, figure)
        if len(runs) > 1:
            names = [in_font(_short(runs[i].name)) for i in curves]
            legend = axes.legend(handles, names, frameon=False, fontsize=8, loc="best")
            for text in legend.get_texts():
                text.set_parse_math(False)

    caption = figure.caption + (_HELD_OUT if held_out else "")
    return render(name, figure.title, caption=caption, draw=draw)


def _draw_held_out(axes: Axes, points: Points, colour: str) -> None:
    x, y = points
    axes.plot(x, y, "o", markersize=3.5, fillstyle="none", color=colour)


def _finish(axes: Axes, figure: _Figure) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(figure.label)


def _marker(curves: Iterable[Points]) -> str:
    """A mark at each point where they are few, so that a single one can be seen."""
    longest = max((len(x) for x, _ in curves), default=0)
    return "o" if longest <= MAX_MARKED else ""


def _short(name: str) -> str:
    """A name that fits into a legend, its middle left out; a leading ``_`` would hide it."""
    if len(name) > MAX_NAME:
        half = (MAX_NAME - 1) // 2
        name = f"{name[:half]}…{name[-half:]}"
    return f" {name}" if name.startswith("_") else name


def _curves(run: LoggedRun, key: str, *, prefix: str = "") -> Curves:
    found = {
        head: _points(run, f"{prefix}head{head}_{key}") for head in range(1, run.num_heads + 1)
    }
    return {head: points for head, points in found.items() if points is not None}


def _points(run: LoggedRun, name: str) -> Points | None:
    """The figure ``name`` over the steps; None where it was not logged."""
    points = [(line["step"], line[name]) for line in run.lines if name in line]
    if not points:
        return None
    array = np.array(points, dtype=float)
    return array[:, 0], array[:, 1]
