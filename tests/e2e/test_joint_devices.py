"""Medusa-2 on two processes gives the result of one: plain, and DeepSpeed in its stages."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from medusa_train.heads.checkpoint import load_heads
from medusa_train.trained_base import load_trained_base
from tests.e2e.processes import start
from tests.e2e.test_many_devices import CONFIGS, _overrides, _recipe, _run_all, _steps

JOINT = [
    "train.method=medusa2",
    "train.hidden_states=online",
    "train.trainer.learning_rate=0.001",
]
LORA = [*JOINT, "train.medusa2={lora: {rank: 4, dropout: 0.0}, head_loss_schedule: constant}"]
FULL = [*JOINT, "train.medusa2={trained: full, teacher: frozen_copy, head_loss_schedule: constant}"]
KINDS = {"lora": LORA, "full": FULL}
WAYS = {"plain": [], **{name: [f"deepspeed={CONFIGS}/{name}.json"] for name in ("zero2", "zero3")}}
RUNS = {f"{kind} {way}": [*KINDS[kind], *WAYS[way]] for kind in KINDS for way in WAYS}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recipe's directory, after every run on two processes and the baselines on one."""
    directory = tmp_path_factory.mktemp("joint")
    recipe = str(_recipe(directory))
    one = [
        [recipe, *_overrides(directory, f"one {kind}", extra, batch=8)]
        for kind, extra in KINDS.items()
    ]
    two = [[recipe, *_overrides(directory, name, more, batch=4)] for name, more in RUNS.items()]
    _run_all(directory, one, num_processes=1)
    _run_all(directory, two, num_processes=2)
    return directory


def _result(directory: Path, name: str) -> dict[str, Tensor]:
    run = directory / "runs" / name
    files = ["heads/medusa_lm_head", "adapters/adapter_model", "base/model"]
    found = [run / f"{file}.safetensors" for file in files]
    return {
        f"{path.parent.name}.{key}": value
        for path in found
        if path.exists()
        for key, value in load_file(path).items()
    }


@pytest.mark.parametrize("name", list(RUNS))
def test_two_processes_give_the_result_of_one(finished: Path, name: str) -> None:
    ours, theirs = _result(finished, name), _result(finished, f"one {name.split(maxsplit=1)[0]}")
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert value.numel()
        torch.testing.assert_close(value, theirs[key], rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", list(RUNS))
def test_the_loss_curves_are_the_same(finished: Path, name: str) -> None:
    curves = []
    for run in (name, f"one {name.split(maxsplit=1)[0]}"):
        lines = (finished / "runs" / run / "metrics.jsonl").read_text().splitlines()
        curves.append([row["loss"] for row in map(json.loads, lines) if "loss" in row])
    assert curves[0] == pytest.approx(curves[1], abs=1e-4)


@pytest.mark.parametrize("name", ["lora zero3", "full zero3"])
def test_what_is_left_loads_without_deepspeed(finished: Path, name: str) -> None:
    heads = finished / "runs" / name / "heads"
    trained = load_trained_base(heads)
    load_heads(heads, base_fingerprint=trained.fingerprint)


def _begin(directory: Path, name: str, extra: Sequence[str]) -> psutil.Popen:
    overrides = _overrides(directory, name, extra, batch=4)
    options = [option for override in overrides for option in ("--set", override)]
    arguments = ["run", str(directory / "recipe.yaml"), "--devices", "2", *options]
    return start("train", arguments, log=directory / "log")


def test_ten_steps_are_five_and_a_kill_and_five(tmp_path: Path) -> None:
    """LoRA with dropout under ZeRO-3 on two ranks."""
    _recipe(tmp_path)
    log = tmp_path / "log"
    extra = [
        *JOINT,
        "train.medusa2={lora: {rank: 4, dropout: 0.1}, head_detach_probability: 0.3}",
        f"deepspeed={CONFIGS}/zero3.json",
        "train.trainer.max_steps=10",
        "train.trainer.save_steps=5",
        "train.trainer.logging_steps=1",
    ]
    straight = _begin(tmp_path, "straight", extra)
    assert straight.wait(timeout=400) == 0, log.read_text()[-6000:]
    process = _begin(tmp_path, "cut", extra)
    saved = tmp_path / "runs" / "cut" / "checkpoints" / "checkpoint-5"
    while not saved.exists():
        assert process.poll() is None, log.read_text()[-6000:]
        time.sleep(0.002)
    worker = psutil.Process(process.pid).children()[-1]
    worker.send_signal(signal.SIGKILL)
    assert process.wait(timeout=200) == 1
    assert not (tmp_path / "runs" / "cut" / "heads").exists()
    process = _begin(tmp_path, "cut", extra)
    assert process.wait(timeout=400) == 0, log.read_text()[-6000:]
    assert _steps(tmp_path, "cut") == 10
    assert "going on from" in log.read_text()
    ours, theirs = _result(tmp_path, "cut"), _result(tmp_path, "straight")
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        torch.testing.assert_close(value, theirs[key], rtol=0, atol=0)
