"""The memory that a plan says is the memory that the processes use, on the real demo model."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
import yaml

from medusa_train.data.conversations import write_dataset
from medusa_train.planning import plan_recipe
from medusa_train.recipe.load import LoadedRecipe, load_recipe
from tests.e2e.processes import start
from tests.models_for_tests import make_model
from tests.training_for_tests import conversation

MODEL = Path(__file__).parents[2] / "models" / "SmolLM2-135M-Instruct"
MB = 2**20

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not MODEL.exists(), reason="run scripts/make_demo_model.py first"),
]


def _recipe(
    directory: Path,
    base: Path,
    *,
    num_heads: int,
    vocab_size: int | None,
    hidden_states: str = "cached",
) -> LoadedRecipe:
    """Thirty conversations of some hundred tokens, and a recipe that trains on them."""
    rng = random.Random(0)
    lengths = [rng.randint(200, 400) for _ in range(30)]
    rows = [
        conversation(rng.choices(range(17, 49_000), k=length), [(40, length)], name=f"row {n}")
        for n, length in enumerate(lengths)
    ]
    write_dataset(directory / "dataset", rows, manifest={"chat_template_hash": None})
    recipe = {
        "base_model": {"name_or_path": str(base), "dtype": "bfloat16"},
        "heads": {"num_heads": num_heads, "vocab_size": vocab_size},
        "data": {"path": str(directory / "dataset"), "max_length": 512, "eval_fraction": 0.0},
        "train": {
            "hidden_states": hidden_states,
            "compute_dtype": "bfloat16",
            "trainer": {"per_device_train_batch_size": 4, "max_steps": 3, "use_cpu": True},
        },
        "run_dir": str(directory / "run"),
    }
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return load_recipe(path)


def _peak(directory: Path, stage: str) -> int:
    """Bytes that the stage's process had in memory at its worst."""
    log = directory / "log"
    arguments = ["run", str(directory / "recipe.yaml"), "--only", stage]
    process = start("train", arguments, log=log)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, log.read_text()
    return usage.ru_maxrss * 1024


def _without_tensors(directory: Path) -> LoadedRecipe:
    """A base of 32 hidden units with the real tokenizer, and one head of 16 tokens."""
    base = directory / "base"
    make_model(vocab_size=49_152, tied=True).save_pretrained(base)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL / name, base)
    # Online: base and heads in one process.
    return _recipe(directory, base, num_heads=1, vocab_size=16, hidden_states="online")


def test_predicted_peaks_are_those_of_the_processes(tmp_path: Path) -> None:
    """Python, the libraries and the tokenizer are measured apart and taken off."""
    small, real = tmp_path / "small", tmp_path / "real"
    small.mkdir()
    real.mkdir()
    _without_tensors(small)
    libraries = _peak(small, "train")
    loaded = _recipe(real, MODEL, num_heads=2, vocab_size=None)
    estimate = plan_recipe(loaded, devices=1, with_benchmark=False)
    assert estimate.caching is not None
    predicted = {"hidden-states": estimate.caching.total, "train": estimate.training[0].total}
    for stage, expected in predicted.items():
        measured = _peak(real, stage) - libraries
        figures = (stage, expected / MB, measured / MB, libraries / MB)
        assert expected == pytest.approx(measured, rel=0.15), figures
