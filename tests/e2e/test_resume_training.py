"""Kill -9 during hidden states and training; the same command again gives the same heads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.processes import finish, kill_when
from tests.models_for_tests import save_base
from tests.training_for_tests import cyclic_rows, write_recipe

STEPS = 30
OVERRIDES = [
    f"train.trainer.max_steps={STEPS}",
    "train.trainer.save_steps=5",
    "train.trainer.lr_scheduler_type=cosine",
]


def _arguments(directory: Path) -> list[str]:
    options = [option for override in OVERRIDES for option in ("--set", override)]
    return ["run", str(directory / "recipe.yaml"), *options]


def _finish(directory: Path) -> None:
    finish("train", _arguments(directory), log=directory / "log")


def _kill_when(directory: Path, condition: Callable[[], bool]) -> bool:
    return kill_when(condition, "train", _arguments(directory), log=directory / "log")


def _logged_steps(directory: Path) -> list[int]:
    path = directory / "run" / "metrics.jsonl"
    if not path.exists():
        return []
    return [
        line["step"]
        for text in path.read_text().splitlines()
        if text.endswith("}") and "loss" in (line := json.loads(text))
    ]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base, and a run on it that nothing interrupted."""
    directory = tmp_path_factory.mktemp("straight")
    base = save_base(tmp_path_factory.mktemp("base"))
    write_recipe(directory, base=base, rows=cyclic_rows(40))
    _finish(directory)
    return base, directory


def _heads(directory: Path) -> bytes:
    return (directory / "run" / "heads" / "medusa_lm_head.safetensors").read_bytes()


@pytest.mark.parametrize("moments", [[7], [12, 13], [1, 16, 29]])
def test_killed_training_gives_the_same_heads(
    tmp_path: Path, straight: tuple[Path, Path], moments: list[int]
) -> None:
    base, expected = straight
    write_recipe(tmp_path, base=base, rows=cyclic_rows(40))
    for moment in moments:
        assert _kill_when(tmp_path, lambda m=moment: max(_logged_steps(tmp_path), default=0) >= m)
    _finish(tmp_path)
    assert _heads(tmp_path) == _heads(expected)
    assert _logged_steps(tmp_path) == _logged_steps(expected) == list(range(1, STEPS + 1))


def test_kill_in_the_middle_of_a_checkpoint(tmp_path: Path, straight: tuple[Path, Path]) -> None:
    base, expected = straight
    write_recipe(tmp_path, base=base, rows=cyclic_rows(40))
    staging = tmp_path / "run" / "checkpoints" / ".partial" / "checkpoint-10"
    assert _kill_when(tmp_path, staging.exists)
    _finish(tmp_path)
    assert _heads(tmp_path) == _heads(expected)


def test_kill_while_hidden_states_are_written(tmp_path: Path, straight: tuple[Path, Path]) -> None:
    base, expected = straight
    write_recipe(tmp_path, base=base, rows=cyclic_rows(40))
    cache = tmp_path / "run" / "hidden_states" / "train"
    assert _kill_when(tmp_path, (cache / "manifest.json").exists)
    _finish(tmp_path)
    assert _heads(tmp_path) == _heads(expected)


def test_a_finished_run_is_not_run_again(straight: tuple[Path, Path]) -> None:
    _, directory = straight
    before = (directory / "run" / "metrics.jsonl").read_bytes()
    begin = (directory / "log").stat().st_size
    _finish(directory)
    log = (directory / "log").read_text()[begin:]
    assert [line for line in log.splitlines() if "up to date" in line] == [
        "hidden-states: up to date",
        "train: up to date",
        "accuracy: up to date",
        "card: up to date",
    ]
    assert (directory / "run" / "metrics.jsonl").read_bytes() == before
