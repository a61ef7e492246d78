"""The accuracy report as one HTML page that needs nothing beside itself."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from medusa_train.evaluate.plots import Plot
from medusa_train.evaluate.tables import (
    accuracy_rows,
    columns,
    interval,
    number,
    text_lines,
)

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --paper: #ffffff;
  --line: #d8dee4; --accent: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa4af;
  --paper: #14181d; --line: #30363d; --accent: #56b4e9; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 62rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; } h2 { font-size: 1.1rem; margin: 2.5rem 0 .5rem; }
p, figcaption { color: var(--soft); } dl { display: grid; grid-template-columns: max-content 1fr;
  gap: .15rem 1rem; margin: 1rem 0; } dt { color: var(--soft); } dd { margin: 0;
  overflow-wrap: anywhere; }
.headline { display: flex; flex-wrap: wrap; gap: 2.5rem; margin: 1.5rem 0; }
.headline b { display: block; font-size: 2rem; line-height: 1.2; color: var(--accent); }
.headline span { color: var(--soft); font-size: .9rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric:
  tabular-nums; white-space: nowrap; } th, td { padding: .35rem .7rem; text-align: right;
  border-bottom: 1px solid var(--line); } th { color: var(--soft); font-weight: 600; }
figure { margin: 2rem 0; } img { width: 100%; max-width: 52rem; border-radius: 6px;
  background: #fff; }
@media print { body { max-width: none; } figure { break-inside: avoid; } }
"""


def html_page(report: Mapping[str, Any], *, plots: Sequence[Plot], facts: Mapping[str, str]) -> str:
    """The page; names from outside are escaped, pictures are inside it."""
    title = f"Medusa heads on {report['base_model']}"
    body = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(line)}</p>" for line in text_lines(report)),
        _headline(report),
        _facts(facts),
        "<h2>Accuracy</h2>",
        _table(report),
        "<p>Positions: valid pairs of the head. Conditional: top-1 where all heads before it are "
        "right. Top-n: the true token is among the head's n most likely ones.</p>",
        *map(_figure, plots),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{''.join(part + chr(10) for part in body)}</body></html>\n"
    )


def _headline(report: Mapping[str, Any]) -> str:
    chain, first = report["chain"], report["heads"][0]
    figures = [
        (
            number(chain["acceptance_length"], digits=2),
            f"tokens per step, top-1 chain (95 %: {interval(chain['ci95'], digits=2)})",
        ),
        (
            number(first["top_k_accuracy"][0], digits=3),
            f"top-1 accuracy of head 1 (95 %: {interval(first['top1_ci95'])})",
        ),
    ]
    cells = [f"<div><b>{value}</b><span>{escape(words)}</span></div>" for value, words in figures]
    return f'<div class="headline">{"".join(cells)}</div>'


def _facts(facts: Mapping[str, str]) -> str:
    rows = [f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items()]
    return f"<dl>{''.join(rows)}</dl>" if rows else ""


def _table(report: Mapping[str, Any]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns(report))
    rows = [
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in accuracy_rows(report)
    ]
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _figure(plot: Plot) -> str:
    data = base64.b64encode(plot.png).decode()
    return (
        f'<figure><img alt="{escape(plot.title)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{escape(plot.caption)}</figcaption></figure>"
    )
