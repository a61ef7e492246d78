"""How ``medusa-distill inspect`` and ``convert`` show data on stdout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from medusa_train.console import make_table
from medusa_train.data.inspect_tables import count_rows, fate_rows, origin_rows, quantiles_phrase

if TYPE_CHECKING:
    from medusa_train.data.inspect import Inspection
    from medusa_train.data.inspect_page import Segments
    from medusa_train.data.lengths import Lengths
    from medusa_train.data.report import Report

# Marks of supervised text where there are no colours.
OPEN, CLOSE = "⟦", "⟧"
# Columns of a table in a file or a pipe: enough for the longest reason.
FILE_WIDTH = 200
# Columns of the longest bar: a histogram fits 80.
BAR_WIDTH = 40


def print_fates(report: Report) -> None:
    """The fate of every row, where the first of each kind are, and what else was met."""
    console = _console()
    console.print(make_table("rows", ("fate", "rows"), fate_rows(report)))
    for line in report.location_lines():
        console.print(line, markup=False)
    for kind, count in report.notes.items():
        console.print(f"note: {kind}: {count}", markup=False)


def print_origin(manifest: Mapping[str, Any]) -> None:
    """The fates of the rows or prompts that a data set was made from, as its manifest has them."""
    _console().print(make_table("made from", ("fate", "rows"), origin_rows(manifest)))


def print_counts(inspection: Inspection, *, end_of_turn: str | None) -> None:
    """What the rows hold, and how long they and their answers are."""
    console = _console()
    rows = count_rows(inspection, end_of_turn=end_of_turn)
    console.print(make_table("tokens and mask", ("", "count"), rows))
    kinds = (("row", inspection.row_lengths), ("answer", inspection.answer_lengths))
    for what, lengths in kinds:
        if lengths.num:
            console.print(_histogram(what, lengths))


def _histogram(what: str, lengths: Lengths) -> Table:
    """Bars for lengths; the numbers are there too, for where no bars can be drawn."""
    result = Table(
        title=f"tokens per {what}: {quantiles_phrase(lengths)}", title_justify="left", box=None
    )
    result.add_column("tokens", justify="right", no_wrap=True)
    result.add_column(f"{what}s", justify="right", no_wrap=True)
    result.add_column("", no_wrap=True)
    most = max(b.count for b in lengths.bins)
    for b in lengths.bins:
        size = round(BAR_WIDTH * b.count / most)
        result.add_row(b.label, str(b.count), "█" * max(size, 1) if b.count else "")
    return result


def print_samples(samples: Sequence[tuple[str, Segments]]) -> None:
    """Rows decoded, each with its name, the supervised text in colour and between marks."""
    console = _console()
    for name, segments in samples:
        console.print(f"\n{name}, supervised in {OPEN}{CLOSE}:", markup=False)
        text = Text()
        for piece, is_supervised in segments:
            if is_supervised:
                text.append(f"{OPEN}{piece}{CLOSE}", style="bold green")
            else:
                text.append(piece, style="dim")
        console.print(text)


def _console() -> Console:
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    return console
