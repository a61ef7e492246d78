"""How the pictures of reports are drawn: one style, one palette, PNG and SVG from one figure.

matplotlib is imported where it draws, and through ``Figure`` alone: no windows, no state that
stays. Text from outside (model names, facts) stays out of the pictures, since its glyphs may be
missing from the font; :func:`in_font` is for names that a legend must have.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, told apart with every kind of colour vision; heads 9 to 16 are dashed.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#8c8c8c")
INK = "#1b1f24"
SIZE = (5.6, 3.4)
DPI = 200
MAX_LABELLED_HEADS = 8
MAX_LABELLED_BARS = 13
HEIGHT_OF_LABELS = 0.07
STYLE: dict[Any, Any] = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titleweight": "bold",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "grid.alpha": 0.15,
    "grid.color": INK,
    "svg.fonttype": "path",
    "text.color": INK,
    "text.usetex": False,
    "xtick.color": INK,
    "ytick.color": INK,
}
Points = tuple[npt.NDArray[Any], npt.NDArray[Any]]
"""x and y of a curve."""

Curves = dict[int, Points]
"""One curve per head (1-based)."""


@dataclass(frozen=True, slots=True)
class Plot:
    """One picture.

    Attributes:
        name: of its file, without ending.
        title: what it shows.
        caption: how to read it, with sample sizes and the method of intervals.
        png: a PNG file.
        svg: an ``<svg>`` element for the page: colours are the page's (``currentColor`` and
            ``--c1`` to ``--c8``), ids begin with the name.
    """

    name: str
    title: str
    caption: str
    png: bytes
    svg: str


def render(
    name: str,
    title: str,
    *,
    caption: str,
    draw: Callable[[Axes], None],
    size: tuple[float, float] = SIZE,
) -> Plot:
    """Let ``draw`` fill the axes of one picture of ``size`` inches."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    svg, png = io.StringIO(), io.BytesIO()
    with rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        # The page has the title as a heading.
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None})
        axes.set_title(title, loc="left")
        figure.savefig(png, format="png", dpi=DPI)
    return Plot(name, title, caption, png.getvalue(), _for_page(svg.getvalue(), name, title))


def _for_page(svg: str, name: str, title: str) -> str:
    """An ``<svg>`` element without outside names, in the page's colours, with ids of its own."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg)
    for reference in ('id="', 'href="#', "url(#"):
        svg = svg.replace(reference, f"{reference}{name}-")
    svg = svg.replace(INK, "currentColor")
    for i, colour in enumerate(COLOURS, start=1):
        svg = svg.replace(colour, f"var(--c{i})")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1).strip()


def svg_file(plot: Plot) -> str:
    """The picture as an SVG file of its own, in the colours of a light page."""
    svg = plot.svg.replace("currentColor", INK)
    for i, colour in enumerate(COLOURS, start=1):
        svg = svg.replace(f"var(--c{i})", colour)
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return svg.replace("<svg ", f"<svg {names} ", 1) + "\n"


def write_above(axes: Axes, x: float, y: float, text: str, size: float) -> None:
    """Write a figure above a bar that ends at ``y``."""
    axes.annotate(
        text, (x, y), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=size
    )


def draw_lines(axes: Axes, curves: Curves, *, marker: str = "o", from_zero: bool = True) -> None:
    """One line per head (1-based), named at its right end."""
    for head, (x, y) in curves.items():
        dashes = "-" if head <= len(COLOURS) else "--"
        axes.plot(x, y, dashes, marker=marker, markersize=3, color=colour_of(head), linewidth=1.5)
    if from_zero:
        axes.set_ylim(bottom=0)
    low, high = axes.get_ylim()
    ends = sorted((float(y[-1]), float(x[-1]), head) for head, (x, y) in curves.items())
    gap = (high - low) * min(HEIGHT_OF_LABELS, 1.0 / max(len(ends), 1))
    places = _apart([end for end, _, _ in ends], gap, high)
    edge = max((last for _, last, _ in ends), default=0.0)
    for (end, last, head), place in zip(ends, places, strict=True):
        axes.annotate(
            f"head {head}",
            (last, end),
            xytext=(edge, place),
            textcoords=_right_of(axes),
            va="center",
            fontsize=8 if len(ends) <= MAX_LABELLED_HEADS else 6,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour_of(head), "shrinkA": 0, "shrinkB": 0},
        )


def _right_of(axes: Axes) -> Any:
    """Data coordinates, moved to the right by the length of a label's leader."""
    from matplotlib.transforms import ScaledTranslation

    figure = axes.get_figure(root=True)
    assert figure is not None
    return axes.transData + ScaledTranslation(16 / 72, 0, figure.dpi_scale_trans)


def _apart(wanted: Sequence[float], gap: float, high: float) -> list[float]:
    """Places near the ascending ``wanted``, at least ``gap`` apart and not above ``high``."""
    places: list[float] = []
    for y in wanted:
        places.append(max(y, places[-1] + gap) if places else y)
    limit = high
    for i in reversed(range(len(places))):
        places[i] = min(places[i], limit)
        limit = places[i] - gap
    return places


def colour_of(head: int) -> str:
    """The colour of a head (1-based)."""
    return COLOURS[(head - 1) % len(COLOURS)]


def in_font(text: str) -> str:
    """``text`` with ``?`` for every character that the font of the pictures does not have."""
    from matplotlib.font_manager import findfont, get_font

    known = get_font(findfont(str(STYLE["font.family"]))).get_charmap()
    return "".join(character if ord(character) in known else "?" for character in text)
