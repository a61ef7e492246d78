"""What an inspection found as the rows of tables: one place for the terminal and the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medusa_train.data.inspect import Inspection
    from medusa_train.data.lengths import Lengths
    from medusa_train.data.report import Report

Rows = list[tuple[str, object]]


def fate_rows(report: Report) -> Rows:
    """The fate of every row; the last line is the sum of the others."""
    return [(f"{fate}: {text}" if text else fate, count) for fate, text, count in report.rows()]


def origin_rows(manifest: Mapping[str, Any]) -> Rows:
    """The fates of the rows or prompts that a data set was made from, as its manifest has them."""
    kept = manifest.get("num_conversations", 0)
    dropped = dict(manifest.get("num_dropped") or {})
    repaired: dict[str, int] = {}
    if "rows" in manifest:
        fates = manifest["rows"]
        repaired = {text: reason["count"] for text, reason in fates["repaired"].items()}
        dropped = {text: reason["count"] for text, reason in fates["dropped"].items()}
        kept = fates["num_kept"]
    rows = [
        ("kept", kept),
        *((f"repaired: {text}", count) for text, count in repaired.items()),
        *((f"dropped: {text}", count) for text, count in dropped.items()),
    ]
    return [*rows, ("all", sum(count for _, count in rows))]


def count_rows(found: Inspection, *, end_of_turn: str | None) -> Rows:
    """What the rows hold; ``end_of_turn`` is the token that most answers end with."""
    end = "none" if end_of_turn is None else repr(end_of_turn)
    return [
        ("conversations", found.num_conversations),
        ("tokens", found.num_tokens),
        ("supervised tokens", found.num_supervised_tokens),
        ("supervised share", f"{found.supervised_share:.1%}"),
        ("answers", found.num_spans),
        (f"answers with an end of turn ({end})", found.num_with_end_of_turn),
        ("answers without one", found.num_spans - found.num_with_end_of_turn),
        *((f"answers that end by {why}", count) for why, count in found.finish_reasons.items()),
        ("rows with two BOS", found.num_double_bos),
        ("rows with the tokens of an earlier row", found.num_same_tokens),
        ("rows with the prompt of an earlier row", found.num_same_prompt),
        ("rows supervised throughout", found.num_fully_supervised),
        ("rows tokenised again from text", found.num_retokenised),
        *((f"rows from {source}", count) for source, count in found.sources.items()),
    ]


def quantiles_phrase(lengths: Lengths) -> str:
    """``p50 52, p90 260, p99 493, max 547``; empty where there is nothing to count."""
    return ", ".join(f"{name} {length:,}" for name, length in lengths.quantiles.items())
