"""The figures of a changed base model as words and tables, for every form of the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from medusa_train.evaluate.accuracy import MIN_CONVERSATIONS
from medusa_train.evaluate.tables import ABSENT, counted, interval, number

Cells = list[list[str]]

KEPT, MOVED, OPEN = "kept", "moved", "not certain"


def title(report: Mapping[str, Any]) -> str:
    """What the report is of."""
    return f"Has training moved {report['base_model']}?"


def share(value: float | None, *, digits: int = 2) -> str:
    """A share in percent."""
    return ABSENT if value is None else f"{100 * value:.{digits}f} %"


def share_interval(value: list[float] | None, *, digits: int = 2) -> str:
    """An interval of shares, in percent."""
    if value is None:
        return ABSENT
    return f"{100 * value[0]:.{digits}f}–{100 * value[1]:.{digits}f} %"


def verdict_line(report: Mapping[str, Any]) -> str:
    """The result in one line."""
    found = report["verdict"]
    word = {True: KEPT, False: MOVED, None: OPEN}[found["kept"]]
    line = (
        f"{word}: {share(found['retained_share'])} of the original's greedy choices are retained"
        f"{_within(share_interval(found['retained_share_ci95']))}, wanted "
        f"{share(found['min_agreement'], digits=1)}; perplexity × "
        f"{number(report['perplexity_ratio'], digits=4)}"
        f"{_within(interval(report['perplexity_ratio_ci95'], digits=4))}, allowed × "
        f"{found['max_perplexity_ratio']:g}"
    )
    return f"{line}; more text would tell" if found["kept"] is None else line


def text_lines(report: Mapping[str, Any]) -> list[str]:
    """What was compared, on which text, and how."""
    intervals = "intervals: 95 %, percentile bootstrap over conversations"
    if report["num_conversations"] < MIN_CONVERSATIONS:
        intervals = f"no intervals: they need {MIN_CONVERSATIONS} conversations"
    lines = [
        f"text: {report['text']}; {counted(report['num_conversations'], 'conversation')}, "
        f"{counted(report['num_positions'], 'position')}; {intervals}",
        f"both models in {report['dtype']} on {report['device']}",
    ]
    answers = report["answers"]
    if answers is not None:
        lines.append(
            f"greedy answers: {answers['num_identical']} of {answers['num_prompts']} are the same "
            f"to the last token; {share(answers['shared_beginning'], digits=1)} of the original's "
            "tokens come before the first difference"
        )
    return lines if report["judge"] is None else [*lines, *_judge_lines(report["judge"])]


def _judge_lines(judge: Mapping[str, Any]) -> list[str]:
    """What the judge says, and what it did not say."""
    single, pairs = judge["single"], judge["pairwise"]
    lines = [
        f"judge {judge['model']}: {number(single['changed_score'], digits=2)} of the original's "
        f"{number(single['original_score'], digits=2)} out of 10, "
        f"{share(single['retained_share'], digits=1)} retained"
        f"{_within(share_interval(single['retained_share_ci95'], digits=1))}; in pairs the changed "
        f"model wins {pairs['changed_wins']}, loses {pairs['original_wins']} and ties "
        f"{pairs['ties']} of {pairs['num_prompts']}"
    ]
    if judge["failures"]:
        reasons = ", ".join(f"{reason} ({n})" for reason, n in judge["failures"].items())
        lines.append(f"requests without a judgement: {reasons}; their prompts are left out")
    return lines


def figure_rows(report: Mapping[str, Any]) -> Cells:
    """The main figures; the first row names the columns."""
    quantiles = report["kl_quantiles"]
    rows = [
        ["figure", "value", "95 %"],
        ["greedy top-1 agreement", share(report["greedy_top1_agreement"]),
         share_interval(report["greedy_top1_agreement_ci95"])],
        ["KL(original ‖ changed), nats", number(report["kl"], digits=5),
         interval(report["kl_ci95"], digits=5)],
        ["perplexity ratio", number(report["perplexity_ratio"], digits=4),
         interval(report["perplexity_ratio_ci95"], digits=4)],
        ["perplexity of the original", number(report["original_perplexity"]), ""],
        ["perplexity of the changed model", number(report["changed_perplexity"]), ""],
    ]  # fmt: skip
    for name, words in (("p50", "half"), ("p90", "90 %"), ("p99", "99 %")):
        figure = f"KL at {words} of the positions, at most"
        rows.append([figure, number(quantiles[name], digits=5), ""])
    rows.append(["greatest KL at a position", number(quantiles["max"], digits=5), ""])
    return rows


def place_rows(report: Mapping[str, Any]) -> Cells:
    """The figures along the answers; the first row names the columns."""
    rows = [["tokens", "positions", "agreement", "95 %", "KL", "95 %", "perplexity ratio", "95 %"]]
    rows += [
        [
            _places(row),
            f"{row['num_positions']:,}",
            share(row["greedy_top1_agreement"]),
            share_interval(row["greedy_top1_agreement_ci95"]),
            number(row["kl"], digits=5),
            interval(row["kl_ci95"], digits=5),
            number(row["perplexity_ratio"], digits=4),
            interval(row["perplexity_ratio_ci95"], digits=4),
        ]
        for row in report["by_place"]
    ]
    return rows


def tables(report: Mapping[str, Any]) -> list[tuple[str, Cells]]:
    """Titles and tables; the first row of each names the columns."""
    found = [("Figures", figure_rows(report)), ("Along the answer", place_rows(report))]
    if report["judge"] is not None:
        found.append((f"Judged by {report['judge']['model']}", judge_rows(report["judge"])))
    if report["lm_eval"] is not None:
        found.append(("Tasks of lm-eval", task_rows(report["lm_eval"])))
    return found


def judge_rows(judge: Mapping[str, Any]) -> Cells:
    """What the judge says; the first row names the columns."""
    single, pairs = judge["single"], judge["pairwise"]
    return [
        ["figure", "prompts", "value", "95 %"],
        *(
            [
                f"score of the {words}, 1 to 10",
                str(single["num_prompts"]),
                number(single[f"{side}_score"], digits=2),
                interval(single[f"{side}_score_ci95"], digits=2),
            ]
            for side, words in (("original", "original"), ("changed", "changed model"))
        ),
        [
            "retained share of the score",
            str(single["num_prompts"]),
            share(single["retained_share"], digits=1),
            share_interval(single["retained_share_ci95"], digits=1),
        ],
        [
            "win rate of the changed model, ties count half",
            str(pairs["num_prompts"]),
            share(pairs["win_rate"], digits=1),
            share_interval(pairs["win_rate_ci95"], digits=1),
        ],
    ]


def task_rows(tasks: Mapping[str, Any]) -> Cells:
    """The metrics of tasks; the first row names the columns."""
    rows = [["task", "metric", "samples", "original", "changed", "retained"]]
    for row in tasks["tasks"]:
        sides = (
            number(row[side], digits=4) + _plus_minus(row[f"{side}_stderr"])
            for side in ("original", "changed")
        )
        count = ABSENT if row["num_samples"] is None else f"{row['num_samples']:,}"
        retained = share(row["retained_share"], digits=1)
        rows.append([row["task"], row["metric"], count, *sides, retained])
    return rows


def _plus_minus(error: float | None) -> str:
    return "" if error is None else f" ± {error:.4f}"


def _places(row: Mapping[str, Any]) -> str:
    first, last = row["first_place"], row["last_place"]
    return str(first) if first == last else f"{first}–{last}"


def _within(text: str) -> str:
    return "" if text == ABSENT else f" (95 %: {text})"
