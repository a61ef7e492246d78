"""What a run logs while it trains, and the trackers that it logs to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_train.errors import InputError
from medusa_train.pipeline import run_pipeline
from medusa_train.run_dir import RunDir
from medusa_train.stages import Workspace
from medusa_train.train import trackers
from medusa_train.train.build import build_trainer
from medusa_train.train.throughput import flops_per_pair, memory_mib, peak_flops
from tests.models_for_tests import save_base
from tests.products_for_tests import CountProducts
from tests.training_for_tests import cyclic_rows, write_recipe

PLACES = ("MLFLOW_TRACKING_URI", "TENSORBOARD_LOGGING_DIR", "MLFLOW_EXPERIMENT_NAME")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that names no place, and that a run may set as it likes."""
    for name in (*PLACES, "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def _run(directory: Path, base: Path, *overrides: str) -> RunDir:
    rows = cyclic_rows(24)
    return run_pipeline(write_recipe(directory, base=base, rows=rows, overrides=list(overrides)))


def _lines(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


@pytest.mark.parametrize("mode", ["online", "cached"])
def test_every_log_has_speed_and_memory(tmp_path: Path, base: Path, mode: str) -> None:
    run = _run(
        tmp_path, base, f"train.hidden_states={mode}", "train.trainer.gradient_accumulation_steps=2"
    )
    lines = [line for line in _lines(run) if "loss" in line]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert line["positions_per_second"] > 0
        # Three heads; each position has one to three pairs, most of them three.
        assert 2.5 < line["pairs_per_second"] / line["positions_per_second"] < 3.0
        assert 0 < line["model_flops_utilisation"] < 1
        assert 50 < line["memory_mib"] < 100_000
    # Times of neighbouring logs do not overlap, so the whole is not faster than its parts.
    seconds = sum(line["pairs"] / line["pairs_per_second"] for line in lines)
    [summary] = [line for line in _lines(run) if "train_runtime" in line]
    assert seconds < summary["train_runtime"]


@pytest.mark.parametrize("layout", ["full", "shared"])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("soft_share", [0.0, 0.5])
def test_flops_are_those_of_the_products(
    tmp_path: Path, base: Path, layout: str, num_layers: int, soft_share: float
) -> None:
    overrides = [
        f"heads.layout={layout}", f"heads.num_layers={num_layers}", "train.hidden_states=online",
        "data.eval_fraction=0.0", f"train.soft_target_weight={soft_share}",
        "train.loss_chunk_size=1",  # a CPU fills chunks up to whole steps of rows
    ]  # fmt: skip
    workspace = Workspace(
        write_recipe(tmp_path, base=base, rows=cyclic_rows(4), overrides=overrides)
    )
    trainer = build_trainer(
        workspace.recipe, base=workspace.base, data=workspace.data, run=workspace.run,
        run_name="test",
    )  # fmt: skip
    [batch] = trainer.get_train_dataloader()
    pairs = trainer.module.count_pairs(batch["labels"])
    states = trainer.module.source(batch)
    trainer.module.source = lambda _: states  # the base's own products are not the heads'
    with CountProducts() as products:
        trainer.module(**batch, num_pairs=pairs)["loss"].backward()
    config = trainer.module.heads.config
    assert products.flops == pairs.sum() * flops_per_pair(config, has_teacher=soft_share > 0)


def test_peak_and_memory_of_this_machine() -> None:
    cpu = torch.device("cpu")
    state = torch.get_rng_state()
    assert 1e8 < peak_flops(cpu, torch.float32) < 1e15
    assert torch.equal(torch.get_rng_state(), state)
    assert memory_mib(cpu) > 50


@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_a_tracker_that_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Before anything is loaded: there is no base model at all."""
    monkeypatch.setattr(trackers, "find_spec", lambda _: None)
    loaded = write_recipe(
        tmp_path, base=tmp_path / "absent", rows=cyclic_rows(3), overrides=[f"tracking.{name}=true"]
    )
    with pytest.raises(InputError) as failure:
        run_pipeline(loaded)
    assert str(failure.value) == (
        f"tracking.{name}: {name} is not installed; pip install 'medusa-train[{name}]', "
        "or set the key to false"
    )
    assert not (tmp_path / "run").exists()


def test_tensorboard(tmp_path: Path, base: Path, clean: pytest.MonkeyPatch) -> None:
    del clean
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = _run(
        tmp_path, base, "tracking.tensorboard=true", "train.trainer.eval_strategy=steps",
        "train.trainer.eval_steps=2",
    )  # fmt: skip
    events = EventAccumulator(str(run.root / "tensorboard"))
    events.Reload()
    lines = _lines(run)
    for tag, name in (
        ("train/head3_top5", "head3_top5"),
        ("train/memory_mib", "memory_mib"),
        ("train/model_flops_utilisation", "model_flops_utilisation"),
        ("eval/acceptance_length", "eval_acceptance_length"),
    ):
        ours = [(line["step"], line[name]) for line in lines if name in line]
        theirs = [(event.step, event.value) for event in events.Scalars(tag)]
        assert [step for step, _ in ours] == [step for step, _ in theirs]
        assert [y for _, y in ours] == pytest.approx([y for _, y in theirs], rel=1e-6)


def test_mlflow(
    tmp_path: Path,
    base: Path,
    clean: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The client alone writes files; the database needs the whole package."""
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    clean.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    clean.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlruns'}")
    run = _run(
        tmp_path, base, "tracking.mlflow=true", "tracking.project=heads", "tracking.run_name=first"
    )
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("heads")
    [record] = client.search_runs([experiment.experiment_id])
    assert record.info.run_name == "first"
    history = client.get_metric_history(record.info.run_id, "head1_loss")
    assert [point.value for point in history] == [
        line["head1_loss"] for line in _lines(run) if "head1_loss" in line
    ]
    assert not capsys.readouterr().out


def test_places_and_projects(tmp_path: Path, clean: pytest.MonkeyPatch) -> None:
    import os

    from medusa_train.recipe.schema import TrackingSection

    clean.setenv("TENSORBOARD_LOGGING_DIR", "chosen")
    section = TrackingSection(mlflow=True, tensorboard=True)
    trackers.set_environment(section, RunDir(tmp_path))
    assert {name: os.environ.get(name) for name in PLACES} == {
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "TENSORBOARD_LOGGING_DIR": "chosen",
        "MLFLOW_EXPERIMENT_NAME": "medusa-train",
    }
