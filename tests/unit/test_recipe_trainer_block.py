"""The trainer block: the list is fresh, old names lead to new ones, ours are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from medusa_train.recipe.trainer_block import REFUSED, REMOVED, check_trainer, trainer_fields

ROOT = Path(__file__).parents[2]


def test_the_list_of_arguments_is_fresh():
    """On failure: `make docs` after an upgrade of transformers."""
    code = "import make_trainer_fields as m; print(m.render(), end='')"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "scripts",
        capture_output=True,
        text=True,
        check=True,
    )
    listed = ROOT / "medusa_train" / "recipe" / "trainer_fields.json"
    assert result.stdout == listed.read_text(encoding="utf-8")


def test_ours_are_refused_with_the_reason():
    ours = [
        "output_dir",
        "deepspeed",
        "report_to",
        "remove_unused_columns",
        "logging_nan_inf_filter",
    ]
    assert set(ours) <= REFUSED.keys()
    for name in REFUSED:
        (mistake,) = check_trainer({name: None})
        assert mistake == (name, f"may not be set here: {REFUSED[name]}")


def test_removed_names_are_gone_and_what_takes_their_place_exists():
    fields = trainer_fields()
    assert not REMOVED.keys() & fields.keys()
    for hint in REMOVED.values():
        if hint.startswith("did you mean '"):
            assert hint.split("'")[1].split(":")[0] in fields
        if "set it in " in hint:
            assert hint.removeprefix("set it in ") in fields


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "warmup_ratio",
            0.1,
            "transformers 5 has no such argument; did you mean 'warmup_steps'? A value below 1 is "
            "a share of all steps",
        ),
        ("lerning_rate", 1, "unknown key; did you mean 'learning_rate'?"),
        ("zzz", 1, "unknown key; see TrainingArguments"),
        ("output_di", 1, "unknown key; see TrainingArguments"),  # never a name that is refused
        ("learning_rate", "fast", "must be a number; got 'fast'"),
        ("learning_rate", True, "must be a number; got true"),
        ("max_steps", 3.0, "must be a whole number; got 3.0"),
        ("bf16", "yes", "must be true or false; got 'yes'"),
        ("save_total_limit", "2", "must be a whole number or null; got '2'"),
        ("lr_scheduler_kwargs", [1], "must be a section or null or text; got a list"),
        ("eval_strategy", "yes", "must be one of no, steps, epoch; got 'yes'"),
        ("eval_strategy", None, "must be text; got null"),
    ],
)
def test_a_wrong_argument(name, value, message):
    ((key, got),) = check_trainer({name: value})
    assert key == name
    assert got.startswith(message)


def test_right_arguments():
    block = {
        "learning_rate": 1,
        "warmup_steps": 0.1,
        "max_steps": 4,
        "eval_strategy": "no",
        "lr_scheduler_type": "cosine",
        "lr_scheduler_kwargs": {"num_cycles": 1},
        "save_total_limit": None,
        "use_cpu": True,
        "optim_target_modules": ["a"],
    }
    assert list(check_trainer(block)) == []
