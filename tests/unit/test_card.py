"""The model card of a run: its metadata, its figures, and what it does not say."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard, ModelCardData

from medusa_train.card.base_card import BaseCard, read_base_card
from medusa_train.card.body import WRITTEN_BY, card_body
from medusa_train.card.markdown import block, plain, table
from medusa_train.card.metadata import card_metadata
from medusa_train.card.of_run import card_sources, write_run_card
from medusa_train.card.training import public_recipe
from medusa_train.card.usage import Use
from medusa_train.card.write import card_text, write_card
from medusa_train.errors import InputError
from medusa_train.evaluate.tables import pay_lines
from medusa_train.pipeline import run_pipeline
from medusa_train.recipe.load import load_recipe
from medusa_train.run_dir import RunDir
from tests.decoding_for_tests import save_heads_directory
from tests.exports_for_tests import export
from tests.models_for_tests import save_base
from tests.training_for_tests import cyclic_rows, write_recipe

BASE_CARD = "---\nlicense: mit\nlanguage:\n- en\n- fr\n---\n\n# A base\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    directory = tmp_path_factory.mktemp("trained")
    base = save_base(directory / "tiny-base", "gemma2", final_logit_softcapping=7.5)
    (base / "README.md").write_text(BASE_CARD, encoding="utf-8")
    overrides = ["evaluate.tree={num_nodes: 2}", "heads.vocab_size=20"]
    return run_pipeline(
        write_recipe(directory, base=base, rows=cyclic_rows(24), overrides=overrides)
    )


@pytest.fixture
def run(trained: RunDir, tmp_path: Path) -> RunDir:
    return RunDir(shutil.copytree(trained.root, tmp_path / "run"))


def _card(run: RunDir) -> ModelCard:
    return ModelCard((run.heads / "README.md").read_text(encoding="utf-8"))


def _data(card: ModelCard | str) -> ModelCardData:
    """The metadata as the hub reads it."""
    data = (ModelCard(card) if isinstance(card, str) else card).data
    assert isinstance(data, ModelCardData)
    return data


def _report(run: RunDir, name: str) -> Any:
    return json.loads((run.report / name).read_text())


def test_the_metadata_has_the_report_s_figures(trained: RunDir) -> None:
    card = _card(trained)
    # The hub reads what was meant.
    assert _data(card).to_dict() == card_metadata(card_sources(trained.heads)).to_dict()
    data = _data(card)
    assert (data.license, data.language) == ("mit", ["en", "fr"])
    assert (data.library_name, data.pipeline_tag) == ("medusa-train", "text-generation")
    assert {"medusa", "speculative-decoding"} <= set(data.tags or ())
    # A directory is no id of the hub.
    assert data.base_model is None
    assert "base_model_relation" not in data.to_dict()
    report, tree = _report(trained, "heads_accuracy.json"), _report(trained, "tree.json")
    figures = {result.metric_name: result.metric_value for result in data.eval_results or ()}
    assert figures == {
        **{
            f"head {head['head']} top-1 ({head['predicts']})": round(head["top_k_accuracy"][0], 4)
            for head in report["heads"]
        },
        "tokens per step, top-1 chain of 3": round(report["chain"]["acceptance_length"], 4),
        "tokens per step, tree of 2 nodes": round(tree["acceptance_length"], 4),
    }
    texts = {result.dataset_name for result in data.eval_results or ()}
    assert any(f"{report['num_conversations']} held-out conversations" in text for text in texts)


def test_the_text_has_tables_pictures_and_limits(trained: RunDir) -> None:
    text = _card(trained).text
    report = _report(trained, "heads_accuracy.json")
    first = report["heads"][0]
    [advice] = pay_lines(report)
    assert f"- {advice}\n" in text
    assert f"| 1 | t+2 | {first['positions']:,} | {first['top_k_accuracy'][0]:.3f} |" in text
    sections = re.findall(r"^## (.+)$", text, re.M)
    assert sections == [
        "Use", "Accuracy", "Candidate tree", "Training", "Data", "What to know",
    ]  # fmt: skip
    pictures = re.findall(r"^!\[.+\]\((.+)\)$", text, re.M)
    assert {"plots/top_1_accuracy.png", "plots/tree.png", "plots/training_loss.png"} <= set(
        pictures
    )
    assert sorted(pictures) == sorted(
        f"plots/{path.name}" for path in (trained.heads / "plots").iterdir()
    )
    for picture in pictures:
        report_file = trained.report / Path(picture).name
        assert (trained.heads / picture).read_bytes() == report_file.read_bytes()
    assert "caps its logits softly at 7.5" in text
    assert "They name 20 of " in text
    assert "licence above is that of the base model, `mit`" in text
    assert "`max_steps` 4" in text
    assert "| steps | 4 |" in text


def test_nothing_of_this_machine_is_in_it(trained: RunDir) -> None:
    text = (trained.heads / "README.md").read_text(encoding="utf-8")
    assert str(trained.root.parent) not in text
    assert "name_or_path: tiny-base" in text
    [recipe] = re.findall(r"^```yaml\n(.+?)^```$", text, re.M | re.S)
    shown = yaml.safe_load(recipe)
    assert not {"run_dir", "tracking"} & shown.keys()
    assert shown["train"]["trainer"]["max_steps"] == 4


def test_servers_tokens_and_homes_are_left_out() -> None:
    recipe = {
        "run_dir": "runs/x",
        "data": {
            "path": "/home/someone/chats.jsonl",
            "chat_template": "/not a path\n{{ x }}",
            "distill": {"server": {"urls": ["http://internal"], "api_key_env": "K", "timeout": 1}},
        },
        "train": {"trainer": {"hub_token": "hf_x", "seed": 0}},
        "evaluate": {"quality": {"judge": {"url": "http://internal", "model": "m"}}},
        "list": ["~/a/b", "c/d", 3],
    }
    assert public_recipe(recipe) == {
        "data": {
            "path": "chats.jsonl",
            "chat_template": "/not a path\n{{ x }}",
            "distill": {"server": {"timeout": 1}},
        },
        "train": {"trainer": {"seed": 0}},
        "evaluate": {"quality": {"judge": {"model": "m"}}},
        "list": ["b", "c/d", 3],
    }


def test_a_card_is_kept_until_something_changes(
    run: RunDir, trained: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = trained.root.parent / "recipe.yaml"
    overrides = ["evaluate.tree={num_nodes: 2}", "heads.vocab_size=20", f"run_dir={run.root}"]
    run_pipeline(load_recipe(recipe, overrides))
    capsys.readouterr()
    before = (run.heads / "README.md").read_bytes()
    run_pipeline(load_recipe(recipe, overrides))
    assert "card: up to date" in capsys.readouterr().err
    more = [*overrides, "card.base_model_id=someone/base", "card.languages=[de]"]
    run_pipeline(load_recipe(recipe, [*more, "card.license=apache-2.0"]))
    shown = capsys.readouterr().err
    assert "tree: up to date" in shown
    assert "card: starting" in shown
    assert (run.heads / "README.md").read_bytes() != before
    data = _data(_card(run))
    assert (data.base_model, data.license, data.language) == ("someone/base", "apache-2.0", ["de"])
    assert data.to_dict()["base_model_relation"] == "adapter"
    assert "[`someone/base`](https://huggingface.co/someone/base)" in _card(run).text
    assert 'MedusaModel.from_pretrained("DIRECTORY", "someone/base")' in _card(run).text


def test_reports_of_other_heads_are_left_out(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = _report(run, "tree.json") | {"heads_fingerprint": "0" * 16}
    (run.report / "tree.json").write_text(json.dumps(tree))
    write_run_card(run)
    assert "tree.json: is of other heads, so the card leaves it out" in capsys.readouterr().err
    assert "tree of 2 nodes" not in json.dumps(_data(_card(run)).to_dict())
    assert "come with a tree of 2 nodes" in _card(run).text
    (run.heads / "config.json").write_text("{}")
    write_run_card(run)
    assert "## Accuracy" not in _card(run).text
    assert "model-index" not in _data(_card(run)).to_dict()
    assert not list((run.heads / "plots").glob("*accuracy*"))


def test_how_much_the_base_has_changed(run: RunDir) -> None:
    verdict = {"kept": False, "retained_share": 0.97, "retained_share_ci95": [0.965, 0.975]}
    verdict |= {"min_agreement": 0.98, "max_perplexity_ratio": 1.02}
    quality: dict[str, Any] = {"num_positions": 1234, "verdict": verdict}
    for key, value in (("kl", 0.01), ("perplexity_ratio", 1.02), ("greedy_top1_agreement", 0.97)):
        quality |= {key: value, f"{key}_ci95": [value - 0.005, value + 0.005]}
    (run.report / "quality.json").write_text(json.dumps(quality))
    write_run_card(run)
    text = _card(run).text
    assert "on 1,234 positions" in text
    assert "| positions where both would write the same token | 0.970 | 0.965–0.975 |" in text
    figures = {
        result.metric_name: result.metric_value for result in _data(_card(run)).eval_results or ()
    }
    assert figures["perplexity ratio"] == 1.02
    assert "of the original's greedy choices are retained" in text


def test_heads_alone_have_a_short_card(run: RunDir, tmp_path: Path) -> None:
    moved = run.heads.rename(tmp_path / "moved")
    text = card_text(card_sources(moved))
    assert re.findall(r"^## (.+)$", text, re.M) == [
        "Use", "Candidate tree", "Training", "What to know",
    ]  # fmt: skip
    assert "model-index" not in _data(text).to_dict()
    with pytest.raises(InputError, match=r"no recipe.resolved.yaml in it; give the directory of"):
        write_run_card(RunDir(moved))


def test_the_card_of_an_export(run: RunDir, tmp_path: Path) -> None:
    sources = card_sources(run.heads)
    use = Use("Start it so.", library="transformers", tags=("custom_generate",))
    files = write_card(tmp_path, sources, use=use, name="README.medusa.md")
    assert files[0] == "README.medusa.md"
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.*")} >= set(files)
    card = ModelCard.load(tmp_path / "README.medusa.md")
    assert _data(card).library_name == "transformers"
    assert "custom_generate" in (_data(card).tags or ())
    assert "## Use\n\nStart it so.\n\n## Accuracy" in card.text
    assert "An engine without candidate trees has the chain's acceptance length" in card.text
    assert "These files are the heads alone" in card.text
    whole = card_body(sources, use=replace(use, holds_base=True))
    assert "The model itself is among these files." in whole


def test_fewer_heads_have_their_own_figures_alone(trained: RunDir, tmp_path: Path) -> None:
    sources = card_sources(trained.heads)
    assert sources.first(3) is sources
    text = card_text(sources.first(2))
    card = ModelCard(text)
    chain = _report(trained, "heads_accuracy.json")["chain"]["by_length"][1]
    figures = {result.metric_name: result.metric_value for result in _data(card).eval_results or ()}
    assert list(figures) == [
        "head 1 top-1 (t+2)",
        "head 2 top-1 (t+3)",
        "tokens per step, top-1 chain of 2",
    ]
    length = chain["acceptance_length"]
    assert figures["tokens per step, top-1 chain of 2"] == round(length, 4)
    assert "With 2 small heads beside it" in text
    assert f"Acceptance length of the top-1 chain of 2: {length:.3f} tokens per step" in text
    assert f"| tokens per step with the top-1 chain of 2 | {length:.3f} |" in text
    assert "chain of 3" not in text
    export("transformers", trained.heads, tmp_path / "out", num_heads=2)
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert f"top-1 chain of 2: {length:.3f} tokens per step" in card.text
    assert {r.metric_name: r.metric_value for r in _data(card).eval_results or ()} == figures
    assert "## Candidate tree" not in text
    assert "plots/" not in text


def test_an_older_report_knows_no_shorter_chain(run: RunDir) -> None:
    report = _report(run, "heads_accuracy.json")
    for key in ("by_length", "num_heads_that_pay"):
        del report["chain"][key]
    (run.report / "heads_accuracy.json").write_text(json.dumps(report))
    sources = card_sources(run.heads)
    assert "Acceptance length of the top-1 chain of 3" in card_text(sources)
    assert "Acceptance length" not in card_text(sources.first(2))


def test_names_from_outside_are_text(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    sources = card_sources(save_heads_directory(tmp_path / "heads", base=base))
    hostile = BaseCard("a`b\n# <script>x</script> | c", license="x: y\n---")
    text = card_body(replace(sources, base=hostile))
    assert text.splitlines()[0] == "# Medusa heads for `a'b # <script>x</script> | c`"
    assert text.splitlines()[2] == WRITTEN_BY
    whole = card_text(replace(sources, base=hostile))
    assert _data(whole).license == "x: y\n---"
    assert plain("<b>x</b> & `a<b`") == "&lt;b&gt;x&lt;/b&gt; &amp; `a<b`"
    assert table(["a|b"], [["c\nd"]]) == "| a\\|b |\n| --- |\n| c d |"
    assert block("```\nx", language="yaml") == "````yaml\n```\nx\n````"


def test_what_a_base_s_own_card_says(tmp_path: Path) -> None:
    assert read_base_card(str(tmp_path)) == BaseCard(tmp_path.name)
    path = tmp_path / "README.md"
    path.write_text(
        "---\nlicense: other\nlicense_name: own\nlicense_link: LICENSE\nlanguage: en\n---\n"
    )
    own = read_base_card(str(tmp_path))
    assert (own.license, own.license_name, own.license_link) == ("other", "own", "LICENSE")
    assert own.languages == ("en",)
    told = read_base_card(str(tmp_path), license_id="mit", languages=["de"], hub_id="a/b")
    assert (told.name, told.license, told.license_name) == ("a/b", "mit", None)
    assert told.languages == ("de",)
    for text in ("no metadata", "---\n[: \n---\n", "---\nlicense: 3\n---\n", "\x00"):
        path.write_text(text)
        assert read_base_card(str(tmp_path)).license is None
