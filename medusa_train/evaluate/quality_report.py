"""The quality report as files: ``quality.json``, Markdown, one HTML page, PNG plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa_train.evaluate.quality_page import html_page
from medusa_train.evaluate.quality_plots import PLOT_NAMES, quality_plots
from medusa_train.evaluate.quality_words import tables, text_lines, title, verdict_line
from medusa_train.evaluate.tables import plain_table
from medusa_train.page.drawing import Plot
from medusa_train.run_dir import atomic_path, write_json, write_text

REPORT_FILE = "quality.json"


def write_quality(report: Mapping[str, Any], *, directory: Path) -> None:
    """Write every form of the report into ``directory``; ``quality.json`` comes last."""
    plots = quality_plots(report)
    # Where an older report had more to draw, its picture would look like this one's.
    for name in set(PLOT_NAMES) - {plot.name for plot in plots}:
        (directory / f"{name}.png").unlink(missing_ok=True)
    for plot in plots:
        with atomic_path(directory / f"{plot.name}.png") as temporary:
            temporary.write_bytes(plot.png)
    write_text(directory / "quality.md", markdown(report, plots=plots))
    write_text(directory / "quality.html", html_page(report, plots=plots))
    write_json(directory / REPORT_FILE, report)


def quality_summary(report: Mapping[str, Any]) -> str:
    """The report as plain text, its tables of fixed columns; the verdict comes last."""
    parts = ["\n".join(text_lines(report))]
    parts += [plain_table(cells) for _, cells in tables(report)]
    return "\n\n".join([*parts, verdict_line(report)])


def markdown(report: Mapping[str, Any], *, plots: Sequence[Plot]) -> str:
    """The report as Markdown, with the plots beside it as pictures."""
    lines = [f"# {title(report)}", "", f"**{verdict_line(report)}**", ""]
    lines += [
        f"- original: {report['base_model']} ({report['base_fingerprint']})",
        f"- changed {report['changed_is']}: {report['changed_model']} "
        f"({report['changed_fingerprint']})",
        *(f"- {line}" for line in text_lines(report)),
    ]
    for name, (head, *rows) in tables(report):
        lines += ["", f"## {name}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
    for plot in plots:
        lines += ["", f"![{plot.title}]({plot.name}.png)", "", plot.caption]
    return "\n".join(lines) + "\n"
