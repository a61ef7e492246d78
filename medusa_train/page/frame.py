"""The frame of every report page: one HTML file that needs nothing beside itself, one look."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from medusa_train.page.drawing import COLOURS, INK, Plot

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


def whole_page(title: str, body: Sequence[str], *, style: str = "") -> str:
    """The page.

    Args:
        title: text, for the window and as the first heading.
        body: pieces of HTML; what came from outside is escaped already.
        style: more CSS; colours are the page's variables (``--ink``, ``--c1``, …).
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}{style}</style></head>\n"
        f"<body>\n<h1>{escape(title)}</h1>\n"
        f"{''.join(part + chr(10) for part in body)}</body></html>\n"
    )


def paragraph(text: str) -> str:
    """A line of text as a sentence."""
    return f"<p>{escape(text[:1].upper() + text[1:])}.</p>"


def headline(figures: Sequence[tuple[str, str]]) -> str:
    """The figures that matter most, each with what it is."""
    cells = [
        f"<div><b>{escape(value)}</b><span>{escape(words)}</span></div>" for value, words in figures
    ]
    return f'<div class="headline">{"".join(cells)}</div>'


def facts_list(facts: Mapping[str, str]) -> str:
    """Names and values; nothing where there are none."""
    rows = [f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in facts.items()]
    return f"<dl>{''.join(rows)}</dl>" if rows else ""


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table whose first column names the row."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    lines = [
        f'<tr><th scope="row">{escape(str(first))}</th>'
        + "".join(f"<td>{escape(str(cell))}</td>" for cell in cells)
        + "</tr>"
        for first, *cells in rows
    ]
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def pictures(plots: Sequence[Plot]) -> str:
    """Pictures side by side where there is room, each with its title and caption."""
    return f'<div class="figures">{"".join(map(_figure, plots))}</div>'


def _figure(plot: Plot) -> str:
    return (
        f"<figure><h3>{escape(plot.title)}</h3>\n{plot.svg}\n"
        f"<figcaption>{escape(plot.caption)}</figcaption></figure>"
    )
