"""``medusa-train plot``: curves of runs that are finished, running, resumed, or none."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from medusa_train.cli.train import app
from medusa_train.page.drawing import Plot
from medusa_train.page.training import LoggedRun, run_plots
from medusa_train.training_curves import read_metrics
from tests.cli.test_evaluate import _call

FIGURES = [
    "loss", "top1", "top5", "acceptance_length", "learning_rate", "grad_norm",
    "positions_per_second", "model_flops_utilisation", "memory_mib",
]  # fmt: skip


def _line(step: int, *, shift: float = 0.0) -> dict[str, Any]:
    line: dict[str, Any] = {"step": step, "time": 1.0, "epoch": step / 10, "loss": 9 / step + shift}
    line |= {"learning_rate": 1e-3, "grad_norm": 2.0, "pairs": 40.0, "memory_mib": 700.0}
    line |= {"positions_per_second": 90.0, "model_flops_utilisation": 0.4}
    for head in (1, 2):
        line |= {f"head{head}_loss": 9 / step, f"head{head}_top1": 0.5, f"head{head}_top5": 0.8}
    return line


def _held_out(step: int) -> dict[str, Any]:
    line: dict[str, Any] = {"step": step, "eval_acceptance_length": 1.0 + step / 100}
    return line | {f"eval_head{n}_{key}": 0.4 for n in (1, 2) for key in ("loss", "top1", "top5")}


def _joint(step: int, loss: str) -> list[dict[str, Any]]:
    line = {**_line(step), f"base_{loss}": step / 100, "lambda0": step / 200}
    return [line, {**_held_out(step), "eval_base_kl": step / 90}]


def _write(run: Path, lines: list[dict[str, Any]], *, end: str = "") -> Path:
    run.mkdir(parents=True)
    (run / "manifest.json").write_text("{}")
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run / "metrics.jsonl").write_text(text + end)
    return run


def _both(*steps: int) -> list[dict[str, Any]]:
    return [line for step in steps for line in (_line(step), _held_out(step))]


def test_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _write(tmp_path / "run", _both(10, 20, 30))
    (run / "report").mkdir()
    # Of an older page; what is not the command's stays.
    (run / "report" / "training_old.png").write_bytes(b"")
    (run / "report" / "position.png").write_bytes(b"")
    code, out, err = _call(app, "plot", run, capsys=capsys)
    report = run / "report"
    assert (code, err) == (0, "")
    pictures = [report / f"training_{name}.png" for name in FIGURES]
    assert out.splitlines() == [str(report / "training.html"), *map(str, pictures)]
    names = {path.name for path in report.iterdir()}
    assert names == {"training.html", "position.png", *(path.name for path in pictures)}
    for path in pictures:
        assert path.read_bytes().startswith(b"\x89PNG")
    page = (report / "training.html").read_text()
    assert page.count("<svg ") == len(FIGURES)
    assert not re.search(r"(src|href)=\"?(http|//|/)", page)
    assert "1.300" in page


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _write(tmp_path / "run", [_line(10)])
    code, out, _ = _call(app, "plot", run, "--json", "--output", tmp_path / "out", capsys=capsys)
    assert code == 0
    found = json.loads(out)
    assert found["page"] == str(tmp_path / "out" / "training.html")
    assert found["steps"] == {"run": 10}
    assert all(Path(path).exists() for path in found["pictures"])
    # Nothing was evaluated, so there is no acceptance length to draw.
    assert len(found["pictures"]) == len(FIGURES) - 1
    assert not (run / "report").exists()


@pytest.mark.parametrize("loss", ["kl", "cross_entropy"])
def test_a_base_that_is_trained(
    tmp_path: Path, loss: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [line for step in (10, 20, 30) for line in _joint(step, loss)]
    run = _write(tmp_path / "run", lines)
    code, out, _ = _call(app, "plot", run, "--json", capsys=capsys)
    assert code == 0
    found = json.loads(out)
    names = [Path(path).stem.removeprefix("training_") for path in found["pictures"]]
    # With a cross-entropy the divergence is known on the held-out text.
    others = ["base_kl"] if loss == "kl" else ["base_kl", "base_cross_entropy"]
    assert names == [*FIGURES[:4], *others, "lambda0", *FIGURES[4:]]
    page = Path(found["page"]).read_text()
    assert "0.333" in page
    assert "weighted loss of base and heads" in page
    # A circle at each evaluation, beside the marks of the line; none for the weight.
    [divergence] = [plot for plot in _figures(run) if plot.name == "training_base_kl"]
    [weight] = [plot for plot in _figures(run) if plot.name == "training_lambda0"]
    assert "Circles: on the held-out conversations." in divergence.caption
    assert divergence.svg.count("<use ") - weight.svg.count("<use ") >= 3
    assert "Circles" not in weight.caption


def _figures(run: Path) -> list[Plot]:
    return run_plots([LoggedRun("run", read_metrics(run))])


def test_several_runs_in_one_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Names that a legend cannot show as they are: hidden, mathematics, not in the font, long."""
    names = ["_first/run", "$x_1$/run", "<b>語</b>/run", "x" * 90 + "/run"]
    names[2] = names[2].replace("/b", "b")
    runs = [_write(tmp_path / name, _both(10, 20)) for name in names]
    code, out, err = _call(app, "plot", *runs, "--json", capsys=capsys)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["page"] == str(runs[0] / "report" / "comparison.html")
    assert list(found["steps"]) == names
    assert len(found["pictures"]) == 6 + 2 * 3
    page = Path(found["page"]).read_text()
    assert "&lt;b&gt;語&lt;b&gt;/run" in page
    assert "<b>語" not in page


