"""A guard that goes back to the last good checkpoint, and on from there."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback

from medusa_train.errors import MedusaTrainError
from medusa_train.pipeline import run_pipeline
from medusa_train.run_dir import RunDir
from medusa_train.stages import Workspace, fingerprint_of
from medusa_train.train.guard import Guard, scale_learning_rates
from medusa_train.train.rollback import (
    GUARD_FILE,
    ROLLBACKS_FILE,
    Rollback,
    add_rollback,
    read_rollbacks,
    remove_undone,
)
from tests.models_for_tests import save_base
from tests.training_for_tests import cyclic_rows, write_recipe
from tests.unit.test_guard import OPTIONS, Break
from tests.unit.test_joint_training import trainer_of

FULL = "train.medusa2={trained: full, teacher: frozen_copy, guard: %s}"
RATES = {"lora": 0.05, "full": 0.01}
"""Grows far too high, step by step."""
SECTIONS = {"lora": "train.medusa2.guard=%s", "full": FULL}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


def _run(
    directory: Path, base: Path, kind: str, guard: str, *more: str, rate: float | None = None
) -> RunDir:
    options = [option for option in OPTIONS if kind == "lora" or "lora" not in option]
    rates = [f"train.trainer.learning_rate={rate or RATES[kind]}", "train.trainer.warmup_steps=20"]
    overrides = [*options, *rates, SECTIONS[kind] % guard, *more]
    loaded = write_recipe(directory, base=base, rows=cyclic_rows(16), overrides=overrides)
    return run_pipeline(loaded, only="train")


def _lines(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def _record(run: RunDir) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(run.manifest.read_text())["stages"]["train"]
    return record


@pytest.mark.parametrize("kind", RATES)
def test_a_run_goes_back_and_then_to_its_end(
    tmp_path: Path, base: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    guard = "{max_kl: 0.02, patience: 2, num_rollbacks: 1, lower_learning_rate_by: 0.002}"
    run = _run(tmp_path, base, kind, guard)
    said = capsys.readouterr().err
    record = _record(run)
    [rollback] = record["rollbacks"]
    good = rollback["to_step"]
    assert good > 1
    assert rollback["from_step"] == good + 2
    assert rollback["base_kl"] > 0.02
    assert (rollback["head_loss_factor"], rollback["learning_rate_factor"]) == (0.5, 0.002)
    assert f"for 2 evaluations in a row: training goes back to step {good}" in said
    assert f"rollback 1 of 1: going on from step {good} with 0.5 of the heads' weight" in said
    assert record["steps"] == 20
    assert "result" not in record
    assert json.loads((run.checkpoints / ROLLBACKS_FILE).read_text()) == record["rollbacks"]

    logged = {line["step"]: line for line in _lines(run) if "loss" in line}
    assert sorted(logged) == list(range(1, 21))
    for step, line in logged.items():
        is_before = step <= good
        rate = RATES[kind] * (step - 1) / 20 * (1.0 if is_before else 0.002)
        assert line["learning_rate"] == pytest.approx(rate), step
        weight = 0.2 * math.sin(math.pi / 2 * (step - 1) / 20) * (1.0 if is_before else 0.5)
        assert line["lambda0"] == pytest.approx(weight), step
    assert max(line["eval_base_kl"] for line in _lines(run) if "eval_base_kl" in line) <= 0.02


def test_where_nothing_is_good_training_begins_again(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        *OPTIONS, "train.trainer.learning_rate=5.0", "train.trainer.max_steps=3",
        "train.medusa2.guard={max_kl: 0.02, patience: 1, num_rollbacks: 3, "
        "lower_learning_rate_by: 0.0001}",
    ]  # fmt: skip
    loaded = write_recipe(tmp_path, base=base, rows=cyclic_rows(16), overrides=options)
    run = run_pipeline(loaded, only="train")
    assert "training goes back to its start" in capsys.readouterr().err
    first, *others = _record(run)["rollbacks"]
    assert (first["from_step"], first["to_step"], others) == (1, 0, [])
    assert [line["step"] for line in _lines(run) if "loss" in line] == [1, 2, 3]
    assert next(line["learning_rate"] for line in _lines(run) if "loss" in line) < 0.001


def test_a_run_that_fails_again_ends_at_the_last_good_checkpoint(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guard = "{max_kl: 0.02, patience: 2, num_rollbacks: 2, lower_learning_rate_by: 1.0}"
    run = _run(tmp_path, base, "lora", guard, rate=1.0)
    said = capsys.readouterr().err
    record = _record(run)
    assert said.count("training goes back to step") == len(record["rollbacks"]) == 2
    assert said.count("for 2 evaluations in a row: training stops") == 1
    # The second lowering is of what the first left.
    factors = [rollback["head_loss_factor"] for rollback in record["rollbacks"]]
    assert factors == [0.5, 0.25]
    checkpoint = run.checkpoints / record["result"]
    ours = load_file(run.heads / "medusa_lm_head.safetensors")
    theirs = load_file(checkpoint / "medusa_lm_head.safetensors")
    assert all(ours[name].equal(theirs[name]) for name in ours | theirs)


def test_without_a_good_checkpoint_and_a_rollback_left_it_is_an_error(
    tmp_path: Path, base: Path
) -> None:
    guard = "{max_kl: 1e-9, patience: 1, num_rollbacks: 1}"
    # The first step of a warm-up changes nothing, so its checkpoint would be a good one.
    steps = ("train.trainer.eval_steps=2", "train.trainer.save_steps=2")
    with pytest.raises(MedusaTrainError, match="no checkpoint is from before that"):
        _run(tmp_path, base, "lora", guard, *steps)
    assert len(read_rollbacks(tmp_path / "run" / "checkpoints")) == 1


@pytest.mark.parametrize("step", [0, 4])
def test_a_loss_that_is_not_finite_goes_back_too(tmp_path: Path, base: Path, step: int) -> None:
    trainer, workspace = trainer_of(
        tmp_path, base, cyclic_rows(16), *OPTIONS[2:], "data.eval_fraction=0.3",
        "train.medusa2.guard={max_kl: 1.0, num_rollbacks: 1}", "train.trainer.eval_steps=2",
        "train.trainer.save_steps=2", "train.trainer.max_steps=12",
        "train.medusa2.head_loss_schedule=constant",
    )  # fmt: skip
    trainer.add_callback(Break(trainer, step))
    trainer.fit()
    assert trainer.guard is not None
    assert trainer.guard.rolls_back
    trainer.guard.roll_back(workspace.run.checkpoints)
    [rollback] = read_rollbacks(workspace.run.checkpoints)
    assert rollback == Rollback(step + 1, step, None, 0.5, 0.5)


class _SaveAt(TrainerCallback):
    """Saves after steps as an interrupt does, unevaluated, and notes what there is after it."""

    def __init__(self, steps: set[int], directory: Path) -> None:
        self.steps = steps
        self.directory = directory
        self.seen: dict[int, list[str]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, kwargs
        control.should_save = control.should_save or state.global_step in self.steps

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, control, kwargs
        names = sorted(path.name for path in self.directory.glob("checkpoint-*"))
        self.seen[state.global_step] = names


def test_the_last_good_checkpoint_is_kept(tmp_path: Path, base: Path) -> None:
    trainer, workspace = trainer_of(
        tmp_path, base, cyclic_rows(16), *OPTIONS[2:], "data.eval_fraction=0.3",
        "train.medusa2.guard={max_kl: 1.0}", "train.trainer.eval_steps=3",
        "train.trainer.save_steps=3", "train.trainer.max_steps=6",
        "train.trainer.save_total_limit=1",
    )  # fmt: skip
    saving = _SaveAt({4, 5}, workspace.run.checkpoints)
    trainer.add_callback(saving)
    trainer.fit()
    assert saving.seen[3] == ["checkpoint-3"]
    assert saving.seen[5] == ["checkpoint-3", "checkpoint-4", "checkpoint-5"]
    assert saving.seen[6] == ["checkpoint-6"]


def _guard(**values: Any) -> Guard:
    return Guard(max_kl=0.1, lower_by=0.5, patience=3, **values)


def _checkpoint(directory: Path, step: int, guard: Guard) -> Path:
    path = directory / f"checkpoint-{step}"
    path.mkdir(parents=True)
    guard.save(path)
    return path


def test_what_an_interrupt_saved_behind_the_good_one_is_removed(tmp_path: Path) -> None:
    guard = _guard(num_rollbacks=2)
    for step in (4, 6):
        _checkpoint(tmp_path, step, guard)
    (tmp_path / ".undone-checkpoint-9").mkdir()
    add_rollback(tmp_path, Rollback(8, 4, 0.3, 0.5, 0.5))
    remove_undone(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-4", ROLLBACKS_FILE]
    guard.restore(tmp_path, checkpoint=tmp_path / "checkpoint-4")
    _checkpoint(tmp_path, 6, guard)
    # Half removed when this one was written.
    (tmp_path / "checkpoint-5").mkdir()
    remove_undone(tmp_path)
    assert (tmp_path / "checkpoint-6").exists()


def test_a_run_that_is_resumed_after_a_rollback_knows_it(tmp_path: Path) -> None:
    first = _guard(num_rollbacks=3)
    first.factor = 0.25
    good = _checkpoint(tmp_path, 4, first)
    add_rollback(tmp_path, Rollback(8, 4, None, 0.125, 0.5))
    guard = _guard(num_rollbacks=3)
    guard.restore(tmp_path, checkpoint=good)
    assert (guard.factor, guard.learning_rate_factor, guard.num_rolled_back) == (0.125, 0.5, 1)
    later = _checkpoint(tmp_path, 6, guard)
    assert json.loads((later / GUARD_FILE).read_text())["num_rollbacks"] == 1
    again = _guard(num_rollbacks=3)
    again.restore(tmp_path, checkpoint=later)
    assert (again.factor, again.learning_rate_factor, again.num_rolled_back) == (0.125, 0.5, 1)


def test_a_checkpoint_of_before_there_were_rollbacks(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-4"
    path.mkdir()
    (path / GUARD_FILE).write_text('{"factor": 0.5, "num_above": 1, "good_step": 3}')
    guard = _guard()
    guard.restore(tmp_path, checkpoint=path)
    assert (guard.factor, guard.num_above, guard.good_step) == (0.5, 1, 3)
    assert (guard.learning_rate_factor, guard.num_rolled_back) == (1.0, 0)


def test_the_learning_rates_that_come_are_lowered_too() -> None:
    """As if the optimizer had begun with them."""
    rates = []
    for scale in (None, 0.25):
        parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
        start = 1.0 if scale else 0.25
        groups = [{"params": [p], "lr": start * (n + 1)} for n, p in enumerate(parameters)]
        optimizer = torch.optim.SGD(groups)
        scheduler = LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        seen = []
        for step in range(4):
            if scale is not None and step == 2:
                scale_learning_rates(optimizer, scheduler, by=scale)
            seen.append([group["lr"] for group in optimizer.param_groups])
            assert scheduler.get_last_lr() == seen[-1]
            optimizer.step()
            scheduler.step()
        rates.append(seen)
    lowered, scaled = rates
    assert scaled[:2] == [[4 * rate for rate in rates] for rates in lowered[:2]]
    assert scaled[2:] == lowered[2:]


def test_new_keys_at_their_defaults_leave_older_runs_what_they_are(
    tmp_path: Path, base: Path
) -> None:
    def fingerprint(guard: str) -> str | None:
        overrides = [*OPTIONS, f"train.medusa2.guard={guard}"]
        loaded = write_recipe(tmp_path, base=base, rows=cyclic_rows(4), overrides=overrides)
        return fingerprint_of("train", Workspace(loaded))

    plain = fingerprint("{max_kl: 0.1}")
    assert fingerprint("{max_kl: 0.1, num_rollbacks: 0}") == plain
    assert fingerprint("{max_kl: 0.1, num_rollbacks: 1}") != plain
    assert fingerprint("{max_kl: 0.2}") != plain
