"""``medusa-train card``: the base model's card on the hub, and speed that was measured later."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, ModelCardData

from medusa_train.cli.evaluate import app as evaluate
from medusa_train.cli.train import app
from medusa_train.pipeline import run_pipeline
from tests.cli.test_evaluate import _call
from tests.cli.test_push import TOKEN, run_at
from tests.hub_for_tests import Hub
from tests.models_for_tests import save_base
from tests.training_for_tests import cyclic_rows, write_recipe


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trained")
    base = save_base(directory / "base")
    return run_pipeline(write_recipe(directory, base=base, rows=cyclic_rows(16))).root


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def test_speed_that_was_measured_later(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = run / "questions.jsonl"
    prompts.write_text('{"turns": ["the sea is"]}\n{"turns": ["a river"]}\n')
    code, _, err = _call(
        evaluate, "speedup", run / "heads", "--prompts", prompts, "--max-new-tokens", 6, "--dtype",
        "float32", "--num-bootstrap", 20, "--output", run / "report", capsys=capsys,
    )  # fmt: skip
    assert code == 0, err
    code, out, _ = _call(app, "card", run, "--license", "mit", "--json", capsys=capsys)
    assert code == 0
    files = json.loads(out)["files"]
    assert str(run / "heads" / "README.md") in files
    assert str(run / "heads" / "plots" / "speed.png") in files
    card = ModelCard.load(run / "heads" / "README.md")
    assert isinstance(card.data, ModelCardData)
    assert card.data.license == "mit"
    report = json.loads((run / "report" / "speedup.json").read_text())
    figures = {result.metric_name: result.metric_value for result in card.data.eval_results or ()}
    assert figures["times the speed of model.generate"] == round(report["speedup"], 4)
    assert "## Speed" in card.text
    assert f"{report['device']}" in card.text
    assert "2 of 2 answers are identical to plain decoding in float32" in card.text


def test_the_base_s_own_card_on_the_hub(run: Path, tmp_path: Path) -> None:
    path = run / "heads" / "heads_spec.json"
    spec = json.loads(path.read_text())
    spec["base_model"]["name_or_path"] = "someone/base"
    path.write_text(json.dumps(spec))

    def data(home: str) -> dict[str, object]:
        result = run_at("card", run, hub=hub, token=None, home=str(tmp_path / home), **more)
        assert result.returncode == 0, result.stderr
        said.append(result.stderr)
        return dict(ModelCard.load(run / "heads" / "README.md").data.to_dict())

    said: list[str] = []
    more: dict[str, str] = {}
    card = "---\nlicense: apache-2.0\nlanguage: en\n---\n"
    with Hub(TOKEN, cards={"someone/base": card}) as hub:
        known = data("one")
        more = {"HF_HUB_OFFLINE": "1"}
        # What was read once is there offline too.
        assert data("one") == known
        offline = data("two")
    with Hub(TOKEN) as hub:
        more = {}
        unknown = data("three")
    assert (known["base_model"], known["license"]) == ("someone/base", "apache-2.0")
    assert known["language"] == ["en"]
    assert offline["base_model"] == "someone/base"
    assert "license" not in offline
    assert "its own card could not be read, so its licence is left out" in said[2]
    # The name of a directory that is not here.
    assert not {"base_model", "license"} & unknown.keys()
    assert "the hub has no such model" in said[3]


def test_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = _call(app, "card", tmp_path, capsys=capsys)
    assert code == 2
    assert "no recipe.resolved.yaml in it; give the directory of a run" in err
