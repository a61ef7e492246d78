"""``medusa-eval tree`` as a user calls it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from medusa_train.cli.evaluate import app
from medusa_train.evaluate.ranks import MISS, Ranks, read_ranks, write_ranks
from medusa_train.heads.checkpoint import heads_fingerprint
from tests.decoding_for_tests import save_heads_directory
from tests.models_for_tests import save_base


def _call(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        app(["tree", *map(str, arguments)])
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with the ranks of two heads among two, over four answers."""
    rows = [[0, 0], [0, 1], [1, 0], [1, 1], [0, MISS], [MISS, MISS]]
    count, number = len(rows), 4
    ranks = Ranks(
        ranks=torch.tensor(rows * number, dtype=torch.int16),
        num_valid=torch.tensor([2, 2, 2, 2, 1, 0] * number, dtype=torch.int16),
        conversation=torch.arange(number).repeat_interleave(count).int(),
        position=torch.arange(count).repeat(number).int(),
        span=torch.zeros(count * number, dtype=torch.int32),
        metadata={"top_k": 2, "text_sampling": {"temperature": 0}, "heads_fingerprint": "abc"},
    )
    write_ranks(tmp_path / "run" / "report" / "ranks.safetensors", ranks)
    return tmp_path / "run"


def test_the_table(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Case 16: six nodes are possible, and that is said."""
    code, out, err = _call(run, "--report-on", run, "--num-bootstrap", 20, capsys=capsys)
    assert code == 0
    assert err == (
        "warning: 63 nodes asked for: only 6 are possible with 2 heads and the 2 most likely "
        "tokens of each\n"
    )
    assert (
        out
        == """\
searched: 4 conversations (24 positions)
figures: 4 conversations (24 positions), another text; intervals: 95 %, percentile bootstrap over \
conversations
text: the base model's greedy answers; the acceptance length is exact for greedy decoding

                     nodes  depth  tokens per step         95 %  tree is longer by            95 %
               tree      6      2            3.000  3.000–3.000
most frequent paths      6      2            3.000  3.000–3.000              0.000  0.000 to 0.000
  independent heads      6      2            3.000  3.000–3.000              0.000  0.000 to 0.000
         best chain      2      2            2.000  2.000–2.000              1.000  1.000 to 1.000
"""
    )


def test_json_and_files(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = run / "report" / "ranks.safetensors"
    options = ["--num-nodes", 2, "--num-bootstrap", 20, "--output", tmp_path / "out", "--json"]
    code, out, err = _call(file, *options, capsys=capsys)
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result == json.loads((tmp_path / "out" / "tree.json").read_text())
    assert result["num_nodes"] == 2
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "tree.json", "medusa_choices.json", "tree.png", "tree.svg",
    }  # fmt: skip


def test_without_output_nothing_is_written(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _call(run / "report", "--num-bootstrap", 20, capsys=capsys)[0] == 0
    assert [path.name for path in run.rglob("*") if path.is_file()] == ["ranks.safetensors"]


def test_a_latency_curve(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "curve.json").write_text('{"1": 10, "3": 12, "7": 60}')
    options = ["--latency", tmp_path / "curve.json", "--num-bootstrap", 20, "--json"]
    code, out, _ = _call(run, *options, capsys=capsys)
    assert code == 0
    assert json.loads(out)["num_nodes"] == 2


def test_for_this_device(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured once; the second time no model is loaded, so there is nothing to load from."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    base = save_base(tmp_path / "base")
    heads = save_heads_directory(tmp_path / "heads", base=base, num_heads=2)
    ranks = read_ranks(run / "report" / "ranks.safetensors")
    found = {**ranks.metadata, "heads_fingerprint": heads_fingerprint(heads)}
    write_ranks(tmp_path / "ranks.safetensors", replace(ranks, metadata=found))
    options = ["--for-device", heads, "--num-nodes", 4, "--num-bootstrap", 20, "--json"]
    code, out, err = _call(tmp_path / "ranks.safetensors", *options, capsys=capsys)
    assert code == 0
    assert "latency of a step: measuring on" in err
    result = json.loads(out[out.index("{") :])  # a library may have logged before
    assert result["objective"] == "tokens_per_second"
    assert list(result["latency_ms"]) == ["1", "2", "4", "5"]
    code, out, err = _call(tmp_path / "ranks.safetensors", *options, capsys=capsys)
    assert code == 0
    assert json.loads(out)["latency_ms"] == result["latency_ms"]
    assert err.startswith(f"latency of a step: from {tmp_path / 'cache'}")
    again = _call(tmp_path / "ranks.safetensors", *options, "--measure-again", capsys=capsys)
    assert "measuring on" in again[2]
    other = save_base(tmp_path / "other", seed=1)
    code, _, err = _call(
        tmp_path / "ranks.safetensors", *options, "--base-model", other, capsys=capsys
    )
    assert code == 2
    assert "give the base that they were trained on" in err
    code, _, err = _call(run, *options, capsys=capsys)
    assert code == 2
    assert err == (
        f"error: {heads}: the ranks are of other heads (abc); give those that they were measured "
        "with\n"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--latency", "a", "--for-device", "b"],
            "--latency and --for-device: give one of them, not both",
        ),
        (
            ["--measure-again"],
            "--measure-again: is for measuring; give --for-device HEADS with it",
        ),
        (["--dtype", "float32"], "--dtype: is for measuring; give --for-device HEADS with it"),
        (
            ["--base-model", "b"],
            "--base-model: is for measuring; give --for-device HEADS with it",
        ),
        (["--for-device", "absent"], "absent: no such heads directory"),
        (["--for-device", "absent", "--max-depth", 3], "max depth 3: there are 2 heads"),
        (["--max-depth", 3], "max depth 3: there are 2 heads"),
        (
            ["--top-k", 9],
            "top k 9: the file holds the ranks below 2; measure the heads with --top-k 9",
        ),
        (
            ["--per-depth", "3,,4"],
            "--per-depth 3,,4: must be numbers with commas between, as 10,20,20",
        ),
        (
            ["--per-depth", "3,0"],
            "--per-depth 3,0: must be numbers with commas between, as 10,20,20",
        ),
        (["--latency", "absent.json"], "absent.json: no such file"),
    ],
)
def test_mistakes(
    run: Path, options: list[object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _call(run, *options, capsys=capsys) == (2, "", f"error: {message}\n")


def test_no_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _call(tmp_path, capsys=capsys) == (
        2, "",
        f"error: {tmp_path}: no ranks.safetensors in it; medusa-eval heads-accuracy HEADS "
        "--output DIR makes one\n",
    )  # fmt: skip
    absent = tmp_path / "absent.safetensors"
    assert _call(absent, capsys=capsys) == (2, "", f"error: {absent}: no such file\n")
