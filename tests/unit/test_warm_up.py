"""Two stages in one recipe: heads alone, then base and heads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from medusa_train.heads.checkpoint import load_heads
from medusa_train.pipeline import run_pipeline
from medusa_train.recipe.load import load_recipe
from tests.models_for_tests import save_base
from tests.training_for_tests import cyclic_rows, write_recipe

WARM = "train.medusa2.warm_up={trainer: {max_steps: 6, learning_rate: 0.02}}"


@pytest.mark.parametrize("hidden_states", ["cached", "online"])
def test_heads_alone_and_then_both(
    tmp_path: Path, hidden_states: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_base(tmp_path / "base")
    overrides = [
        "train.method=medusa2",
        f"train.hidden_states={hidden_states}",
        "train.medusa2.lora.rank=4",
        "train.trainer.learning_rate=0.0",
        "train.trainer.activation_checkpointing=true",  # of the second stage
        WARM,
    ]
    loaded = write_recipe(tmp_path, base=base, rows=cyclic_rows(24), overrides=overrides)
    run = run_pipeline(loaded)
    stages = json.loads(run.manifest.read_text())["stages"]
    assert ("hidden-states" in stages) == (hidden_states == "cached")
    lines = [json.loads(line) for line in run.warm_up.metrics.read_text().splitlines()]
    assert max(line["step"] for line in lines) == 6
    assert max(line["learning_rate"] for line in lines if "learning_rate" in line) == 0.02
    # Nothing was learnt after the warm-up, so its heads are the run's, on a base of its own.
    before, original = load_heads(run.warm_up.heads)
    after, trained = load_heads(run.heads)
    for name, tensor in before.state_dict().items():
        assert torch.equal(tensor, after.state_dict()[name])
    assert any(tensor.abs().max() > 1e-3 for tensor in before.state_dict().values())
    assert trained.trained is not None
    assert trained.trained.original_fingerprint == original.fingerprint

    # A joint stage that is made again takes the warm-up's heads, where it was cut after them.
    capsys.readouterr()
    (run.heads / "heads_spec.json").unlink()
    run_pipeline(loaded)
    assert "warm-up: done" in capsys.readouterr().err

    # The same from the heads of another run.
    second = load_recipe(
        tmp_path / "recipe.yaml",
        [
            *overrides[:-1],
            "train.hidden_states=online",
            f"heads.init_from={run.warm_up.heads}",
            f"run_dir={tmp_path / 'second'}",
        ],
    )
    other, _ = load_heads(run_pipeline(second, only="train").heads)
    for name, tensor in before.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
