from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from medusa_train.errors import InputError
from medusa_train.evaluate.accuracy import bootstrap_weights
from medusa_train.evaluate.judgement import Judgement, Preference, judge_figures
from medusa_train.quality.judge import Judge, JudgeOptions, judge_report
from medusa_train.quality.judge_words import read_preference, read_score
from tests.judge_server import JudgeServer, judging

ROWS = [
    {"question": "one?", "original": "a b c", "changed": "a b c d e"},
    {"question": "two?", "original": "a b c d", "changed": "x"},
    {"question": "three?", "original": "the same words", "changed": "the same words"},
    {"question": "four?", "original": "one two", "changed": "two one"},
]
KEY = "sk-very-secret"


def _judge(server: JudgeServer, **changes: Any) -> Judge:
    options = {"url": server.url, "model": "tiny", "timeout": 5.0, "backoff": 0.01, **changes}
    return Judge(JudgeOptions(**options))


def _report(server: JudgeServer, rows: list[dict[str, str]] = ROWS, **changes: Any) -> Any:
    with _judge(server, **changes) as judge:
        judge.check()
        return judge_report(judge, rows, num_bootstrap=50, seed=0)


def test_both_orders_and_grades() -> None:
    with judging() as server:
        report = _report(server)
    assert [row["preference"] for row in report["rows"]] == ["changed", "original", "tie", "tie"]
    scores = [(row["original_score"], row["changed_score"]) for row in report["rows"]]
    assert scores == [(3, 5), (4, 1), (3, 3), (2, 2)]
    pairs, single = report["pairwise"], report["single"]
    assert (pairs["changed_wins"], pairs["original_wins"], pairs["ties"]) == (1, 1, 2)
    assert (pairs["num_inconsistent"], pairs["win_rate"]) == (0, 0.5)
    assert single["retained_share"] == pytest.approx(11 / 12)
    assert (report["num_prompts"], report["num_same_text"], report["failures"]) == (4, 1, {})
    # Two grades and two orders each, and one grade for equal answers.
    assert len(server.requests) == 3 * 4 + 1
    shown = [body["messages"][1]["content"] for body, _ in server.requests]
    orders = [text for text in shown if "<answer_a>" in text and "one?" in text]
    assert len(orders) == 2
    assert orders[0].index("a b c d e") != orders[1].index("a b c d e")
    body, headers = server.requests[0]
    assert (body["model"], body["temperature"]) == ("tiny", 0.0)
    assert "Authorization" not in headers


def test_a_judge_that_always_takes_the_first_makes_ties() -> None:
    with judging(lambda texts: "SCORE: 7" if "answer" in texts else "VERDICT: A") as server:
        report = _report(server)
    pairs = report["pairwise"]
    assert (pairs["ties"], pairs["num_inconsistent"], pairs["win_rate"]) == (4, 3, 0.5)
    assert report["rows"][0]["orders"] == ["original", "changed"]
    assert report["single"]["retained_share"] == 1.0


@pytest.mark.parametrize(
    "faults", [[503, 500], [429, 429], ["no json", "[]"], ["{}", '{"choices": [{}]}']]
)
def test_what_fails_is_asked_again(faults: list[int | str]) -> None:
    with judging(faults=faults) as server:
        report = _report(server, concurrency=1)
    assert report["failures"] == {}
    assert report["pairwise"]["num_prompts"] == 4
    assert len(server.requests) == 3 * 4 + 1 + len(faults)


def test_what_stays_without_a_judgement_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """A refused request is not made again; a reply without a verdict is none."""

    def rule(texts: dict[str, str]) -> str:
        if "answer_a" in texts:
            return "I like both."
        return "SCORE: 11" if texts["answer"] == "x" else "SCORE: 5"

    with judging(rule, faults=[400]) as server:
        report = _report(server, concurrency=1)
    assert len(server.requests) == 3 * 4 + 1
    assert report["failures"] == {
        "no score or verdict in the judge's reply": 7, "refused by the server": 1,
    }  # fmt: skip
    assert [row["original_score"] for row in report["rows"]] == [None, 5, 5, 5]
    assert [row["changed_score"] for row in report["rows"]] == [5, None, 5, 5]
    assert [row["preference"] for row in report["rows"]] == [None, None, "tie", None]
    assert (report["pairwise"]["num_prompts"], report["single"]["num_prompts"]) == (1, 2)
    warned = capsys.readouterr().err
    assert warned.count("warning: judge tiny: ") == 2


