"""``train.medusa2``: what it takes, and every mistake that ties keys together."""

from __future__ import annotations

from pathlib import Path

import pytest

from medusa_train.errors import InputErrors
from medusa_train.recipe.load import dump_resolved, load_recipe

GOOD = """\
base_model:
  name_or_path: some/model
data:
  path: rows.jsonl
train:
  method: medusa2
  hidden_states: online
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "x.yaml"
    path.write_text(GOOD, encoding="utf-8")
    return path


def _mistakes(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(InputErrors) as caught:
        load_recipe(path, overrides)
    return list(caught.value.lines)


def test_defaults_are_adapters_and_the_divergence_from_the_original(recipe: Path) -> None:
    joint = load_recipe(recipe).recipe.train.joint
    assert joint is not None
    assert (joint.trained, joint.base_loss, joint.head_lr_multiplier) == ("lora", "kl", 4.0)
    assert load_recipe(recipe, ["train.method=medusa1"]).recipe.train.joint is None


def test_the_resolved_recipe_loads_as_the_same(recipe: Path, tmp_path: Path) -> None:
    sections = ["train.medusa2.warm_up={trainer: {max_steps: 3}}", "train.medusa2.lora.rank=8"]
    for overrides in ([], sections, ["train.method=medusa1"]):
        first = load_recipe(recipe, overrides).recipe
        again = tmp_path / "again.yaml"
        again.write_text(dump_resolved(first), encoding="utf-8")
        assert load_recipe(again).recipe == first


SELF = (
    "train.medusa2.teacher: would compare the model with itself: where its own weights are trained "
    "there are no adapters to switch off; set frozen_copy, or stored"
)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["train.medusa2.trained=full"], SELF),
        (["train.medusa2={trained: full, teacher: adapters_off}"], SELF),
        (
            [
                "train.medusa2={trained: full, base_loss: cross_entropy}",
                "train.soft_target_weight=0.5",
            ],
            SELF,
        ),
        (
            ["train.medusa2={trained: full, base_loss: cross_entropy, teacher: adapters_off}"],
            "train.medusa2.teacher: is for trained: lora; remove it",
        ),
        (
            ["train.medusa2.head_loss_schedule=cosine"],
            "train.medusa2.head_loss_schedule: must be one of constant, linear, sine; got 'cosine'",
        ),
        (
            ["train.hidden_states=cached"],
            "train.hidden_states: must be online for method: medusa2, whose base changes; cached "
            "is for a warm_up",
        ),
        (
            ["train.method=medusa1", "train.medusa2.trained=lora"],
            "train.medusa2: is for method: medusa2; set that, or remove the section",
        ),
        (
            ["train.method=medusa1", "train.trainer.gradient_checkpointing=true"],
            "train.trainer.gradient_checkpointing: is for method: medusa2; a frozen base keeps no "
            "activations",
        ),
        (
            ["train.medusa2={trained: last_layers, teacher: frozen_copy}"],
            "train.medusa2.num_last_layers: missing; it says how many layers are trained",
        ),
        (
            ["train.medusa2.num_last_layers=2"],
            "train.medusa2.num_last_layers: is for trained: last_layers; remove it",
        ),
        (
            ["train.medusa2={trained: full, teacher: frozen_copy, lora: {rank: 4}}"],
            "train.medusa2.lora: is for trained: lora; remove it",
        ),
        (
            ["train.medusa2.lora.untie_lm_head=true"],
            "train.medusa2.lora.untie_lm_head: is for lm_head: true",
        ),
        (
            ["train.medusa2={trained: full, teacher: frozen_copy}", "base_model.quantization=4bit"],
            "base_model.quantization: keeps weights that cannot be trained; set "
            "train.medusa2.trained: lora, or null",
        ),
        (
            ["base_model.gguf_file=x.gguf"],
            "base_model.gguf_file: cannot be trained by method: medusa2; save the model as "
            "safetensors and name it",
        ),
        (
            ["train.medusa2.guard={max_kl: 0.1}"],
            "train.medusa2.guard: needs train.trainer.eval_strategy: steps, or epoch",
        ),
        (
            [
                "train.medusa2.guard={max_kl: 0.1}",
                "train.trainer.eval_strategy=epoch",
                "data.eval_fraction=0",
            ],
            "train.medusa2.guard: needs held-out conversations; raise data.eval_fraction",
        ),
        (
            [
                "train.medusa2.guard={max_kl: 0.1}",
                "train.trainer={eval_strategy: epoch, save_strategy: best}",
            ],
            "train.medusa2.guard: needs checkpoints; set train.trainer.save_strategy: steps, or "
            "epoch",
        ),
        (
            [
                "train.medusa2.guard={max_kl: 0.1, lower_learning_rate_by: 0.1}",
                "train.trainer.eval_strategy=epoch",
            ],
            "train.medusa2.guard.lower_learning_rate_by: is for num_rollbacks; set that to 1 or "
            "more, or remove this",
        ),
        (
            ["train.medusa2.guard={max_kl: 0.1, num_rollbacks: -1}"],
            "train.medusa2.guard.num_rollbacks: must be at least 0; got -1",
        ),
        (
            ["train.medusa2.guard={}"],
            "train.medusa2.guard.max_kl: missing; there is no default",
        ),
        (
            ["train.medusa2.warm_up.trainer.evaluation_strategy=steps"],
            "train.medusa2.warm_up.trainer.evaluation_strategy: transformers 5 has no such "
            "argument; did you mean 'eval_strategy'?",
        ),
        (
            ["train.trainer.fsdp=true"],
            "train.trainer.fsdp: is for method: medusa1; set deepspeed instead",
        ),
        (
            ["train.medusa2.teacher=stored", "train.soft_target_weight=0.5"],
            "train.soft_target_weight: stored log-probabilities are for the base's loss alone; set "
            "it to 0",
        ),
        (
            ["data={distill: {num_prompts: 8}}", "train.medusa2.teacher=stored"],
            "train.medusa2.teacher: stored needs log-probabilities: set "
            "data.distill.teacher_top_n or teacher_samples",
        ),
    ],
)  # fmt: skip
def test_mistakes(recipe: Path, overrides: list[str], expected: str) -> None:
    assert any(line.endswith(f": {expected}") for line in _mistakes(recipe, *overrides))


def test_what_is_allowed(recipe: Path) -> None:
    for overrides in (
        ["train.medusa2={trained: full, teacher: frozen_copy}"],
        ["train.medusa2={trained: full, base_loss: cross_entropy}"],
        ["train.medusa2={trained: last_layers, num_last_layers: 2, teacher: stored}"],
        ["train.medusa2.warm_up={}", "train.hidden_states=cached", "data.packing=true"],
        ["train.trainer.gradient_checkpointing=true", "base_model.quantization=4bit"],
        [
            "train.medusa2.guard={max_kl: 0.1, num_rollbacks: 2, lower_learning_rate_by: 1.0}",
            "train.trainer.eval_strategy=epoch",
        ],
    ):
        assert load_recipe(recipe, overrides).recipe.train.method == "medusa2"
