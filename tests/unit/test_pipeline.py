from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors import safe_open

from medusa_train.cli.train import Stage
from medusa_train.errors import InputError
from medusa_train.pipeline import run_pipeline
from medusa_train.recipe.load import load_recipe
from medusa_train.run_dir import locked
from medusa_train.stages import STAGES, Workspace, fingerprint_of
from tests.judge_server import judging
from tests.models_for_tests import ARCHITECTURES, file_hashes, save_base
from tests.quality_for_tests import save_adapters
from tests.training_for_tests import cyclic_rows, write_recipe

FILES_OF_A_RUN = {
    "recipe.resolved.yaml",
    "manifest.json",
    "metrics.jsonl",
    "heads/medusa_lm_head.safetensors",
    "heads/config.json",
    "heads/heads_spec.json",
    "heads/tokenizer.json",
    "heads/README.md",
    "heads/plots/top_1_accuracy.png",
    "report/heads_accuracy.json",
    "report/heads_accuracy.md",
    "report/heads_accuracy.html",
    "report/ranks.safetensors",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_every_architecture_trains_saves_reloads_and_measures(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    base = save_base(tmp_path / "base", architecture, tied=tied)
    before = file_hashes(base)
    loaded = write_recipe(tmp_path, base=base, rows=cyclic_rows(16))
    run = run_pipeline(loaded)
    written = {str(path.relative_to(run.root)) for path in run.root.rglob("*")}
    assert written >= FILES_OF_A_RUN
    report = json.loads((run.report / "heads_accuracy.json").read_text())
    assert [head["predicts"] for head in report["heads"]] == ["t+2", "t+3", "t+4"]
    assert report["num_conversations"] > 0
    assert 1.0 <= report["chain"]["acceptance_length"] <= 4.0
    assert file_hashes(base) == before


@pytest.mark.parametrize("num_heads", [1, 8])
def test_one_head_and_many_heads(tmp_path: Path, base: Path, num_heads: int) -> None:
    """Case 16, training and accuracy."""
    loaded = write_recipe(
        tmp_path, base=base, rows=cyclic_rows(16), overrides=[f"heads.num_heads={num_heads}"]
    )
    run = run_pipeline(loaded)
    report = json.loads((run.report / "heads_accuracy.json").read_text())
    assert len(report["heads"]) == num_heads


@pytest.mark.parametrize("layout", ["full", "shared"])
def test_truncated_vocabulary(tmp_path: Path, base: Path, layout: str) -> None:
    """Only the cycle's tokens are named, and all of them are: nothing is out of reach."""
    loaded = write_recipe(
        tmp_path, base=base, rows=cyclic_rows(24),
        overrides=[
            "heads.vocab_size=11", f"heads.layout={layout}", "train.trainer.max_steps=60",
            "train.trainer.learning_rate=0.02",
        ],
    )  # fmt: skip
    run = run_pipeline(loaded)
    report = json.loads((run.report / "heads_accuracy.json").read_text())
    assert report["heads"][0]["top_k_accuracy"][0] > 0.9
    assert report["heads"][0]["top_k_accuracy"][9] > report["heads"][0]["top_k_accuracy"][0] - 1e-9


def test_other_settings_need_to_be_asked_for(tmp_path: Path, base: Path) -> None:
    run_pipeline(write_recipe(tmp_path, base=base, rows=cyclic_rows(16)))
    changed = load_recipe(tmp_path / "recipe.yaml", ["train.trainer.learning_rate=0.5"])
    heads = file_hashes(changed.run_dir / "heads")
    with pytest.raises(InputError, match="the stage train ran here with other settings"):
        run_pipeline(changed)
    assert file_hashes(changed.run_dir / "heads") == heads
    run_pipeline(changed, start="train")
    assert file_hashes(changed.run_dir / "heads") != heads


def test_only_runs_one_stage(tmp_path: Path, base: Path) -> None:
    loaded = write_recipe(tmp_path, base=base, rows=cyclic_rows(16))
    with pytest.raises(InputError, match="the stage accuracy has nothing to read yet"):
        run_pipeline(loaded, only="accuracy")
    run = run_pipeline(loaded, only="hidden-states")
    assert (run.hidden_states / "train" / "manifest.json").exists()
    assert not run.heads.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": "distill"}, "--only distill: .* does not have it; choose from hidden-states"),
        ({"start": "tarin"}, "--from tarin: no such stage; choose from"),
    ],
)
def test_wrong_stages_are_input_errors(
    tmp_path: Path, base: Path, options: dict[str, str], message: str
) -> None:
    loaded = write_recipe(tmp_path, base=base, rows=cyclic_rows(16))
    with pytest.raises(InputError, match=message):
        run_pipeline(loaded, **options)  # type: ignore[arg-type]
    assert not loaded.run_dir.exists()


