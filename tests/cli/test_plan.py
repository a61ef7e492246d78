"""`medusa-train plan`: exact exit codes, one JSON object, tables, and errors of one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

from medusa_train.cli.train import app
from tests.cli.test_validate import ROOT, outcome

Plan = Callable[..., tuple[int, str, str]]

CONFIG = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
}
RECIPE = "base_model: {name_or_path: base}\nheads: {num_heads: 3}\ndata: {path: rows.jsonl}\n"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A recipe whose data are not there, and a base model without weights."""
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "x.yaml").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def plan(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    """Call the command in this process, from that place: another one needs seconds to begin."""
    monkeypatch.chdir(place)

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            app(["plan", *arguments])
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    return call


def test_one_json_object(place: Path) -> None:
    arguments = ("plan", "x.yaml", "--json", "--no-benchmark", "--devices", "4")
    code, stdout, stderr = outcome("medusa-train", *arguments, cwd=place)
    assert (code, stderr) == (0, "")
    plan = json.loads(stdout)
    assert plan["device"]["count"] == 4
    # One head: 1000 · 64, and 64² + 64 of its block.
    assert plan["parameters"]["per_head"] == 68_160
    assert plan["parameters"]["trainable"] == 3 * 68_160
    assert set(plan["memory"]["train"]) == {"zero0", "zero1", "zero2", "zero3"}
    assert plan["memory"]["train"]["zero0"]["optimizer"] == 8 * 3 * 68_160
    assert plan["memory"]["train"]["zero2"]["optimizer"] == (8 + 4) * 3 * 68_160 / 4
    assert plan["memory"]["hidden-states"]["base_weights"] == 2 * plan["parameters"]["base"]
    assert plan["time"] is None
    assert plan["warnings"] == []
    assert sorted(path.name for path in place.iterdir()) == ["base", "x.yaml"]


def test_tables_with_a_measured_time(plan: Plan) -> None:
    code, stdout, stderr = plan("x.yaml")
    assert (code, stderr) == (0, "measuring this device for a few seconds\n")
    for words in ("one head", "ZeRO-3", "loss chunk", "figures per 1,000", "TFLOP", "checkpoints"):
        assert words in stdout
    assert "from a measurement on this device" in stdout


def test_an_override_changes_the_plan(plan: Plan) -> None:
    sets = ("--set", "heads.layout=shared", "--set", "train.hidden_states=online")
    code, stdout, _ = plan("x.yaml", "--json", "--no-benchmark", *sets)
    assert code == 0
    result = json.loads(stdout)
    assert result["parameters"]["per_head"] == 64**2 + 64
    assert result["memory"]["hidden-states"] is None


@pytest.mark.parametrize(
    ("args", "stderr"),
    [
        (("no.yaml",), "error: no.yaml: no such file\n"),
        (
            ("x.yaml", "--set", "heads.num_heads=0"),
            "error: --set heads.num_heads=0: heads.num_heads: must be at least 1; got 0\n",
        ),
        (
            ("x.yaml", "--set", "heads.vocab_size=1001"),
            "error: heads.vocab_size: must be at most the base model's 1000 tokens, got 1001\n",
        ),
    ],
)
def test_bad_input_is_one_line(plan: Plan, args: tuple[str, ...], stderr: str) -> None:
    assert plan(*args) == (2, "", stderr)


def test_a_base_that_is_not_here(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    name = "base_model.name_or_path=nobody/no-such-model"
    code, stdout, stderr = plan("x.yaml", "--set", name)
    assert (code, stdout, stderr.count("\n")) == (2, "", 1)
    assert stderr.startswith("error: nobody/no-such-model: its config cannot be loaded: ")


def test_help_says_what_it_does() -> None:
    code, stdout, stderr = outcome("medusa-train", "plan", "--help", cwd=ROOT)
    assert (code, stderr) == (0, "")
    assert "--devices" in stdout
    assert "--no-benchmark" in stdout
