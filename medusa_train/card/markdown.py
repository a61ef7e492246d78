"""Pieces of Markdown; what comes from outside is made harmless."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

from medusa_train.card.sources import Picture

FOLDER = "plots"
"""Of the pictures, beside the card."""


def heading(text: str) -> str:
    """A section's title."""
    return f"## {text}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; an empty cell stays one."""
    lines = [list(head), ["---"] * len(head), *map(list, rows)]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def bullets(lines: Iterable[str]) -> str:
    """A list."""
    return "\n".join(f"- {plain(line)}" for line in lines)


def code(text: str) -> str:
    """A name from outside, as code within a line."""
    return "`" + " ".join(text.replace("`", "'").split()) + "`"


def plain(text: str) -> str:
    """One line of text in which nothing from outside is markup but code within the line."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(
        part if part.startswith("`") else html.escape(part, quote=False) for part in parts
    )


def block(text: str, *, language: str) -> str:
    """A block of code, whatever is in it."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def folded(title: str, text: str) -> str:
    """What is shown when the reader asks for it."""
    return f"<details>\n<summary>{html.escape(title)}</summary>\n\n{text}\n\n</details>"


def picture(shown: Picture) -> str:
    """A picture, with its caption below."""
    return f"![{shown.title}]({FOLDER}/{shown.path.name})\n\n{plain(shown.caption)}"


def _cell(text: str) -> str:
    return plain(text).replace("|", "\\|")
