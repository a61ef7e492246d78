"""The accuracy report as one HTML page that needs nothing beside itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from medusa_train.evaluate.drawing import COLOURS, INK, Plot
from medusa_train.evaluate.tables import (
    accuracy_rows,
    columns,
    interval,
    number,
    text_lines,
)

# The same hues, light enough to be read on a dark page.
_DARK_COLOURS = (
    "#4aa8e0",
    "#ff8a3d",
    "#2fc79a",
    "#e39cc4",
    "#f0b93a",
    "#8bcdf2",
    "#b39bdc",
    "#a5adb5",
)


def _variables(colours: Sequence[str]) -> str:
    return " ".join(f"--c{i}: {colour};" for i, colour in enumerate(colours, start=1))


_LIGHT = (
    f"--ink: {INK}; --soft: #57606a; --paper: #ffffff; --card: #f6f8fa; --line: #d8dee4; "
    + _variables(COLOURS)
)
_DARK = (
    "--ink: #e6edf3; --soft: #9aa4af; --paper: #14181d; --card: #1b2027; --line: #30363d; "
    + _variables(_DARK_COLOURS)
)
_STYLE = f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
@media print {{ :root {{ color-scheme: light; {_LIGHT} }} }}
* {{ box-sizing: border-box; }}
body {{ font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 72rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }}
h1 {{ font-size: 1.5rem; line-height: 1.3; margin: 0 0 .5rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.1rem; margin: 2rem 0 .5rem; }}
h3 {{ font-size: 1rem; margin: 0 0 .5rem; }}
p, figcaption {{ color: var(--soft); max-width: 46rem; margin: .25rem 0; font-size: .9rem; }}
.headline {{ display: flex; flex-wrap: wrap; gap: 1rem; margin: 1.5rem 0; }}
.headline div {{ flex: 1 1 14rem; max-width: 24rem; background: var(--card);
  border: 1px solid var(--line); border-radius: 8px; padding: .75rem 1rem; }}
.headline b {{ display: block; font-size: 2rem; line-height: 1.2; color: var(--c1); }}
.headline span {{ color: var(--soft); font-size: .9rem; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 1rem 0;
  font-size: .9rem; }}
dt {{ color: var(--soft); }}
dd {{ margin: 0; overflow-wrap: anywhere; }}
.scroll {{ overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; }}
table {{ border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums;
  white-space: nowrap; width: 100%; }}
th, td {{ padding: .4rem .6rem; text-align: right; }}
thead th {{ color: var(--soft); font-weight: 600; background: var(--card); }}
tbody tr {{ border-top: 1px solid var(--line); }}
tbody th {{ font-weight: 600; }}
th:first-child {{ position: sticky; left: 0; text-align: left; background: var(--card);
  border-right: 1px solid var(--line); }}
.figures {{ display: grid; gap: 2.5rem 2rem; margin-top: 2rem; align-items: start;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }}
figure {{ margin: 0; }}
svg {{ display: block; width: 100%; height: auto; }}
@media (max-width: 32rem) {{ body {{ padding: 1.25rem .9rem 3rem; }}
  dl {{ grid-template-columns: 1fr; }} dd {{ margin-bottom: .4rem; }} }}
@media print {{ body {{ max-width: none; padding: 0; font-size: 12px; }}
  figure, tr {{ break-inside: avoid; }} .scroll {{ overflow: visible; border: 0; }}
  table {{ font-size: 9px; }} th, td {{ padding: .25rem .35rem; }} }}
"""


def html_page(report: Mapping[str, Any], *, plots: Sequence[Plot], facts: Mapping[str, str]) -> str:
    """The page; names from outside are escaped, pictures are inside it."""
    title = f"Medusa heads on {report['base_model']}"
    body = [
        f"<h1>{escape(title)}</h1>",
        *(f"<p>{escape(line[:1].upper() + line[1:])}.</p>" for line in text_lines(report)),
        _headline(report),
        _facts(facts),
        "<h2>Accuracy</h2>",
        _table(report),
        "<p>Positions: the head's valid pairs. 95 %: the interval of top-1. Conditional: top-1 "
        "where all heads before it are right. Top-n: the true token is among the head's n most "
        "likely ones.</p>",
        f'<div class="figures">{"".join(map(_figure, plots))}</div>',
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
            number(chain["acceptance_length"]),
            f"tokens per step with the top-1 chain (95 %: {interval(chain['ci95'])})",
        ),
        (
            number(first["top_k_accuracy"][0]),
            f"top-1 accuracy of head 1 (95 %: {interval(first['top1_ci95'])})",
        ),
    ]
    cells = [f"<div><b>{value}</b><span>{escape(words)}</span></div>" for value, words in figures]
    return f'<div class="headline">{"".join(cells)}</div>'


def _facts(facts: Mapping[str, str]) -> str:
    rows = [f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items()]
    return f"<dl>{''.join(rows)}</dl>" if rows else ""


def _table(report: Mapping[str, Any]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns(report))
    rows = [
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for first, *cells in accuracy_rows(report)
    ]
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _figure(plot: Plot) -> str:
    return (
        f"<figure><h3>{escape(plot.title)}</h3>\n{plot.svg}\n"
        f"<figcaption>{escape(plot.caption)}</figcaption></figure>"
    )
