"""The speed as files and words: ``speedup.json``, Markdown, one HTML page, PNG plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa_train.evaluate.accuracy import MIN_CONVERSATIONS
from medusa_train.evaluate.equality import TIE_STEPS
from medusa_train.evaluate.speed_plots import PLOT_NAMES, WAY_NAMES, speed_plots
from medusa_train.evaluate.speedup import BASELINE, WAYS
from medusa_train.evaluate.tables import counted, interval, number, plain_table
from medusa_train.page.drawing import Plot
from medusa_train.page.frame import facts_list, headline, paragraph, pictures, table, whole_page
from medusa_train.run_dir import atomic_path, write_json, write_text

REPORT_FILE = "speedup.json"

Cells = list[list[str]]


def write_speedup(report: Mapping[str, Any], *, directory: Path) -> None:
    """Write every form of the report into ``directory``; ``speedup.json`` comes last."""
    plots = speed_plots(report)
    # Where an older report had more to draw, its picture would look like this one's.
    for name in set(PLOT_NAMES) - {plot.name for plot in plots}:
        (directory / f"{name}.png").unlink(missing_ok=True)
    for plot in plots:
        with atomic_path(directory / f"{plot.name}.png") as temporary:
            temporary.write_bytes(plot.png)
    write_text(directory / "speedup.md", markdown(report, plots=plots))
    write_text(directory / "speedup.html", html_page(report, plots=plots))
    write_json(directory / REPORT_FILE, report)


def speedup_summary(report: Mapping[str, Any]) -> str:
    """The report as plain text of fixed columns, for a terminal or a log."""
    parts = ["\n".join([*text_lines(report), *result_lines(report)])]
    parts += [plain_table(cells) for _, cells in _tables(report)]
    return "\n\n".join(parts)


def markdown(report: Mapping[str, Any], *, plots: Sequence[Plot]) -> str:
    """The report as Markdown, with the plots beside it as pictures."""
    lines = [f"# {_title(report)}", ""]
    lines += [f"- {line}" for line in [*result_lines(report), *text_lines(report)]]
    for title, (head, *rows) in _tables(report):
        lines += ["", f"## {title}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
    for plot in plots:
        lines += ["", f"![{plot.title}]({plot.name}.png)", "", plot.caption]
    return "\n".join(lines) + "\n"


def html_page(report: Mapping[str, Any], *, plots: Sequence[Plot]) -> str:
    """The page; names from outside are escaped, pictures are inside it."""
    # The first result lines are the headline's figures.
    lines = [*text_lines(report), *result_lines(report)[3:]]
    body = [*map(paragraph, lines), headline(_figures(report)), facts_list(_facts(report))]
    for title, (head, *rows) in _tables(report):
        body += [f"<h2>{title}</h2>", table(head, rows)]
    body += [
        "<p>Tokens/s: tokens written ÷ wall-clock time of the whole call, summed over prompts. "
        "After the first token: the same without the prefill and the token that it gives. A step "
        "is one forward pass after the prefill.</p>",
        pictures(plots),
    ]
    return whole_page(_title(report), body)


def _title(report: Mapping[str, Any]) -> str:
    return f"Speed of Medusa heads on {report['base_model']}"


def equality_line(report: Mapping[str, Any]) -> str:
    """How many answers are those of plain decoding, in one sentence."""
    found = report["identical_outputs"]
    line = (
        f"equal output: {found['identical']} of {found['of']} answers are identical to plain "
        f"decoding in {found['dtype']}"
    )
    if found["ties"]:
        line += (
            f"; {found['ties']} {_differ(found['ties'])} first where the base's logits are a tie "
            f"(at most {TIE_STEPS} steps of {found['dtype']} apart)"
        )
    if found["other"]:
        line += (
            f"; NOT EQUAL: {found['other']} {_differ(found['other'])} elsewhere, so the speed is "
            "of other text"
        )
    return line


def _differ(count: int) -> str:
    return "differs" if count == 1 else "differ"


def text_lines(report: Mapping[str, Any]) -> list[str]:
    """What was measured, and how."""
    intervals = "intervals: 95 %, percentile bootstrap over prompts, paired"
    if report["num_prompts"] < MIN_CONVERSATIONS:
        intervals = f"no intervals: they need {MIN_CONVERSATIONS} prompts"
    tried = ", ".join(row["dtype"] for row in report["dtypes"])
    return [
        f"{counted(report['num_prompts'], 'prompt')} ({report['prompts']}), greedy, at most "
        f"{counted(report['max_new_tokens'], 'new token')}; {intervals}",
        f"{report['device']}, {counted(report['threads'], 'thread')}; dtypes tried: {tried}"
        + ("; our steps compiled" if report["compiled"] else ""),
        equality_line(report),
    ]


def result_lines(report: Mapping[str, Any]) -> list[str]:
    """What came out."""
    dtype = report["medusa"]["dtype"]
    lines = [
        f"speed-up: {_with_interval(report, 'speedup')} against model.generate in "
        f"{report['baseline']['dtype']}, with heads in {dtype}; "
        f"{_with_interval(report, 'decode_speedup')} after the first token",
        f"against our own decoder without heads, in {dtype}: "
        f"{_with_interval(report, 'speedup_vs_self')}",
        f"tokens per step: {_with_interval(report, 'acceptance_length')}, with "
        f"{counted(report['tree']['num_nodes'], 'candidate')} in a step that takes "
        f"{_with_interval(report, 'step_overhead')} times a plain one",
    ]
    if report["batch_sizes"]:
        size = report["break_even_batch_size"]
        sizes = ", ".join(str(row["batch_size"]) for row in report["batch_sizes"])
        ends = "at none of them" if size is None else f"at {size}"
        lines.append(f"batches of {sizes} were measured; heads stop gaining {ends}")
    return lines


def _with_interval(report: Mapping[str, Any], name: str) -> str:
    ci95 = report[f"{name}_ci95"]
    value = number(report[name], digits=2)
    return value if ci95 is None else f"{value} (95 %: {interval(ci95, digits=2)})"


def _figures(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = report["identical_outputs"]

    def figure(name: str, words: str) -> tuple[str, str]:
        ci95 = interval(report[f"{name}_ci95"], digits=2)
        return number(report[name], digits=2), f"{words} (95 %: {ci95})"

    return [
        figure("speedup", f"times model.generate in {report['baseline']['dtype']}"),
        figure("speedup_vs_self", "times our own decoder without heads"),
        figure("acceptance_length", "tokens per step"),
        figure("step_overhead", "times a plain step's time"),
        (
            f"{found['identical']}/{found['of']}",
            f"answers identical to plain decoding; {counted(found['ties'], 'tie')}, "
            f"{found['other']} others",
        ),
    ]


def _facts(report: Mapping[str, Any]) -> dict[str, str]:
    return {
        "heads": report["heads_fingerprint"],
        "tree": f"{counted(report['tree']['num_nodes'], 'candidate')}, "
        f"depth {report['tree']['depth']}",
        "timed runs": f"{counted(report['repeats'], 'run')} of each prompt and way, in an order "
        "of chance",
    }


def _tables(report: Mapping[str, Any]) -> list[tuple[str, Cells]]:
    """Titles and tables; the first row of each names the columns."""
    tables = [("Ways of decoding", way_rows(report)), ("Dtypes that were tried", _tried(report))]
    if report["categories"]:
        tables.append(("By category", _category_rows(report)))
    if report["batch_sizes"]:
        tables.append(("By batch size", _batch_rows(report)))
    return tables


def way_rows(report: Mapping[str, Any]) -> Cells:
    """Each way of decoding; the first row names the columns."""
    rows = [
        [
            "", "dtype", "tokens/s", "after the first token", "prefill, s", "tokens per step",
            "step, ms",
        ]
    ]  # fmt: skip
    for way in WAYS:
        figures = report[way]
        length = report["acceptance_length"] if way == "medusa" else 1.0
        rows.append(
            [
                WAY_NAMES[way],
                figures["dtype"],
                number(figures["tokens_per_second"], digits=1),
                number(figures["decode_tokens_per_second"], digits=1),
                number(figures["prefill_seconds"], digits=1),
                number(length, digits=2),
                number(figures["step_milliseconds"], digits=1),
            ]
        )
    return rows


def _tried(report: Mapping[str, Any]) -> Cells:
    names = [f"{WAY_NAMES[way]}, tokens/s" for way in WAYS if way != "self"]
    rows = [["dtype", "prompts", *names]]
    for row in report["dtypes"]:
        rates = [row[f"{way}_tokens_per_second"] for way in (BASELINE, "medusa")]
        cells = [number(rate, digits=1) for rate in rates]
        rows.append([row["dtype"], str(row["num_prompts"]), *cells])
    return rows


def _category_rows(report: Mapping[str, Any]) -> Cells:
    names = [f"{WAY_NAMES[way]}, tokens/s" for way in WAYS if way != "self"]
    rows = [["category", "prompts", *names, "speed-up", "95 %", "tokens per step"]]
    rows += [
        [
            row["category"],
            str(row["num_prompts"]),
            number(row["baseline_tokens_per_second"], digits=1),
            number(row["medusa_tokens_per_second"], digits=1),
            number(row["speedup"], digits=2),
            interval(row["speedup_ci95"], digits=2),
            number(row["acceptance_length"], digits=2),
        ]
        for row in report["categories"]
    ]
    return rows


def _batch_rows(report: Mapping[str, Any]) -> Cells:
    rows = [
        ["batch size", "prompts", "model.generate, tokens/s", "with heads, tokens/s", "speed-up",
         "tokens per step"]
    ]  # fmt: skip
    for row in report["batch_sizes"]:
        rates = [
            f"{number(row[way]['tokens_per_second'], digits=1)} ({row[way]['dtype']})"
            for way in (BASELINE, "medusa")
        ]
        rows.append(
            [
                str(row["batch_size"]),
                str(row["num_prompts"]),
                *rates,
                number(row["speedup"], digits=2),
                number(row["acceptance_length"], digits=2),
            ]
        )
    return rows
