"""The picture of a candidate tree: who follows whom, and how often each node is accepted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from medusa_train.evaluate.tables import counted
from medusa_train.page.drawing import INK, SIZE, Plot, colour_of, render
from medusa_train.tree.topology import Path, Tree

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PICTURE = "tree"
MAX_LABELLED = 128
ROW_INCHES = 0.17
MAX_INCHES = 60.0
WIDEST_EDGE = 7.0
_MARGINS = 0.3  # left and right together, where depths are 1 apart


def tree_plot(result: Mapping[str, Any]) -> Plot | None:
    """The picture of ``tree.json``; None for a tree without nodes."""
    tree = Tree(tuple(tuple(path) for path in result["paths"]))
    if not tree.paths:
        return None
    shares = dict(zip(tree.paths, result["probabilities"], strict=True))
    places = _places(tree)
    inches = max(SIZE[1], ROW_INCHES * (max(places.values()) + 3))
    reported = result["reported"]
    caption = (
        "The root is the base model's own next token. A node's number is its token's rank at the "
        "head above it, 0 being the most likely. Before it stands the share of steps that accept "
        "it, by which its line is wide; all shares add up to the acceptance length less one. "
        f"{counted(reported['num_conversations'], 'conversation')}, "
        f"{counted(reported['num_positions'], 'position')}."
    )

    def draw(axes: Axes) -> None:
        _draw(axes, tree, shares, places)

    title = f"The tree of {counted(tree.num_nodes, 'node')}"
    return render(
        PICTURE, title, caption=caption, draw=draw, size=(SIZE[0], min(inches, MAX_INCHES))
    )


def _places(tree: Tree) -> dict[Path, float]:
    """Where each node stands from top to bottom: leaves one below the other, parents amid them."""
    below: dict[Path, list[Path]] = {path: [] for path in tree.index}
    for path in tree.paths:
        below[path[:-1]].append(path)
    places: dict[Path, float] = {}
    free = 0
    # By ranks alone, so that subtrees follow each other as a reader goes through them.
    for path in sorted(tree.index):
        if not below[path]:
            places[path] = float(free)
            free += 1
    for path in reversed(tree.index):
        if below[path]:
            children = [places[child] for child in below[path]]
            places[path] = (children[0] + children[-1]) / 2
    return places


def _draw(
    axes: Axes, tree: Tree, shares: Mapping[Path, float], places: Mapping[Path, float]
) -> None:
    size = 6.5 if tree.num_nodes <= MAX_LABELLED else 4.0
    # Circles are not filled, so that they look right on any page; lines end at their edges.
    radius = (tree.depth + _MARGINS) * (size + 3.5) / 2 / (72 * SIZE[0])
    _node(axes, 0.0, places[()], "", size)
    for path in tree.paths:
        x, y = float(len(path)), places[path]
        width = 0.4 + WIDEST_EDGE * shares[path]
        axes.plot(
            [x - 1 + radius, x - 0.6, x - radius],
            [places[path[:-1]], y, y],
            color=colour_of(len(path)),
            linewidth=width,
            solid_joinstyle="round",
            solid_capstyle="round",
        )
        _node(axes, x, y, str(path[-1]), size)
        axes.annotate(
            f"{shares[path]:.3f}",
            (x - radius, y),
            xytext=(-1, width / 2 + 0.5),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=size,
        )
    heads = range(1, tree.depth + 1)
    axes.set_xticks([0, *heads], ["root", *(f"head {h}" for h in heads)])
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.set_yticks([])
    axes.grid(visible=False)
    for side in ("left", "bottom", "top"):
        axes.spines[side].set_visible(False)
    axes.set_xlim(-_MARGINS / 2, tree.depth + _MARGINS / 2)
    axes.set_ylim(max(places.values()) + 1, -1)


def _node(axes: Axes, x: float, y: float, label: str, size: float) -> None:
    axes.plot([x], [y], "o", markerfacecolor="none", markeredgecolor=INK, markersize=size + 2.5)
    axes.annotate(label, (x, y), ha="center", va="center_baseline", fontsize=size, color=INK)
