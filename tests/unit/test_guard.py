"""The guard on the held-out divergence, in whole runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from medusa_train.errors import MedusaTrainError
from medusa_train.pipeline import run_pipeline
from medusa_train.train.guard import Guard
from medusa_train.train.trainer import HeadsTrainer
from medusa_train.trained_base import load_trained_base
from tests.models_for_tests import save_base
from tests.training_for_tests import cyclic_rows, write_recipe
from tests.unit.test_joint_training import trainer_of

OPTIONS = [
    "train.method=medusa2",
    "train.hidden_states=online",
    "train.medusa2.lora.rank=4",
    "train.trainer.eval_strategy=steps",
    "train.trainer.eval_steps=1",
    "train.trainer.save_steps=1",
    "train.trainer.max_steps=20",
    "train.trainer.lr_scheduler_type=linear",
]
# The rate grows far too high, step by step.
ABSURD = ["train.trainer.learning_rate=1.0", "train.trainer.warmup_steps=20"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


def test_an_absurd_rate_stops_at_the_last_good_checkpoint(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guard = "train.medusa2.guard={max_kl: 0.02, patience: 2}"
    loaded = write_recipe(
        tmp_path, base=base, rows=cyclic_rows(16), overrides=[*OPTIONS, *ABSURD, guard]
    )
    run = run_pipeline(loaded)
    said = capsys.readouterr().err
    assert "above train.medusa2.guard.max_kl 0.02" in said
    assert "the heads' weight is lowered to 0.5 of the recipe's" in said
    assert "for 2 evaluations in a row: training stops" in said
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    seen = {line["step"]: line["eval_base_kl"] for line in lines if "eval_base_kl" in line}
    good = max(step for step, value in seen.items() if value <= 0.02)
    assert max(seen) == good + 2 < 20
    record = json.loads(run.manifest.read_text())["stages"]["train"]
    assert record["result"] == f"checkpoint-{good}"
    saved = sorted(path.name for path in run.checkpoints.glob("checkpoint-*"))
    assert f"checkpoint-{good}" in saved
    assert f"checkpoint-{good + 1}" not in saved
    checkpoint = run.checkpoints / f"checkpoint-{good}"
    for result, part in (
        (run.heads, "medusa_lm_head.safetensors"),
        (run.adapters, "adapter_model.safetensors"),
    ):
        source = checkpoint if result == run.heads else checkpoint / "adapters"
        ours, theirs = load_file(result / part), load_file(source / part)
        assert all(ours[name].equal(theirs[name]) for name in ours | theirs)
    load_trained_base(run.heads)
    assert (run.report / "heads_accuracy.json").exists()


class Break(TrainerCallback):
    """Makes a weight no number before the step after ``step``."""

    def __init__(self, trainer: HeadsTrainer, step: int) -> None:
        self.trainer = trainer
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        del args, control, kwargs
        if state.global_step == self.step:
            with torch.no_grad():
                next(self.trainer.module.heads.parameters()).fill_(float("nan"))


@pytest.mark.parametrize("step", [0, 4])
def test_a_loss_that_is_not_finite_ends_at_the_last_good_checkpoint(
    tmp_path: Path, base: Path, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, workspace = trainer_of(
        tmp_path, base, cyclic_rows(16), *OPTIONS[2:], "data.eval_fraction=0.3",
        "train.medusa2.guard={max_kl: 1.0}", "train.trainer.eval_steps=2",
        "train.trainer.save_steps=2", "train.trainer.max_steps=12",
        "train.medusa2.head_loss_schedule=constant",
    )  # fmt: skip
    trainer.add_callback(Break(trainer, step))
    if step == 0:
        with pytest.raises(MedusaTrainError, match="the loss is not finite at step 1"):
            trainer.fit()
        return
    trainer.fit()
    assert trainer.state.global_step == 5
    assert trainer.guarded_checkpoint() == workspace.run.checkpoints / "checkpoint-4"
    assert "the loss is not finite at step 5" in capsys.readouterr().err
    lines = [json.loads(line) for line in workspace.run.metrics.read_text().splitlines()]
    assert max(line["step"] for line in lines if "loss" in line) == 4
    assert all(math.isfinite(value) for line in lines for value in line.values())


def test_no_good_checkpoint_is_an_error(tmp_path: Path, base: Path) -> None:
    guard = "train.medusa2.guard={max_kl: 1e-9, patience: 2}"
    loaded = write_recipe(
        tmp_path,
        base=base,
        rows=cyclic_rows(16),
        overrides=[*OPTIONS, "train.trainer.learning_rate=0.1", guard],
    )
    with pytest.raises(MedusaTrainError, match="no checkpoint is from before that"):
        run_pipeline(loaded)


def test_below_the_limit_nothing_happens(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guard = "train.medusa2.guard={max_kl: 10.0}"
    loaded = write_recipe(
        tmp_path,
        base=base,
        rows=cyclic_rows(16),
        overrides=[*OPTIONS, guard, "train.trainer.max_steps=4"],
    )
    run = run_pipeline(loaded, only="train")
    assert "max_kl" not in capsys.readouterr().err
    record = json.loads(run.manifest.read_text())["stages"]["train"]
    assert "result" not in record
    assert record["steps"] == 4


def test_a_resumed_run_knows_what_the_guard_did(tmp_path: Path) -> None:
    guard = Guard(max_kl=0.1, lower_by=0.5, patience=3)
    guard.factor, guard.num_above, guard.good_step = 0.25, 2, 7
    checkpoint = tmp_path / "checkpoint-9"
    checkpoint.mkdir()
    guard.save(checkpoint)
    again = Guard(max_kl=0.1, lower_by=0.5, patience=3)
    again.restore(tmp_path, checkpoint=checkpoint)
    assert (again.factor, again.num_above, again.good_step) == (0.25, 2, 7)