def test_a_run_that_is_writing(tmp_path: Path) -> None:
    run = _write(tmp_path / "run", [_line(10), _line(20)], end='{"step": 30, "lo')
    assert [line["step"] for line in read_metrics(run)] == [10, 20]


def test_a_run_that_went_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Steps 30 and 40 came again, 50 not yet: what the first attempt said of them is gone."""
    again = [_line(30, shift=1.0), _line(40, shift=1.0)]
    run = _write(tmp_path / "run", [*_both(10, 20, 30, 40, 50), *again])
    lines = read_metrics(run)
    assert [line["step"] for line in lines] == [10, 20, 30, 40]
    assert [line["loss"] for line in lines] == [0.9, 0.45, 1.3, 1.225]
    assert ["eval_acceptance_length" in line for line in lines] == [True, True, False, False]


def _refused(capsys: pytest.CaptureFixture[str], *arguments: object, error: str) -> None:
    assert _call(app, "plot", *arguments, capsys=capsys) == (2, "", f"error: {error}\n")


def test_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    absent, empty = tmp_path / "absent", tmp_path / "empty"
    empty.mkdir()
    why = "not a run directory"
    _refused(capsys, absent, error=f"{absent}: {why}: there is no directory of this name")
    _refused(
        capsys,
        empty,
        error=f"{empty}: {why}: it has no manifest.json and no metrics.jsonl; give what the recipe "
        "calls run_dir",
    )
    started = tmp_path / "started"
    early = "no metrics yet; training logs its first line after train.trainer.logging_steps steps"
    started.mkdir()
    (started / "manifest.json").write_text("{}")
    _refused(capsys, started, error=f"{started}: {early}")
    cut = _write(tmp_path / "cut", [], end='{"step": 1')
    _refused(capsys, cut, error=f"{cut}: {early}")
    assert not (cut / "report").exists()


def test_lines_that_are_no_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _write(tmp_path / "run", [_line(1), {"loss": 1.0}])
    where = run / "metrics.jsonl"
    _refused(capsys, run, error=f"{where}:2: not a line of metrics: it has no step")
    where.write_text("{]\n" + json.dumps(_line(2)) + "\n")
    code, out, err = _call(app, "plot", run, capsys=capsys)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {where}:1: not a line of metrics: ")


def test_a_run_given_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _write(tmp_path / "run", [_line(1)])
    _refused(capsys, run, run, error=f"{run}: given twice; give each run once")
