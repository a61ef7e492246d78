"""The quality report as one HTML page, with the answers of both models side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from medusa_train.evaluate.quality_words import (
    KEPT,
    MOVED,
    OPEN,
    share,
    share_interval,
    tables,
    text_lines,
    title,
    verdict_line,
)
from medusa_train.evaluate.tables import ABSENT, counted, interval, number
from medusa_train.page.drawing import Plot
from medusa_train.page.frame import facts_list, headline, paragraph, pictures, table, whole_page

_STYLE = """
.verdict { border-left: 4px solid var(--c5); background: var(--card); padding: .75rem 1rem;
  max-width: none; font-size: 1rem; color: var(--ink); }
.verdict.kept { border-color: var(--c3); } .verdict.moved { border-color: var(--c2); }
.answer { border-top: 1px solid var(--line); padding: 1rem 0; }
.question { white-space: pre-wrap; overflow-wrap: anywhere; color: var(--ink); max-width: none;
  font-weight: 600; }
.sides { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr));
  gap: 1rem; }
.sides > div { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: .5rem .75rem; }
.sides h3 { font-size: .85rem; font-weight: 600; color: var(--soft); margin: 0 0 .25rem; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; color: var(--ink); font-size: .85rem; }
.text .same { color: var(--soft); }
mark { background: none; color: var(--c2); font-weight: 700; text-decoration: underline;
  text-decoration-thickness: 2px; text-underline-offset: 3px; }
@media print { .answer { break-inside: avoid; } }
"""


def html_page(report: Mapping[str, Any], *, plots: Sequence[Plot]) -> str:
    """The page; names and texts from outside are escaped, pictures are inside it."""
    kept = report["verdict"]["kept"]
    word = {True: KEPT, False: MOVED, None: OPEN}[kept]
    line = verdict_line(report)
    body = [
        f'<p class="verdict {escape(word)}">{escape(line[:1].upper() + line[1:])}.</p>',
        *map(paragraph, text_lines(report)),
        headline(_figures(report)),
        facts_list(_facts(report)),
    ]
    for name, (head, *rows) in tables(report):
        body += [f"<h2>{escape(name)}</h2>", table(head, rows)]
    body += [
        "<p>KL: of the original's distribution of the next token to the changed model's, mean over "
        "the tokens of the answers. Perplexity ratio: of the changed model to the original, on the "
        "same tokens; above 1 the changed model finds them less likely. Agreement: both have the "
        "same most likely token.</p>",
        pictures(plots),
        *_answers(report["answers"], report["judge"]),
    ]
    return whole_page(title(report), body, style=_STYLE)


def _figures(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    figures = [
        (
            share(report["greedy_top1_agreement"]),
            "of the original's greedy choices retained (95 %: "
            f"{share_interval(report['greedy_top1_agreement_ci95'])})",
        ),
        (
            number(report["kl"], digits=4),
            f"nats KL (95 %: {interval(report['kl_ci95'], digits=4)})",
        ),
        (
            f"× {number(report['perplexity_ratio'], digits=4)}",
            f"perplexity (95 %: {interval(report['perplexity_ratio_ci95'], digits=4)})",
        ),
    ]
    answers = report["answers"]
    if answers is not None:
        figures.append(
            (
                f"{answers['num_identical']}/{answers['num_prompts']}",
                "greedy answers the same to the last token",
            )
        )
    return figures


def _facts(report: Mapping[str, Any]) -> dict[str, str]:
    return {
        "original": f"{report['base_model']} ({report['base_fingerprint']})",
        f"changed {report['changed_is']}": (
            f"{report['changed_model']} ({report['changed_fingerprint']})"
        ),
    }


def _answers(answers: Mapping[str, Any] | None, judge: Mapping[str, Any] | None) -> list[str]:
    if answers is None:
        return []
    judged = [None] * len(answers["rows"]) if judge is None else judge["rows"]
    return [
        "<h2>Answers side by side</h2>",
        paragraph(
            f"greedy, at most {counted(answers['max_new_tokens'], 'token')}; grey up to the first "
            "difference, whose word is underlined"
        ),
        *(
            _answer(place, row, said)
            for place, (row, said) in enumerate(zip(answers["rows"], judged, strict=True), start=1)
        ),
    ]


def _answer(place: int, row: Mapping[str, Any], said: Mapping[str, Any] | None) -> str:
    category = f"{escape(row['category'])}: " if row["category"] else ""
    if row["first_difference"] is None:
        state = f"the same {counted(row['original_tokens'], 'token')}"
        sides = _side("both models", _same(row["original"]))
    else:
        state = f"the first difference is at token {row['first_difference'] + 1:,}"
        start = _shared(row["original"], row["changed"])
        sides = "".join(
            _side(
                f"{name}, {counted(row[f'{side}_tokens'], 'token')}"
                f"{' (cut)' if row[f'{side}_finish'] == 'length' else ''}",
                _marked(row[side], start),
            )
            for name, side in (("original", "original"), ("changed model", "changed"))
        )
    state += "" if said is None else f"; {_judged(said)}"
    return (
        f'<section class="answer"><p>{place}. {category}{escape(state)}</p>'
        f'<p class="question">{escape(row["question"])}</p>'
        f'<div class="sides">{sides}</div></section>'
    )


def _judged(said: Mapping[str, Any]) -> str:
    """What the judge says of one prompt's answers."""
    names = {"original": "prefers the original", "changed": "prefers the changed model"}
    names |= {"tie": "prefers neither"}
    scores = " and ".join(
        ABSENT if said[f"{side}_score"] is None else str(said[f"{side}_score"])
        for side in ("original", "changed")
    )
    return f"the judge gives {scores} and {names.get(said['preference'], 'names no preference')}"


def _side(name: str, text: str) -> str:
    return f'<div><h3>{escape(name)}</h3><p class="text">{text}</p></div>'


def _same(text: str) -> str:
    return f'<span class="same">{escape(text)}</span>'


def _marked(text: str, start: int) -> str:
    """``text`` with its word at ``start`` marked; a text that ends there says so."""
    rest = text[start:]
    blank = len(rest) - len(rest.lstrip())
    word = rest[blank:].split(maxsplit=1)[0] if rest.strip() else ""
    if not word:
        return f"{_same(text)} <mark>(ends here)</mark>"
    end = start + blank + len(word)
    return (
        f"{_same(text[: start + blank])}<mark>{escape(text[start + blank : end])}</mark>"
        f"{escape(text[end:])}"
    )


def _shared(first: str, second: str) -> int:
    """The characters that both texts begin with, up to the end of a word."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    after = first[count : count + 1] or second[count : count + 1]
    if len(first) != count != len(second) or not (after.isspace() or not after):
        # They part within a word, which is then not the same.
        while count and not first[count - 1].isspace():
            count -= 1
    return count
