"""The recipe's key ``deepspeed``: what it may hold, and what is said of the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from medusa_train.errors import InputErrors
from medusa_train.recipe.deepspeed_block import read_deepspeed, zero_stage
from medusa_train.recipe.load import load_recipe

CONFIGS = sorted((Path(__file__).parents[2] / "recipes" / "deepspeed").glob("*.json"))
DATA = {"base_model": {"name_or_path": "base"}, "data": {"path": "data"}}


def _load(directory: Path, deepspeed: Any, **more: Any) -> list[str]:
    """The mistakes of a recipe with this key."""
    path = directory / "x.yaml"
    path.write_text(yaml.safe_dump({**DATA, "deepspeed": deepspeed, **more}), encoding="utf-8")
    try:
        load_recipe(path)
    except InputErrors as error:
        return [line.replace(str(directory), "DIR") for line in error.lines]
    return []


def test_every_shipped_configuration_is_right(tmp_path: Path) -> None:
    names = ["zero1", "zero2", "zero2_offload", "zero3", "zero3_nvme", "zero3_offload"]
    assert [path.stem for path in CONFIGS] == names
    for path in CONFIGS:
        assert _load(tmp_path, str(path)) == []
        assert zero_stage(read_deepspeed(str(path))) == int(path.stem[4])


def test_a_configuration_inside_the_recipe(tmp_path: Path) -> None:
    assert _load(tmp_path, {"zero_optimization": {"stage": 2}}) == []
    assert zero_stage(read_deepspeed({})) == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"optimizer": {"type": "AdamW"}}, "optimizer: may not be set here: set train.trainer."
         "optim and its arguments instead"),
        ({"scheduler": {}}, "scheduler: may not be set here: set train.trainer.lr_scheduler_type "
         "instead"),
        ({"fp16": {"enabled": True}}, "fp16: may not be set here: heads have float32 weights; set "
         "train.compute_dtype, or bf16"),
        ({"gradient_clipping": 0.5}, "gradient_clipping: must be auto, and is "
         "train.trainer.max_grad_norm; got 0.5"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization: must be a section with a stage "
         "of 0, 1, 2 or 3; got 4"),
        ({"zero_optimization": 2}, "zero_optimization: must be a section with a stage of 0, 1, 2 "
         "or 3; got 2"),
    ],
)  # fmt: skip
def test_mistakes_are_the_same_in_a_file(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    (inside,) = _load(tmp_path, config)
    assert inside.partition(": deepspeed.")[2] == message
    (tmp_path / "ds.json").write_text(json.dumps(config), encoding="utf-8")
    (in_file,) = _load(tmp_path, "ds.json")
    assert in_file == f"DIR/x.yaml:5: deepspeed: DIR/ds.json: {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "DIR/ds.json:1: not valid JSON: Expecting property name enclosed in double quotes"),
        ("[]", "DIR/ds.json: must hold one JSON object; got a list"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "ds.json").write_text(text, encoding="utf-8")
    assert _load(tmp_path, "ds.json") == [f"DIR/x.yaml:5: deepspeed: {message}"]


def test_a_value_of_another_type(tmp_path: Path) -> None:
    (line,) = _load(tmp_path, 3)
    assert line == "DIR/x.yaml:5: deepspeed: must be text or a section of keys and values; got 3"


def test_the_cpu_is_not_asked_for_twice(tmp_path: Path) -> None:
    trainer = {"trainer": {"use_cpu": True}}
    (line,) = _load(tmp_path, {"zero_optimization": {"stage": 1}}, train=trainer)
    assert line.endswith(
        "train.trainer.use_cpu: excludes deepspeed; hide the accelerators instead "
        "(CUDA_VISIBLE_DEVICES=)"
    )


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump({**DATA, "deepspeed": "no.json"}), encoding="utf-8")
    missing = [line for line in load_recipe(path).missing if "deepspeed" in line]
    assert missing == [
        f"{path}:5: deepspeed: no such file; looked for 'no.json' and '{tmp_path / 'no.json'}'"
    ]
