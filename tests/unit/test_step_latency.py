"""The latency curve of this device: what is measured, and when it is measured again."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from medusa_train.errors import InputError
from medusa_train.medusa_model import MedusaModel
from medusa_train.plan.device import device_name
from medusa_train.step_latency import (
    StepKind,
    cache_directory,
    step_kind,
    step_latency,
)
from medusa_train.step_timing import _check_spread, measure_steps
from tests.decoding_for_tests import random_heads
from tests.models_for_tests import make_base


@pytest.fixture
def model() -> MedusaModel:
    base = make_base()
    return MedusaModel(base, random_heads(base.model, num_heads=2))


@pytest.fixture
def kind(tmp_path: Path, model: MedusaModel, monkeypatch: pytest.MonkeyPatch) -> StepKind:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return step_kind(model.heads.config, base_fingerprint="0" * 16, dtype=torch.float32)


def _never() -> MedusaModel:
    raise AssertionError("the model was loaded")


@pytest.mark.parametrize(
    ("num_nodes", "sizes"),
    [(1, (1, 2)), (5, (1, 2, 4, 6)), (11, (1, 2, 4, 8, 12)), (20, (1, 2, 4, 8, 12, 16, 21))],
)
def test_all_sizes_up_to_the_trees_are_measured(
    model: MedusaModel, num_nodes: int, sizes: tuple[int, ...]
) -> None:
    curve = measure_steps(model, num_nodes=num_nodes, num_turns=1)
    assert curve.sizes == sizes
    assert min(curve.times) > 0


def test_heads_that_cannot_fill_a_tree_are_measured_as_far_as_they_can() -> None:
    base = make_base()
    token_map = torch.tensor([3, 5])
    model = MedusaModel(base, random_heads(base.model, num_heads=2, token_map=token_map))
    assert measure_steps(model, num_nodes=40, num_turns=1).sizes == (1, 2, 4, 7)


def test_times_that_differ_much_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    _check_spread([[10.0, 10.5, 11.0, 11.5, 40.0]])
    assert capsys.readouterr().err == ""
    _check_spread([[10.0, 10.0, 10.0], [10.0, 14.0, 20.0, 30.0, 40.0]])
    assert "the times of one size differ by 80%" in capsys.readouterr().err


def test_it_is_measured_once(
    model: MedusaModel, kind: StepKind, capsys: pytest.CaptureFixture[str]
) -> None:
    curve = step_latency(lambda: model, kind=kind, num_nodes=3)
    shown = capsys.readouterr().err
    assert f"measuring on {kind.device}, {kind.threads} threads, float32" in shown
    assert f"kept in {kind.file}" in shown
    record = json.loads(kind.file.read_text())
    assert record["kind"] == asdict(kind)
    assert record["cache_length"] == 256
    assert record["latency_ms"] == curve.as_json()
    assert step_latency(_never, kind=kind, num_nodes=3) == curve
    assert step_latency(_never, kind=kind, num_nodes=2) == curve
    assert f"from {kind.file}" in capsys.readouterr().err


def test_it_is_measured_again_for_a_larger_tree_and_when_asked_for(
    model: MedusaModel, kind: StepKind
) -> None:
    step_latency(lambda: model, kind=kind, num_nodes=1)
    assert step_latency(lambda: model, kind=kind, num_nodes=7).largest == 8
    with pytest.raises(AssertionError, match="the model was loaded"):
        step_latency(_never, kind=kind, num_nodes=7, measure_again=True)


@pytest.mark.parametrize(
    "change",
    [
        {"device": "another"}, {"threads": 99}, {"dtype": "bfloat16"}, {"base_fingerprint": "1"},
        {"layout": "full"}, {"num_heads": 9}, {"num_layers": 9}, {"truncated_vocab_size": 9},
        {"attn_implementation": "eager"}, {"quantization": "8bit"}, {"torch": "0"},
        {"medusa_train": "0"},
    ],
)  # fmt: skip
def test_a_curve_is_of_one_kind_of_step(kind: StepKind, change: dict[str, object]) -> None:
    assert replace(kind, **change).file != kind.file  # type: ignore[arg-type]


def test_where_curves_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_directory() == tmp_path / ".cache" / "medusa_train" / "latency"


def test_the_device_has_a_name() -> None:
    assert device_name(torch.device("cpu")) not in {"", "cpu"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "no latency curve .*; remove it, and it is measured again"),
        ('{"schema_version": 1, "kind": {}}', "no latency curve .of another kind of step.; "),
    ],
)
def test_a_damaged_file_is_named(kind: StepKind, text: str, message: str) -> None:
    kind.file.parent.mkdir(parents=True)
    kind.file.write_text(text)
    with pytest.raises(InputError, match=message):
        step_latency(_never, kind=kind, num_nodes=3)


def test_a_cache_that_cannot_be_written_is_no_error(
    model: MedusaModel,
    tmp_path: Path,
    kind: StepKind,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "cache").write_text("a file in the way")
    assert step_latency(lambda: model, kind=kind, num_nodes=1).sizes == (1, 2)
    assert "the latency of a step is measured anew next time" in capsys.readouterr().err
