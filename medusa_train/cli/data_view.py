"""How ``medusa-distill inspect`` and ``convert`` show data on stdout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from medusa_train.console import make_table

if TYPE_CHECKING:
    from medusa_train.data.chat import ChatTokenizer
    from medusa_train.data.conversations import Conversation
    from medusa_train.data.inspect import Inspection
    from medusa_train.data.report import Report

# Marks of supervised text where there are no colours.
OPEN, CLOSE = "⟦", "⟧"
# Columns of a table in a file or a pipe: enough for the longest reason.
FILE_WIDTH = 200


def print_fates(report: Report) -> None:
    """The fate of every row, where the first of each kind are, and what else was met."""
    console = _console()
    rows = [(f"{fate}: {text}" if text else fate, count) for fate, text, count in report.rows()]
    console.print(make_table("rows", ("fate", "rows"), rows))
    for line in report.location_lines():
        console.print(line, markup=False)
    for kind, count in report.notes.items():
        console.print(f"note: {kind}: {count}", markup=False)


def print_origin(manifest: Mapping[str, Any]) -> None:
    """The fates of the rows or prompts that a data set was made from, as its manifest has them."""
    kept = manifest["num_conversations"]
    dropped = dict(manifest.get("num_dropped") or {})
    if "rows" in manifest:
        fates = manifest["rows"]
        repaired = {text: reason["count"] for text, reason in fates["repaired"].items()}
        dropped = {text: reason["count"] for text, reason in fates["dropped"].items()}
        kept = fates["num_kept"]
    else:
        repaired = {}
    rows = [
        ("kept", kept),
        *((f"repaired: {text}", count) for text, count in repaired.items()),
        *((f"dropped: {text}", count) for text, count in dropped.items()),
    ]
    total = ("all", sum(count for _, count in rows))
    _console().print(make_table("made from", ("fate", "rows"), [*rows, total]))


def print_counts(inspection: Inspection, chat: ChatTokenizer) -> None:
    """What the rows hold."""
    found = inspection
    end = "none" if found.end_of_turn_id is None else repr(_token(chat, found.end_of_turn_id))
    rows: list[tuple[str, object]] = [
        ("conversations", found.num_conversations),
        ("tokens", found.num_tokens),
        ("tokens of the longest", found.longest),
        ("supervised tokens", found.num_supervised_tokens),
        ("supervised share", f"{found.supervised_share:.1%}"),
        ("answers", found.num_spans),
        (f"answers with an end of turn ({end})", found.num_with_end_of_turn),
        ("answers without one", found.num_spans - found.num_with_end_of_turn),
        *((f"answers that end by {why}", count) for why, count in found.finish_reasons.items()),
        ("rows with two BOS", found.num_double_bos),
        ("rows tokenised again from text", found.num_retokenised),
        *((f"rows from {source}", count) for source, count in found.sources.items()),
    ]
    _console().print(make_table("tokens and mask", ("", "count"), rows))


def print_samples(rows: Sequence[Conversation], chat: ChatTokenizer) -> None:
    """Rows decoded, with the supervised text in colour and between marks."""
    from medusa_train.data.inspect import decoded_segments

    console = _console()
    for row in rows:
        console.print(f"\n{row.source} {row.id}, supervised in {OPEN}{CLOSE}:", markup=False)
        text = Text()
        for piece, is_supervised in decoded_segments(row, chat):
            if is_supervised:
                text.append(f"{OPEN}{piece}{CLOSE}", style="bold green")
            else:
                text.append(piece, style="dim")
        console.print(text)


def _token(chat: ChatTokenizer, token_id: int) -> str:
    return str(chat.tokenizer.convert_ids_to_tokens(token_id))


def _console() -> Console:
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    return console
