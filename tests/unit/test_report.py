from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_train.evaluate.accuracy import accuracy_report
from medusa_train.evaluate.chain import StepWeights
from medusa_train.evaluate.ranks import MISS, Ranks, read_ranks
from medusa_train.evaluate.report import summary_text, write_report
from medusa_train.evaluate.tables import gain_rows, pay_lines, sampling_phrase


def _ranks(
    num_heads: int = 4, *, conversations: int = 9, top_k: int = 10, length: int = 60
) -> Ranks:
    generator = torch.Generator().manual_seed(0)
    count = conversations * length
    position = torch.arange(length).repeat(conversations)
    num_valid = (length - 1 - position).clamp(max=num_heads)
    drawn = torch.randint(-1, top_k, (count, num_heads), generator=generator)
    zeros = torch.rand(count, num_heads, generator=generator) < 0.4
    ranks = torch.where(zeros, 0, drawn)
    ranks[torch.arange(num_heads)[None] >= num_valid[:, None]] = MISS
    return Ranks(
        ranks=ranks.short(),
        num_valid=num_valid.short(),
        conversation=torch.arange(conversations).repeat_interleave(length).int(),
        position=(position + 7).int(),
        span=torch.zeros(count, dtype=torch.int32),
        metadata={"top_k": top_k, "text_sampling": {"temperature": 0.3}},
    )


def _write(directory: Path, ranks: Ranks, **options: Any) -> dict[str, Any]:
    step = StepWeights(base=1000, head=90)
    report = accuracy_report(ranks, base_model="a <b>&c", num_bootstrap=50, step=step)
    write_report(report, directory=directory, ranks=ranks, **options)
    return report


