"""A base model that training has changed, as files: a plain model, or adapters that peft reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from medusa_train.base_model.adapters import CONFIG_FILE, WEIGHTS_FILE
from medusa_train.base_model.fingerprint import base_fingerprint
from medusa_train.errors import InputError
from medusa_train.json_values import fingerprint, read_json
from medusa_train.run_dir import RunDir, file_fingerprint

_ADAPTER_WEIGHTS = (WEIGHTS_FILE, "adapter_model.bin")


def changed_directory(run: RunDir) -> Path | None:
    """The changed base of a run: its adapters, or else its whole model; None: there is neither."""
    for directory, file in ((run.adapters, CONFIG_FILE), (run.base, "config.json")):
        if (directory / file).exists():
            return directory
    return None


def is_adapters(directory: Path) -> bool:
    """Whether it holds adapters rather than a model."""
    return (directory / CONFIG_FILE).exists()


def changed_fingerprint(directory: Path) -> str:
    """The fingerprint of a changed model's files.

    Raises:
        InputError: it is neither a model nor adapters.
    """
    if not is_adapters(directory):
        return base_fingerprint(str(directory))
    config = {k: v for k, v in adapter_config(directory).items() if not k.endswith("_path")}
    weights = [directory / name for name in _ADAPTER_WEIGHTS if (directory / name).exists()]
    if not weights:
        raise InputError(f"{directory}: no {_ADAPTER_WEIGHTS[0]} in it, so it has no adapters")
    return fingerprint({"config": config, "weights": file_fingerprint(weights[0])})


def named_base(directory: Path) -> str | None:
    """The base model that adapters name; None for a plain model."""
    if not is_adapters(directory):
        return None
    name = adapter_config(directory).get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


def check_changed(directory: Path) -> None:
    """Refuse what is no changed model, before weights are loaded.

    Raises:
        InputError: no such directory, or nothing in it.
    """
    if not directory.is_dir():
        raise InputError(
            f"{directory}: no such directory; give a model's, or one of adapters that peft reads"
        )
    changed_fingerprint(directory)


def adapter_config(directory: Path) -> dict[str, Any]:
    """What peft wrote of the adapters.

    Raises:
        InputError: it is missing or no JSON object.
    """
    path = directory / CONFIG_FILE
    config = read_json(path)
    if not isinstance(config, dict):
        raise InputError(f"{path}: must be a JSON object, got {type(config).__name__}")
    return config
