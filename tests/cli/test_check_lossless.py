"""scripts/check_lossless.py: draws against the exact distribution."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).parents[2] / "scripts" / "check_lossless.py")


def _run(*arguments: object, monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    monkeypatch.setattr("sys.argv", [SCRIPT, *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(SCRIPT, run_name="__main__")
    return ended.value.code


def test_four_kinds_of_draws(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("--num-draws", 2_000, "--json", monkeypatch=monkeypatch) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["candidates"], row["temperature"]) for row in rows] == [
        ("chain", 0.7), ("chain", 1.0), ("tree", 0.7), ("tree", 1.0),
    ]  # fmt: skip
    for row in rows:
        assert row["num_draws"] == 2_000
        assert row["num_accepted"] > 0
        assert row["degrees_of_freedom"] > 5
        assert row["p"] >= 0.001


@pytest.mark.parametrize("number", [0, 2_001])
def test_draws_come_in_whole_batches(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run("--num-draws", number, monkeypatch=monkeypatch) == 2
    assert f"--num-draws {number}: must be a multiple of 2000" in capsys.readouterr().err