class _Page(HTMLParser):
    """Reads a page: its text, its table, its pictures; loads nothing and allows no loading."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.rows: list[list[str]] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.num_pictures = 0
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in {"script", "link", "iframe", "object", "embed", "img", "base"}
        for name, value in attrs:
            assert name not in {"src", "srcset", "action"}
            if name == "id":
                self.ids.append(value or "")
            if name in {"href", "xlink:href"}:
                assert (value or "").startswith("#")
                self.references.append((value or "")[1:])
        self.num_pictures += tag == "svg"
        if tag == "tr":
            self.rows.append([])
        if tag not in {"meta"}:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self._open and self._open[-1] in {"td", "th"}:
            self.rows[-1].append(data)


def _rounded(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


@pytest.mark.parametrize("num_heads", [1, 4, 8, 10])
@pytest.mark.parametrize("conversations", [1, 9])
@pytest.mark.parametrize("top_k", [1, 10])
def test_every_form_has_every_figure(
    tmp_path: Path, num_heads: int, conversations: int, top_k: int
) -> None:
    ranks = _ranks(num_heads, conversations=conversations, top_k=top_k)
    report = _write(tmp_path, ranks, facts={"recipe": "x & y"})
    assert json.loads((tmp_path / "heads_accuracy.json").read_text()) == report
    html = (tmp_path / "heads_accuracy.html").read_text()
    page = _Page(html)
    shown = " ".join(page.text)
    markdown = (tmp_path / "heads_accuracy.md").read_text()
    terminal = summary_text(report)
    for head in report["heads"]:
        cells = [
            str(head["head"]),
            head["predicts"],
            f"{head['positions']:,}",
            _rounded(head["top_k_accuracy"][0]),
            "–".join(map(_rounded, head["top1_ci95"] or [])) or "–",
            _rounded(head["conditional_top1"]),
            *map(_rounded, head["top_k_accuracy"][1:]),
        ]
        assert "| " + " | ".join(cells) + " |" in markdown.splitlines()
        assert cells in [line.split() for line in terminal.splitlines()]
        assert cells in page.rows
    for gains in gain_rows(report):
        assert "| " + " | ".join(gains) + " |" in markdown.splitlines()
        assert gains in page.rows
    assert len(gain_rows(report)) == num_heads
    [advice] = pay_lines(report)
    for form in (shown, markdown, terminal):
        assert advice in form
        assert f"{report['chain']['acceptance_length']:.3f}" in form
        assert ("no intervals" in form) == (conversations == 1)
    assert "http" not in html
    assert "url(http" not in html
    assert len(set(page.ids)) == len(page.ids)
    assert set(page.references) <= set(page.ids)
    assert "a <b>&c" in shown
    assert "x & y" in shown
    assert "<b>&c" not in html
    pictures = {"accepted", "top_1_accuracy"}
    pictures |= {"position"} if conversations > 1 else set()  # else no bin has enough pairs
    pictures |= {"top_n_accuracy"} if top_k > 1 else set()
    assert {path.stem for path in tmp_path.glob("*.png")} == pictures
    assert page.num_pictures == len(pictures)
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in tmp_path.glob("*.png"))
    assert torch.equal(read_ranks(tmp_path / "ranks.safetensors").ranks, ranks.ranks)


def test_training_curves_are_drawn_from_the_metrics(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    lines = [
        {"step": s, "loss": 9.0 / s, **{f"head{k}_{what}": k / s for k in (1, 2)
         for what in ("loss", "top1")}}
        for s in range(1, 6)
    ]  # fmt: skip
    lines += [{"step": 5, "eval_head1_loss": 1.0, "eval_head1_top1": 0.5}, {"step": 5}]
    # A kill cut the last line short.
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 6, "lo'
    metrics.write_text(text)
    _write(tmp_path / "report", _ranks(2), metrics=metrics)
    for name in ("training_loss", "training_top1"):
        assert (tmp_path / "report" / f"{name}.png").stat().st_size > 1000
    assert "held-out conversations" in (tmp_path / "report" / "heads_accuracy.md").read_text()


@pytest.mark.parametrize("text", [None, "", '{"step": 1, "loss": 2.0, "head1_loss": 1.0}\n'])
def test_metrics_without_a_curve_draw_nothing(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    _write(tmp_path / "report", _ranks(2), metrics=tmp_path / "metrics.jsonl")
    assert not list((tmp_path / "report").glob("training*"))


def test_the_report_replaces_an_older_one_and_is_the_same_each_time(tmp_path: Path) -> None:
    """No temporary files stay, and equal figures give equal bytes."""

    def files() -> dict[str, bytes]:
        _write(tmp_path, _ranks(2))
        return {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    first, second = files(), files()
    assert first.keys() == second.keys()
    # safetensors writes its metadata in any order.
    differing = {name for name in first if first[name] != second[name]}
    assert differing <= {"ranks.safetensors"}


def test_heads_without_pairs_are_dashes(tmp_path: Path) -> None:
    ranks = _ranks(4, conversations=3, length=3)
    report = _write(tmp_path, ranks)
    assert report["heads"][3]["top_k_accuracy"][0] is None
    row = "| 4 | t+5 | 0 |" + " – |" * 12
    assert row in (tmp_path / "heads_accuracy.md").read_text().splitlines()


def test_no_picture_of_an_older_report_stays(tmp_path: Path) -> None:
    _write(tmp_path, _ranks(2))
    assert (tmp_path / "position.png").exists()
    _write(tmp_path, _ranks(2, conversations=1))
    assert not (tmp_path / "position.png").exists()


def test_no_head_has_pairs(tmp_path: Path) -> None:
    """Answers of one token: the walk has steps, the heads have nothing to show."""
    report = _write(tmp_path, _ranks(2, conversations=3, length=1))
    assert report["chain"]["acceptance_length"] == 1.0
    assert [path.name for path in tmp_path.glob("*.png")] == ["accepted.png"]


@pytest.mark.parametrize(
    ("sampling", "words"),
    [
        ({"temperature": 0}, "exact for greedy decoding"),
        ({"temperature": 0.0, "top_p": 1.0, "top_k": 0}, "exact for greedy decoding"),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 5}, "temperature 0.7, top-p 0.9, top-k 5;"),
        ({"temperature": 0.7}, "not for greedy decoding"),
        (None, "not written by the base model"),
        ([{"temperature": 0}, None], "several ways"),
        ([{"temperature": 0}, {"temperature": 1}], "several ways"),
        ([{"temperature": 0, "seed": 1}, {"temperature": 0, "seed": 2}], "exact for greedy"),
    ],
)
def test_the_texts_sampling_is_said(sampling: Any, words: str) -> None:
    assert words in sampling_phrase(sampling)
