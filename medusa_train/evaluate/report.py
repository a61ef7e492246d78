"""The accuracy report as files: JSON, Markdown, one self-contained HTML page, and PNG plots."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medusa_train.evaluate.page import html_page
from medusa_train.evaluate.plots import PLOT_NAMES, make_plots
from medusa_train.evaluate.ranks import RANKS_FILE, Ranks, write_ranks
from medusa_train.evaluate.tables import (
    PAYING,
    accuracy_rows,
    chain_line,
    columns,
    gain_columns,
    gain_rows,
    pay_lines,
    plain_table,
    text_lines,
    tree_lines,
)
from medusa_train.page.drawing import Plot
from medusa_train.run_dir import atomic_path, write_json, write_text

REPORT_FILE = "heads_accuracy.json"


def write_report(
    report: Mapping[str, Any],
    *,
    directory: Path,
    ranks: Ranks,
    metrics: Path | None = None,
    facts: Mapping[str, str] | None = None,
    tree: Mapping[str, Any] | None = None,
) -> None:
    """Write every form of the report into ``directory``; the JSON comes last.

    Args:
        report: ``heads_accuracy.json`` as an object.
        directory: made if needed.
        ranks: what the report was computed from; written beside it.
        metrics: ``metrics.jsonl`` of the training run, for its curves.
        facts: lines for the report's head.
        tree: ``tree.json`` as an object, where there is a tree.
    """
    plots = make_plots(report, ranks, metrics=metrics, tree=tree)
    write_ranks(directory / RANKS_FILE, ranks)
    # Where an older report had more to draw, its picture would look like this one's.
    for name in set(PLOT_NAMES) - {plot.name for plot in plots}:
        (directory / f"{name}.png").unlink(missing_ok=True)
    for plot in plots:
        with atomic_path(directory / f"{plot.name}.png") as temporary:
            temporary.write_bytes(plot.png)
    write_text(directory / "heads_accuracy.md", markdown(report, plots=plots, facts=facts or {}))
    write_text(directory / "heads_accuracy.html", html_page(report, plots=plots, facts=facts or {}))
    write_json(directory / REPORT_FILE, report)


def markdown(report: Mapping[str, Any], *, plots: list[Plot], facts: Mapping[str, str]) -> str:
    """The report as Markdown, with the plots beside it as pictures."""
    lines = [
        f"# Accuracy of Medusa heads on {report['base_model']}",
        "",
        *(f"- {line}" for line in text_lines(report)),
        *(f"- {name}: {value}" for name, value in facts.items()),
        "",
        *_table(columns(report), accuracy_rows(report)),
        "",
        chain_line(report),
        *(f"\n{line}" for line in pay_lines(report)),
        *(f"\n{line}" for line in tree_lines(report)),
        "",
    ]
    if gains := gain_rows(report):
        lines += [*_table(gain_columns(), gains), "", PAYING, ""]
    for plot in plots:
        lines += [f"![{plot.title}]({plot.name}.png)", "", plot.caption, ""]
    return "\n".join(lines)


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    cells = ["| " + " | ".join(row) + " |" for row in [head, *rows]]
    return [cells[0], "|" + "---|" * len(head), *cells[1:]]


def summary_text(report: Mapping[str, Any]) -> str:
    """The whole table as plain text of fixed columns, for a terminal or a log."""
    table = [columns(report), *accuracy_rows(report)]
    lines = [chain_line(report), *pay_lines(report), *tree_lines(report)]
    return "\n".join([*text_lines(report), "", plain_table(table), "", *lines])
