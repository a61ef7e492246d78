"""``medusa-eval heads-accuracy`` and ``medusa-distill generate`` as a user calls them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import typer

from medusa_train.cli.distill import app as distill
from medusa_train.cli.evaluate import app as evaluate
from medusa_train.pipeline import run_pipeline
from tests.models_for_tests import save_base
from tests.training_for_tests import cyclic_rows, write_recipe


def _call(
    app: typer.Typer, *arguments: object, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        app([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trained")
    base = save_base(directory / "base")
    return run_pipeline(write_recipe(directory, base=base, rows=cyclic_rows(16))).root


def test_default_text_is_what_the_run_held_out(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = _call(
        evaluate, "heads-accuracy", run / "heads", "--num-bootstrap", 50, "--dtype", "float32",
        "--json", capsys=capsys,
    )  # fmt: skip
    assert code == 0
    report = json.loads(out)
    assert report == json.loads((run / "report" / "heads_accuracy.json").read_text())


def test_table_and_report_on_given_text(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "chats.jsonl"
    turns = [
        {"role": "user", "content": "Name a metal."},
        {"role": "assistant", "content": "Zinc."},
    ]
    data.write_text(json.dumps({"messages": turns}) + "\n")
    code, out, _ = _call(
        evaluate, "heads-accuracy", run / "heads", "--data", data, "--output", tmp_path / "report",
        "--num-bootstrap", 20, capsys=capsys,
    )  # fmt: skip
    assert code == 0
    assert "not written by the base model" in out
    assert "Acceptance length of the top-1 chain" in out
    assert (tmp_path / "report" / "heads_accuracy.html").exists()


def test_heads_outside_a_run_need_data(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run / "heads", tmp_path / "copy" / "heads")
    heads = tmp_path / "copy" / "heads"
    code, out, err = _call(evaluate, "heads-accuracy", heads, capsys=capsys)
    assert (code, out) == (2, "")
    assert err == (
        f"error: {heads}: lies in no run directory, so there is no held-out data; give some with "
        "--data\n"
    )


def test_another_base_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_base(tmp_path / "other", seed=4)
    data = run.parent / "dataset"
    code, _, err = _call(
        evaluate, "heads-accuracy", run / "heads", "--data", data, "--base-model", other,
        capsys=capsys,
    )  # fmt: skip
    assert code == 2
    assert "give the base that they were trained on (--base-model)" in err.splitlines()[-1]


def test_a_directory_that_holds_no_heads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = _call(evaluate, "heads-accuracy", tmp_path / "absent", capsys=capsys)
    assert code == 2
    assert err == f"error: {tmp_path / 'absent'}: no such heads directory\n"


def test_generate_from_flags_alone(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"turns": [f"Metal {n}?", "b"]}) + "\n" for n in range(3))
    )
    code, out, _ = _call(
        distill, "generate", "--base-model", run.parent / "base", "--prompts", prompts,
        "--temperature", 0, "--max-new-tokens", 6, "--output", tmp_path / "out",
        "--set", "data.distill.loop_ngram=0", "--json", capsys=capsys,
    )  # fmt: skip
    assert code == 0
    manifest = json.loads(out)
    assert manifest["num_prompts"] == 3
    assert manifest["sampling"]["temperature"] == 0


def test_generate_needs_a_config_or_a_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = _call(distill, "generate", "--output", tmp_path / "out", capsys=capsys)
    assert code == 2
    assert err == "error: give a CONFIG, or --base-model with --prompts or --num-prompts\n"


def test_generate_refuses_magpie_without_a_number(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = _call(
        distill, "generate", "--base-model", run.parent / "base", "--output", tmp_path / "out",
        "--temperature", 0.5, capsys=capsys,
    )  # fmt: skip
    assert code == 2
    assert "num_prompts" in err
    assert not (tmp_path / "out").exists()
