"""A guard that goes back: killed at it and after it, and on two processes, sharded or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.e2e.processes import finish, kill_when
from tests.e2e.test_many_devices import CONFIGS, _overrides, _recipe, _run_all

GUARD = [
    "train.method=medusa2",
    "train.hidden_states=online",
    "data.eval_fraction=0.2",
    # The rate grows far too high; lowered, it stays small.
    "train.trainer.learning_rate=0.05",
    "train.trainer.warmup_steps=20",
    "train.trainer.lr_scheduler_type=linear",
    "train.trainer.max_steps=10",
    "train.trainer.eval_strategy=steps",
    "train.trainer.eval_steps=1",
    "train.trainer.save_steps=1",
]
SECTION = (
    "train.medusa2={lora: {rank: 4, dropout: %s}, guard: {max_kl: 0.02, patience: 2, "
    "num_rollbacks: 1, lower_learning_rate_by: 0.01}}"
)
WAYS = {"plain": [], **{name: [f"deepspeed={CONFIGS}/{name}.json"] for name in ("zero2", "zero3")}}


def _result(run: Path) -> dict[str, Tensor]:
    files = ("heads/medusa_lm_head", "adapters/adapter_model")
    return {
        f"{file}.{key}": value
        for file in files
        for key, value in load_file(run / f"{file}.safetensors").items()
    }


def _record(run: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((run / "manifest.json").read_text())["stages"]["train"]
    return record


def _rates(run: Path) -> list[float]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line["learning_rate"] for line in lines if "loss" in line]


def test_a_kill_at_a_rollback_changes_nothing(tmp_path: Path) -> None:
    """Nor one soon after it; with dropout, whose random numbers are the checkpoint's."""
    recipe, log = _recipe(tmp_path), tmp_path / "log"

    def arguments(name: str) -> list[str]:
        overrides = _overrides(tmp_path, name, [*GUARD, SECTION % 0.1], batch=8)
        options = [option for override in overrides for option in ("--set", override)]
        return ["run", str(recipe), *options, "--only", "train"]

    straight, cut = (tmp_path / "runs" / name for name in ("straight", "cut"))
    finish("train", arguments("straight"), log=log)
    [rollback] = _record(straight)["rollbacks"]
    assert rollback["to_step"] > 1
    checkpoints = cut / "checkpoints"
    conditions = (
        (checkpoints / "rollbacks.json").exists,
        (checkpoints / f"checkpoint-{rollback['to_step'] + 3}").exists,
    )
    for condition in conditions:
        assert kill_when(condition, "train", arguments("cut"), log=log)
    finish("train", arguments("cut"), log=log)
    assert _record(cut)["rollbacks"] == [rollback]
    assert _rates(cut) == _rates(straight)
    ours, theirs = _result(cut), _result(straight)
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]), key


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs' directory, after every run on two processes."""
    directory = tmp_path_factory.mktemp("rollback")
    recipe = str(_recipe(directory))
    runs = [
        [recipe, *_overrides(directory, name, [*GUARD, SECTION % 0.0, *extra], batch=4)]
        for name, extra in WAYS.items()
    ]
    _run_all(directory, runs, num_processes=2)
    return directory / "runs"


@pytest.mark.parametrize("name", WAYS)
def test_two_processes_go_back_and_on(finished: Path, name: str) -> None:
    [ours], [theirs] = (_record(finished / way)["rollbacks"] for way in (name, "plain"))
    assert ours.pop("base_kl") == pytest.approx(theirs.pop("base_kl"), rel=0.05)
    assert ours == theirs
    good = ours["to_step"]
    expected = [0.05 * n / 20 * (1.0 if n < good else 0.01) for n in range(10)]
    assert _rates(finished / name) == pytest.approx(expected)
    assert "result" not in _record(finished / name)
    ours, theirs = _result(finished / name), _result(finished / "plain")
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        torch.testing.assert_close(value, theirs[key], rtol=0, atol=2e-4)
