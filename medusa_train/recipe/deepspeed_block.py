"""What ``deepspeed`` may say: a DeepSpeed configuration, or the JSON file that holds one.

What the Trainer's arguments decide too is filled in from them (``auto``), so that it is said once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from medusa_train.errors import InputError
from medusa_train.recipe.yaml_reader import show

FROM_TRAINER: Mapping[str, str] = {
    "train_batch_size": "per_device_train_batch_size",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
}
"""Keys whose value is the Trainer's, with the argument that sets it."""

_REFUSED: Mapping[str, str] = {
    "optimizer": "set train.trainer.optim and its arguments instead",
    "scheduler": "set train.trainer.lr_scheduler_type instead",
    "fp16": "heads have float32 weights; set train.compute_dtype, or bf16",
    "amp": "heads have float32 weights; set train.compute_dtype, or bf16",
}
STAGES = (0, 1, 2, 3)


def read_deepspeed(value: str | Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's ``deepspeed``, complete: the Trainer's own values are ``auto``.

    Raises:
        InputError: the file cannot be read, or is no JSON object.
    """
    config = _read(Path(value)) if isinstance(value, str) else dict(value)
    return {**dict.fromkeys(FROM_TRAINER, "auto"), "zero_optimization": {"stage": 0}, **config}


def zero_stage(config: Mapping[str, Any]) -> int:
    """The ZeRO stage of a complete configuration."""
    return int(config["zero_optimization"].get("stage", 0))


def check_deepspeed(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and the mistake of every key that is wrong."""
    for name, value in config.items():
        if name in _REFUSED and not _is_off(value):
            yield name, f"may not be set here: {_REFUSED[name]}"
        elif name in FROM_TRAINER and value != "auto":
            argument = FROM_TRAINER[name]
            yield name, f"must be auto, and is train.trainer.{argument}; got {show(value)}"
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else None
    if stage not in STAGES or isinstance(stage, bool):
        got = show(zero if stage is None else stage)
        yield "zero_optimization", f"must be a section with a stage of 0, 1, 2 or 3; got {got}"


def _is_off(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("enabled") is False


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InputError(f"{path}: cannot be read: {reason}") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from error
    if not isinstance(config, dict):
        raise InputError(f"{path}: must hold one JSON object; got {show(config)}")
    return config