def test_a_tree_joins_the_heads_and_the_report(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = write_recipe(tmp_path, base=base, rows=cyclic_rows(24))
    run = run_pipeline(plain)
    report = json.loads((run.report / "heads_accuracy.json").read_text())
    page = (run.report / "heads_accuracy.html").read_text()
    assert report["tree"] is None
    assert not (run.heads / "medusa_choices.json").exists()
    heads = {name: h for name, h in file_hashes(run.heads).items() if name != "README.md"}
    with_tree = load_recipe(tmp_path / "recipe.yaml", ["evaluate.tree={num_nodes: 2}"])
    capsys.readouterr()
    run_pipeline(with_tree)
    assert "accuracy: up to date" in capsys.readouterr().err
    tree = json.loads((run.report / "tree.json").read_text())
    assert tree["num_nodes"] == 2
    assert json.loads((run.heads / "medusa_choices.json").read_text()) == tree["paths"]
    assert heads.items() <= file_hashes(run.heads).items()
    both = json.loads((run.report / "heads_accuracy.json").read_text())
    assert both["tree"] == {
        "num_nodes": 2,
        "acceptance_length": tree["acceptance_length"],
        "ci95": tree["ci95"],
        "num_conversations": tree["reported"]["num_conversations"],
    }
    assert {**both, "tree": None} == report
    with_picture = (run.report / "heads_accuracy.html").read_text()
    assert with_picture.count("<svg") == page.count("<svg") + 1
    assert "tokens per step with a tree of 2 nodes" in with_picture
    # The rest of the page is what it was, the facts of the run with it.
    for fact in ("trained on", "device", "training", "layout full"):
        assert fact in page
        assert fact in with_picture
    run_pipeline(with_tree)
    assert "tree: up to date" in capsys.readouterr().err
    run_pipeline(plain, start="accuracy")
    assert json.loads((run.report / "heads_accuracy.json").read_text()) == report
    assert not list(run.report.glob("tree.*"))


def test_a_tree_for_this_device(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_recipe(tmp_path, base=base, rows=cyclic_rows(24))
    options = "evaluate.tree={num_nodes: 3, for_this_device: true}"
    run = run_pipeline(load_recipe(tmp_path / "recipe.yaml", [options]))
    tree = json.loads((run.report / "tree.json").read_text())
    assert tree["objective"] == "tokens_per_second"
    assert list(tree["latency_ms"]) == ["1", "2", "4"]
    (kept,) = (tmp_path / "cache" / "medusa_train" / "latency").iterdir()
    assert json.loads(kept.read_text())["latency_ms"] == tree["latency_ms"]


def test_the_quality_of_a_changed_base(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stage runs where training has left adapters, and again only when something differs."""
    answer = {"role": "assistant", "content": "so"}
    rows = [replace(row, messages=(*row.messages, answer)) for row in cyclic_rows(16)]
    joint = ["train.method=medusa2", "train.hidden_states=online"]
    run = run_pipeline(write_recipe(tmp_path, base=base, rows=rows, overrides=joint))
    settings = [*joint, "evaluate.quality={num_answers: 2, max_new_tokens: 6}"]
    with_quality = load_recipe(tmp_path / "recipe.yaml", settings)
    shutil.rmtree(run.adapters)
    with pytest.raises(InputError, match="the stage quality has nothing to read yet"):
        run_pipeline(with_quality, only="quality")
    save_adapters(run.adapters, base=base)
    before = file_hashes(run.report)
    capsys.readouterr()
    run_pipeline(with_quality, only="quality")
    assert "moved: " in capsys.readouterr().err
    report = json.loads((run.report / "quality.json").read_text())
    assert (report["text"], report["answers"]["num_prompts"]) == ("held out by the run", 2)
    assert report["kl"] > 0
    record = json.loads(run.manifest.read_text())["stages"]["quality"]
    assert record["finished"]
    assert record["kept"] is False
    assert before.items() <= file_hashes(run.report).items()
    run_pipeline(with_quality, only="quality")
    assert "quality: up to date" in capsys.readouterr().err
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["Name a metal."]}\n{"turns": ["two and two"]}\n')
    asked = [*settings, f"evaluate.quality.prompts={prompts}"]
    run_pipeline(load_recipe(tmp_path / "recipe.yaml", asked), only="quality")
    report = json.loads((run.report / "quality.json").read_text())
    assert report["text"] == "greedy answers of the original to prompts.jsonl"
    assert report["num_conversations"] == 2
    capsys.readouterr()
    save_adapters(run.adapters, base=base, scale=0.0)
    run_pipeline(load_recipe(tmp_path / "recipe.yaml", asked), only="quality")
    assert "kept: 100.00 %" in capsys.readouterr().err


def test_the_stage_quality_asks_a_judge(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its key comes from the environment and is in no file; how many ask at a time is no matter."""
    answer = {"role": "assistant", "content": "so"}
    rows = [replace(row, messages=(*row.messages, answer)) for row in cyclic_rows(16)]
    monkeypatch.setenv("JUDGE_KEY", "not-to-be-told")
    overrides = ["train.method=medusa2", "train.hidden_states=online"]
    write_recipe(tmp_path, base=base, rows=rows)
    recipe = tmp_path / "recipe.yaml"
    wrong = "evaluate.quality={num_answers: 2, judge: {url: 'http://127.0.0.1:9/v1', model: tiny}}"
    with pytest.raises(InputError, match=r"^evaluate\.quality\.judge\.url: no server answers"):
        run_pipeline(load_recipe(recipe, [*overrides, wrong]))
    with judging(api_key="not-to-be-told") as server:
        for concurrency in (2, 3):
            judge = (
                f"{{url: '{server.url}', model: tiny, api_key_env: JUDGE_KEY, "
                f"concurrency: {concurrency}}}"
            )
            settings = f"evaluate.quality={{num_answers: 2, max_new_tokens: 6, judge: {judge}}}"
            run = run_pipeline(load_recipe(recipe, [*overrides, settings]))
    assert "quality: up to date" in capsys.readouterr().err
    judged = json.loads((run.report / "quality.json").read_text())["judge"]
    assert (judged["model"], judged["num_prompts"], judged["failures"]) == ("tiny", 2, {})
    files = [path for path in run.root.rglob("*") if path.is_file()]
    assert not any(b"not-to-be-told" in path.read_bytes() for path in files)


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm_eval is installed")
def test_tasks_are_refused_before_training_where_lm_eval_is_not(tmp_path: Path, base: Path) -> None:
    overrides = [
        "train.method=medusa2", "train.hidden_states=online",
        "evaluate.quality.lm_eval=[hellaswag]",
    ]  # fmt: skip
    loaded = write_recipe(tmp_path, base=base, rows=cyclic_rows(16), overrides=overrides)
    with pytest.raises(InputError) as caught:
        run_pipeline(loaded)
    assert str(caught.value) == (
        "evaluate.quality.lm_eval: needs the package lm_eval; pip install lm_eval"
    )
    assert not loaded.run_dir.exists()


def test_exports_follow_the_heads_and_the_tree(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = cyclic_rows(24)
    overrides = ["evaluate.tree={num_nodes: 4}", "export={targets: [vllm, nxd], dtype: bfloat16}"]
    run = run_pipeline(write_recipe(tmp_path, base=base, rows=rows, overrides=overrides))
    written = json.loads((run.exports / "exports.json").read_text())
    assert set(written) == {"vllm", "nxd"}
    assert "model.safetensors" in written["vllm"]
    tree = json.loads((run.heads / "medusa_choices.json").read_text())
    assert json.loads((run.exports / "nxd" / "medusa_choices.json").read_text()) == tree
    assert str(run.exports / "vllm") in (run.exports / "vllm" / "README.md").read_text()
    capsys.readouterr()
    run_pipeline(load_recipe(tmp_path / "recipe.yaml", overrides))
    assert "export: up to date" in capsys.readouterr().err
    other = load_recipe(tmp_path / "recipe.yaml", [overrides[0], "export={targets: [tgi]}"])
    run_pipeline(other, only="export")
    assert sorted(path.name for path in run.exports.iterdir()) == ["exports.json", "tgi"]


def test_the_command_line_knows_every_stage() -> None:
    assert tuple(Stage) == STAGES


def test_dry_run_writes_nothing(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = write_recipe(tmp_path, base=base, rows=cyclic_rows(16))
    run_pipeline(loaded, dry_run=True)
    assert not loaded.run_dir.exists()
    shown = capsys.readouterr().err
    for stage in ("hidden-states", "train", "accuracy"):
        assert stage in shown


def test_soft_targets_need_other_hidden_states(tmp_path: Path, base: Path) -> None:
    """Each span's last state is kept too, so a cache without them is not taken for one with."""
    lengths, fingerprints = [], []
    for weight in ("0.0", "0.5"):
        loaded = write_recipe(
            tmp_path,
            base=base,
            rows=cyclic_rows(6),
            overrides=[f"train.soft_target_weight={weight}", "data.eval_fraction=0.0"],
        )
        run = run_pipeline(loaded, only="hidden-states")
        [shard] = (run.hidden_states / "train").glob("*.safetensors")
        with safe_open(shard, framework="pt") as file:
            lengths.append(file.get_slice("hidden_states").get_shape()[0])
        fingerprints.append(fingerprint_of("hidden-states", Workspace(loaded)))
    assert lengths[1] == lengths[0] + 6
    assert fingerprints[0] != fingerprints[1]


def test_hidden_states_can_be_dropped_after_training(tmp_path: Path, base: Path) -> None:
    overrides = ["train.keep_hidden_states=false"]
    loaded = write_recipe(tmp_path, base=base, rows=cyclic_rows(16), overrides=overrides)
    run = run_pipeline(loaded)
    assert not run.hidden_states.exists()
    before = file_hashes(run.heads)
    run_pipeline(loaded)
    assert not run.hidden_states.exists()
    assert file_hashes(run.heads) == before


def test_two_processes_on_one_run_are_refused(tmp_path: Path, base: Path) -> None:
    loaded = write_recipe(tmp_path, base=base, rows=cyclic_rows(16))
    with (
        locked(loaded.run_dir),
        pytest.raises(InputError, match="another process is working here"),
    ):
        run_pipeline(loaded)


def test_evaluation_while_training(tmp_path: Path, base: Path) -> None:
    overrides = ["train.trainer.eval_strategy=steps", "train.trainer.eval_steps=2"]
    loaded = write_recipe(tmp_path, base=base, rows=cyclic_rows(24), overrides=overrides)
    run = run_pipeline(loaded)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    evaluated = [line for line in lines if "eval_head1_top1" in line]
    assert [line["step"] for line in evaluated] == [2, 4]
    # The last evaluation saw the final heads: its figures are the report's.
    report = json.loads((run.report / "heads_accuracy.json").read_text())
    for head in report["heads"]:
        measured = evaluated[-1][f"eval_head{head['head']}_top1"]
        assert measured == pytest.approx(head["top_k_accuracy"][0], abs=0.02)


def test_another_base_is_refused_by_a_finished_run(tmp_path: Path, base: Path) -> None:
    loaded = write_recipe(tmp_path, base=base, rows=cyclic_rows(16))
    run_pipeline(loaded)
    other = save_base(tmp_path / "other", seed=3)
    changed = load_recipe(tmp_path / "recipe.yaml", [f"base_model.name_or_path={other}"])
    with pytest.raises(InputError, match="ran here with other settings"):
        run_pipeline(changed)


def test_manifest_says_what_ran(tmp_path: Path, base: Path) -> None:
    run = run_pipeline(write_recipe(tmp_path, base=base, rows=cyclic_rows(16)))
    manifest = json.loads(run.manifest.read_text())
    assert set(manifest["stages"]) == {"hidden-states", "train", "accuracy", "card"}
    assert manifest["stages"]["train"]["logit_rule"] == {"scale": 1.0, "soft_cap": None}
    for record in manifest["stages"].values():
        assert record["finished"]
        assert record["seconds"] >= 0
    assert manifest["versions"]["torch"]
    assert load_recipe(run.recipe).recipe == load_recipe(tmp_path / "recipe.yaml").recipe


def test_wandb_offline(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    overrides = ["tracking.wandb=true", "tracking.project=heads"]
    run_pipeline(write_recipe(tmp_path, base=base, rows=cyclic_rows(16), overrides=overrides))
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))


def test_unwritable_output_fails_before_training(tmp_path: Path, base: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    loaded = write_recipe(
        tmp_path, base=base, rows=cyclic_rows(16), overrides=[f"run_dir={blocked}/run"]
    )
    with pytest.raises(InputError, match="cannot be written"):
        run_pipeline(loaded)