def test_tries_end() -> None:
    with judging(faults=[500] * 20) as server:
        report = _report(server, ROWS[:1], max_retries=1, concurrency=1)
    assert report["failures"] == {"server error": 4}
    assert len(server.requests) == 8
    assert (report["pairwise"]["win_rate"], report["single"]["retained_share"]) == (None, None)


def test_the_key_is_sent_and_never_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with judging(api_key=KEY, faults=[400]) as server:
        report = _report(server, api_key_env="JUDGE_KEY")
    assert report["pairwise"]["num_prompts"] >= 3
    assert {headers["Authorization"] for _, headers in server.requests} == {f"Bearer {KEY}"}
    assert KEY not in json.dumps(report)
    assert KEY not in capsys.readouterr().err
    with (
        judging(api_key="another") as server,
        pytest.raises(InputError, match="JUDGE_KEY is refused") as refused,
    ):
        _report(server, api_key_env="JUDGE_KEY")
    assert KEY not in str(refused.value)
    monkeypatch.delenv("JUDGE_KEY")
    with judging(api_key=KEY) as server, pytest.raises(InputError, match="JUDGE_KEY is not set"):
        _report(server, api_key_env="JUDGE_KEY")


def test_no_server_and_no_such_address() -> None:
    with judging() as server:
        url = server.url
    with (
        Judge(JudgeOptions(url=url, model="tiny")) as judge,
        pytest.raises(InputError, match=r"--judge-url: no server answers: .*; start it, or"),
    ):
        judge.check()
    with pytest.raises(InputError, match="not a base URL of a server"):
        JudgeOptions(url="judge.example", model="tiny")
    # A model that the server does not have ends it at once, for all requests that wait.
    with judging(faults=[404] * 30) as server, pytest.raises(InputError, match="HTTP 404"):
        _report(server)


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Good.\nSCORE: 7", 7),
        ("**Score: 10**", 10),
        ("SCORE: 8/10", 8),
        ("- SCORE: 3.", 3),
        ("At first SCORE: 2\nSCORE: 4\n", 4),
        ("SCORE: 0", None),
        ("SCORE: 11", None),
        ("a score: 5 would do", None),
        ("", None),
    ],
)
def test_scores_are_read(reply: str, score: int | None) -> None:
    assert read_score(reply) == score


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("Why.\nVERDICT: A", "first"),
        ("**VERDICT:** b", "second"),
        ("VERDICT: [Tie]", "tie"),
        ("VERDICT: A\nNo:\nVERDICT: B", "second"),
        ("VERDICT: Anything", None),
        ("A is better", None),
    ],
)
def test_verdicts_are_read(reply: str, said: str | None) -> None:
    assert read_preference(reply) == said


def test_figures_are_those_of_plain_loops() -> None:
    generator = np.random.default_rng(0)
    choices: tuple[Preference | None, ...] = ("original", "changed", "tie", None)
    rows = [
        Judgement(
            orders=(choices[generator.integers(4)], choices[generator.integers(4)]),
            original_score=int(generator.integers(1, 11)) if generator.random() < 0.9 else None,
            changed_score=int(generator.integers(1, 11)) if generator.random() < 0.9 else None,
        )
        for _ in range(40)
    ]
    report = judge_figures(rows, num_bootstrap=100, seed=3)
    both = [row.orders for row in rows if None not in row.orders]
    wins = sum(pair == ("changed", "changed") for pair in both)
    losses = sum(pair == ("original", "original") for pair in both)
    pairs = report["pairwise"]
    assert (pairs["changed_wins"], pairs["original_wins"]) == (wins, losses)
    assert pairs["ties"] == len(both) - wins - losses
    assert pairs["win_rate"] == pytest.approx((wins + pairs["ties"] / 2) / len(both))
    graded = [
        (row.original_score, row.changed_score)
        for row in rows
        if row.original_score is not None and row.changed_score is not None
    ]
    single = report["single"]
    share = sum(b for _, b in graded) / sum(a for a, _ in graded)
    assert single["retained_share"] == pytest.approx(share)
    drawn = []
    for weights in bootstrap_weights(len(graded), num_bootstrap=100, seed=3).tolist():
        above = sum(w * b for w, (_, b) in zip(weights, graded, strict=True))
        below = sum(w * a for w, (a, _) in zip(weights, graded, strict=True))
        drawn.append(above / below)
    wanted = [np.percentile(drawn, 2.5), np.percentile(drawn, 97.5)]
    assert single["retained_share_ci95"] == pytest.approx(wanted)
