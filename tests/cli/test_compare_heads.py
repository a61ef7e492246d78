"""scripts/compare_heads.py: the ratio of two chains' gains, with a paired interval."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from medusa_train.evaluate.ranks import MISS, Ranks, write_ranks

SCRIPT = str(Path(__file__).parents[2] / "scripts" / "compare_heads.py")


def _write(path: Path, hits: list[list[int]], *, text: str = "text") -> Path:
    """Ranks of one head: 1 in ``hits`` is a token that it ranks first; one list a conversation."""
    lengths = torch.tensor([len(row) for row in hits])
    is_hit = torch.tensor([hit for row in hits for hit in row])
    positions = torch.cat([torch.arange(n) for n in lengths.tolist()]).int()
    is_last = positions == lengths.repeat_interleave(lengths) - 1
    ranks = torch.where((is_hit == 1) & ~is_last, 0, MISS).short()[:, None]
    write_ranks(
        path,
        Ranks(
            ranks=ranks,
            num_valid=(~is_last).short(),
            conversation=torch.arange(len(hits)).repeat_interleave(lengths).int(),
            position=positions,
            span=torch.zeros(len(ranks), dtype=torch.int32),
            metadata={"schema_version": 1, "top_k": 1, "data_fingerprint": text},
        ),
    )
    return path


@pytest.fixture
def compare(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs the script; what it prints."""

    def run(*arguments: object) -> str:
        monkeypatch.setattr("sys.argv", [SCRIPT, *map(str, arguments)])
        runpy.run_path(SCRIPT, run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.fixture
def refusal(compare: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs the script, which refuses its input; what it says."""

    def run(*arguments: object) -> str:
        with pytest.raises(SystemExit) as ended:
            compare(*arguments)
        assert ended.value.code == 2
        return capsys.readouterr().err

    return run


def test_ratio_of_gains_by_hand(tmp_path: Path, compare: Callable[..., str]) -> None:
    # First: steps at 0, 2, 3 and at 0, 1, 2, 3: 8 tokens in 7 steps. Second: 0, 2 and 0, 2: in 4.
    first = _write(tmp_path / "first", [[1, 0, 0, 0], [0, 0, 0, 0]])
    second = _write(tmp_path / "second", [[1, 0, 1, 0], [1, 0, 1, 0]])
    report = json.loads(compare(first, second, "--json"))
    assert [chain["acceptance_length"] for chain in report["chains"]] == pytest.approx([8 / 7, 2.0])
    assert report["gain_ratio"] == pytest.approx(1.0 / (8 / 7 - 1))
    assert (report["num_conversations"], report["num_positions"]) == (2, 8)


def test_the_interval_is_paired(tmp_path: Path, compare: Callable[..., str]) -> None:
    """Conversations differ much, the ratio of two equal chains does not."""
    hits = [[1, 0] * n + [0, 0] * (8 - n) for n in range(1, 8)]
    paths = [_write(tmp_path / name, hits) for name in ("first", "second")]
    report = json.loads(compare(*paths, "--json"))
    low, high = report["chains"][0]["ci95"]
    assert high - low > 0.1
    assert report["gain_ratio_ci95"] == pytest.approx([1.0, 1.0])


def test_it_says_the_figures_in_words(tmp_path: Path, compare: Callable[..., str]) -> None:
    paths = [_write(tmp_path / name, [[1, 0, 0, 0], [1, 0, 1, 0]]) for name in ("first", "second")]
    lines = compare(*paths).splitlines()
    assert lines[0] == "2 conversations, 8 positions"
    assert lines[1].startswith(f"{paths[0]}: 1.600 (1.333–2.000)")
    assert lines[-1] == "ratio of the gains (acceptance length − 1): 1.000 (1.000–1.000)"


@pytest.mark.parametrize(
    ("hits", "text", "message"),
    [
        ([[1, 0, 0, 0]], "another", "the two files hold the ranks of different texts"),
        ([[1, 0, 0]], "text", "the two files hold the ranks of different texts"),
        ([[0, 0, 0, 0]], "text", "the first heads gain nothing"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    hits: list[list[int]],
    text: str,
    message: str,
    tmp_path: Path,
    refusal: Callable[..., str],
) -> None:
    first = _write(tmp_path / "first", hits, text=text)
    second = _write(tmp_path / "second", [[1, 0, 0, 0]])
    assert message in refusal(first, second)


def test_own_answers_are_paired_by_their_place(
    tmp_path: Path, compare: Callable[..., str], refusal: Callable[..., str]
) -> None:
    """Texts of other lengths: 8 tokens in 7 steps against 6 tokens in 4."""
    first = _write(tmp_path / "first", [[1, 0, 0, 0], [0, 0, 0, 0]], text="first")
    second = _write(tmp_path / "second", [[1, 0, 0], [1, 0, 0]], text="second")
    report = json.loads(compare(first, second, "--own-answers", "--json"))
    assert report["gain_ratio"] == pytest.approx((6 / 4 - 1) / (8 / 7 - 1))
    fewer = _write(tmp_path / "fewer", [[1, 0, 0]], text="fewer")
    message = refusal(first, fewer, "--own-answers")
    assert "the ranks of 2 and 1 conversations" in message


def test_a_tree_of_each_is_walked(tmp_path: Path, compare: Callable[..., str]) -> None:
    """A tree with the second candidate alone gets nothing of tokens that are ranked first."""
    path = _write(tmp_path / "ranks", [[1, 0, 0, 0], [0, 0, 0, 0]])
    trees = [tmp_path / "first.json", tmp_path / "second.json"]
    for tree, paths in zip(trees, ("[[0]]", "[[1]]"), strict=True):
        tree.write_text(paths, encoding="utf-8")
    report = json.loads(compare(path, path, "--trees", *trees, "--json"))
    assert report["walks"] == "trees"
    lengths = [chain["acceptance_length"] for chain in report["chains"]]
    assert lengths == pytest.approx([8 / 7, 1.0])
