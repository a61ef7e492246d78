"""The generation configs that ship: all load, and each has its header."""

from __future__ import annotations

from pathlib import Path

import pytest

from medusa_train.recipe.load import load_distill_config

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "data_generation").rglob("*.yaml"))


def test_none_is_left_out() -> None:
    assert [path.stem for path in CONFIGS] == ["mixed-prompts", "served-8b", "smollm2-135m"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_loads_and_says_what_it_is(path: Path) -> None:
    assert load_distill_config(path).missing == ()
    header = path.read_text(encoding="utf-8").split("\n\n")[0]
    assert f"medusa-distill generate data_generation/{path.name}" in header
    assert f"`{path.name}`" in (ROOT / "data_generation" / "README.md").read_text()
