"""The accuracy report as one HTML page that needs nothing beside itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from medusa_train.evaluate.tables import (
    PAYING,
    accuracy_rows,
    columns,
    counted,
    gain_columns,
    gain_rows,
    interval,
    number,
    pay_lines,
    text_lines,
)
from medusa_train.page.drawing import Plot
from medusa_train.page.frame import facts_list, headline, paragraph, pictures, table, whole_page


def html_page(report: Mapping[str, Any], *, plots: Sequence[Plot], facts: Mapping[str, str]) -> str:
    """The page; names from outside are escaped, pictures are inside it."""
    body = [
        *map(paragraph, text_lines(report)),
        headline(_figures(report)),
        facts_list(facts),
        "<h2>Accuracy</h2>",
        table(columns(report), accuracy_rows(report)),
        "<p>Positions: the head's valid pairs. 95 %: the interval of top-1. Conditional: top-1 "
        "where all heads before it are right. Top-n: the true token is among the head's n most "
        "likely ones.</p>",
        *_gains(report),
        pictures(plots),
    ]
    return whole_page(f"Medusa heads on {report['base_model']}", body)


def _gains(report: Mapping[str, Any]) -> list[str]:
    rows = gain_rows(report)
    if not rows:
        return []
    return [
        "<h2>What each head adds to the chain</h2>",
        *map(paragraph, pay_lines(report)),
        table(gain_columns(), rows),
        f"<p>{PAYING}</p>",
    ]


def _figures(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    chain, first, tree = report["chain"], report["heads"][0], report["tree"]
    of_tree = (
        []
        if tree is None
        else [
            (
                number(tree["acceptance_length"]),
                f"tokens per step with a tree of {counted(tree['num_nodes'], 'node')} (95 %: "
                f"{interval(tree['ci95'])}; {counted(tree['num_conversations'], 'conversation')})",
            )
        ]
    )
    return [
        *of_tree,
        (
            number(chain["acceptance_length"]),
            f"tokens per step with the top-1 chain (95 %: {interval(chain['ci95'])})",
        ),
        (
            number(first["top_k_accuracy"][0]),
            f"top-1 accuracy of head 1 (95 %: {interval(first['top1_ci95'])})",
        ),
    ]
