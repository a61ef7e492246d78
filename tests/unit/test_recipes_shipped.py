"""The recipes that ship: all load, each has its header, their values are the published ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from medusa_train.recipe.load import load_recipe

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
NAMES = [
    "llama3.1-8b-medusa2",
    "llama3.1-8b",
    "mistral7b",
    "qwen3-8b-medusa2",
    "qwen3-8b",
    "smollm2-135m-hour",
    "smollm2-135m-medusa2",
    "smollm2-135m",
    "vicuna13b-medusa2",
    "vicuna13b",
    "vicuna33b-medusa2",
    "vicuna33b",
    "vicuna7b-medusa2",
    "vicuna7b",
    "zephyr7b-medusa2",
    "zephyr7b",
]


def test_none_is_missing_and_none_is_left_out():
    assert [path.stem for path in RECIPES] == NAMES


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_it_loads_and_says_what_it_is(path):
    loaded = load_recipe(path)
    assert [line for line in loaded.missing if "sharegpt.json" not in line] == []
    header = path.read_text(encoding="utf-8").split("\n\n")[0]
    for label in ("What", "Hardware", "Command", "Measured"):
        assert f"# {label}:" in header
    assert f"medusa-train run recipes/{path.name}" in header


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_values_are_the_published_ones(path):
    recipe = load_recipe(path).recipe
    assert recipe.train.head_loss_decay == 0.8
    assert recipe.train.trainer["lr_scheduler_type"] == "cosine"
    if path.stem.endswith("-medusa2"):
        return
    if path.stem.startswith("smollm2"):
        assert recipe.heads.num_heads == 4
        return
    assert (recipe.heads.num_heads, recipe.heads.num_layers) == (5, 1)
    assert recipe.train.trainer["num_train_epochs"] == 2
    if path.stem.startswith("vicuna"):
        assert recipe.train.trainer["learning_rate"] == 1e-3
    else:
        assert recipe.train.trainer["learning_rate"] == 2e-3
        assert recipe.train.trainer["warmup_steps"] == 40


@pytest.mark.parametrize("path", [p for p in RECIPES if "medusa2" in p.stem], ids=lambda p: p.stem)
def test_the_values_of_joint_training_are_the_published_ones(path):
    recipe = load_recipe(path).recipe
    joint = recipe.train.joint
    assert joint is not None
    assert joint.lora is not None
    assert joint.base_loss == "kl"
    assert joint.guard is not None
    assert f"medusa-train merge runs/{path.stem} " in path.read_text(encoding="utf-8")
    if path.stem.startswith("smollm2"):
        # Not published: few small steps after a warm-up, as docs/experiments.md found them.
        assert joint.warm_up is not None
        assert (joint.lora.rank, joint.head_loss_weight, joint.head_lr_multiplier) == (
            32,
            0.05,
            0.15,
        )
        return
    assert (joint.lora.rank, joint.lora.alpha, joint.lora.dropout) == (32, 16.0, 0.05)
    assert (joint.head_loss_schedule, joint.head_lr_multiplier) == ("sine", 4.0)
    if path.stem.startswith("vicuna"):
        assert joint.warm_up is not None
        assert joint.head_loss_weight == 0.2
    else:
        assert joint.warm_up is None
        assert joint.head_loss_weight == 0.01
        assert recipe.train.trainer["learning_rate"] == 1e-4
