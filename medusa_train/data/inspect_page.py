"""What an inspection found as one HTML page with pictures, and the pictures as PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_train.data.inspect_tables import count_rows, fate_rows, origin_rows, quantiles_phrase
from medusa_train.page.drawing import COLOURS, MAX_LABELLED_BARS, Plot, render, write_above
from medusa_train.page.frame import facts_list, headline, paragraph, pictures, table, whole_page
from medusa_train.run_dir import atomic_path, write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from medusa_train.data.inspect import Inspection
    from medusa_train.data.lengths import Lengths
    from medusa_train.data.report import Report

PAGE_FILE = "inspect.html"
PLOT_NAMES = ("lengths", "answer_lengths")
Segments = Sequence[tuple[str, bool]]
"""A row's text in pieces, each with whether it is supervised."""

_STYLE = """
.row { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: .75rem 1rem; margin: .5rem 0 1.25rem; max-height: 32rem; overflow: auto;
  font: .85rem/1.6 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  color: var(--soft); }
.row mark { color: var(--ink); border-radius: 3px; padding: .1em 0;
  background: color-mix(in srgb, var(--c3) 28%, transparent);
  border-bottom: 2px solid var(--c3); }
.places { color: var(--soft); font-size: .85rem; margin: .5rem 0; padding-left: 1.2rem;
  overflow-wrap: anywhere; }
.narrow { max-width: 46rem; }
@media print { .row { max-height: none; overflow: visible; } }
"""


def write_inspection(
    directory: Path,
    *,
    name: str,
    report: Report,
    inspection: Inspection,
    end_of_turn: str | None,
    manifest: Mapping[str, Any] | None = None,
    samples: Sequence[tuple[str, Segments]] = (),
    facts: Mapping[str, str] | None = None,
) -> None:
    """Write ``inspect.html``, ``lengths.png`` and ``answer_lengths.png``.

    Args:
        directory: made if needed.
        name: of the data.
        report: the fate of every row.
        inspection: what was counted.
        end_of_turn: the token that most answers end with.
        manifest: of a data set, for what it was made from.
        samples: rows to show, each with its name.
        facts: lines for the page's head.
    """
    plots = _plots(inspection)
    # Where older data had more to draw, its picture would look like this one's.
    for missing in set(PLOT_NAMES) - {plot.name for plot in plots}:
        (directory / f"{missing}.png").unlink(missing_ok=True)
    for plot in plots:
        with atomic_path(directory / f"{plot.name}.png") as temporary:
            temporary.write_bytes(plot.png)
    fates = _table("rows", fate_rows(report)) if report.num_rows else "<p>No rows.</p>"
    body = [
        paragraph(
            f"{report.num_rows:,} rows: {report.num_kept:,} kept, {report.num_repaired:,} "
            f"repaired, {report.num_dropped:,} dropped"
        ),
        headline(_figures(inspection)),
        facts_list(facts or {}),
        *(() if not manifest else ("<h2>Made from</h2>", _table("rows", origin_rows(manifest)))),
        "<h2>Rows</h2>",
        fates,
        _places(report),
        "<h2>Tokens and mask</h2>",
        _table("count", count_rows(inspection, end_of_turn=end_of_turn)),
        *(("<h2>Lengths</h2>", pictures(plots)) if plots else ()),
        *(("<h2>Rows as the model sees them</h2>", *_samples(samples)) if samples else ()),
    ]
    write_text(directory / PAGE_FILE, whole_page(f"Data: {name}", body, style=_STYLE))


def _figures(found: Inspection) -> list[tuple[str, str]]:
    covered = found.num_with_end_of_turn / found.num_spans if found.num_spans else 0.0
    return [
        (f"{found.num_conversations:,}", "conversations"),
        (
            f"{found.supervised_share:.1%}",
            f"of {found.num_tokens:,} tokens are supervised",
        ),
        (f"{covered:.1%}", f"of {found.num_spans:,} answers have an end of turn"),
    ]


def _table(column: str, rows: Sequence[tuple[str, object]]) -> str:
    cells = [(name, f"{n:,}" if isinstance(n, int) else n) for name, n in rows]
    return f'<div class="narrow">{table(("", column), cells)}</div>'


def _places(report: Report) -> str:
    lines = [f"<li>{escape(line)}</li>" for line in report.location_lines()]
    lines += [f"<li>{escape(f'note: {kind}: {n:,}')}</li>" for kind, n in report.notes.items()]
    return f'<ul class="places">{"".join(lines)}</ul>' if lines else ""


def _samples(samples: Sequence[tuple[str, Segments]]) -> list[str]:
    parts = ["<p>The marked text is supervised: it is what the heads learn to predict.</p>"]
    for name, segments in samples:
        text = "".join(
            f"<mark>{escape(piece)}</mark>" if is_supervised else escape(piece)
            for piece, is_supervised in segments
        )
        parts += [f"<h3>{escape(name)}</h3>", f'<div class="row">{text}</div>']
    return parts


def _plots(found: Inspection) -> list[Plot]:
    pictures_of = (
        ("lengths", "Tokens per row", "rows", found.row_lengths, COLOURS[0]),
        ("answer_lengths", "Tokens per answer", "answers", found.answer_lengths, COLOURS[2]),
    )
    return [
        _histogram(name, title, what=what, lengths=lengths, colour=colour)
        for name, title, what, lengths, colour in pictures_of
        if lengths.num
    ]


def _histogram(name: str, title: str, *, what: str, lengths: Lengths, colour: str) -> Plot:
    def draw(axes: Axes) -> None:
        places = range(len(lengths.bins))
        bars = axes.bar(places, [b.count for b in lengths.bins], width=0.94, color=colour)
        if lengths.has_tail:
            bars[-1].set_alpha(0.5)
        for x, b in zip(places, lengths.bins, strict=True):
            if b.count and len(lengths.bins) <= MAX_LABELLED_BARS:
                write_above(axes, x, b.count, f"{b.count:,}", 7)
        labels = [b.label for b in lengths.bins]
        axes.set_xticks(places, labels, rotation=40, ha="right", rotation_mode="anchor", fontsize=7)
        axes.set_xlabel("tokens")
        axes.set_ylabel(what)
        axes.margins(y=0.12)
        axes.grid(visible=False, axis="x")

    caption = f"{lengths.num:,} {what}: {quantiles_phrase(lengths)}."
    if lengths.has_tail:
        caption += " The pale bar holds all that are longer; it is wider than the others."
    return render(name, title, caption=caption, draw=draw)
