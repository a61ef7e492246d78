"""Base and heads in one directory, as the original implementation saves both (format D)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from medusa_train.errors import InputError
from medusa_train.export import fasterdecoding
from medusa_train.export.format_a import write_choices, write_safetensors
from medusa_train.export.source import HeadTensors, ServeOptions, Written
from medusa_train.heads.checkpoint import CONFIG_FILE
from medusa_train.json_values import read_json
from medusa_train.run_dir import write_json

ENGINE = "FasterDecoding/Medusa"
PREFIX = "medusa_head."
INDEX_FILE = "model.safetensors.index.json"


def check(heads: HeadTensors, options: ServeOptions) -> None:
    """Raise InputError for what the engine cannot load."""
    fasterdecoding.check_model(heads, options, engine=ENGINE)


def write(
    heads: HeadTensors,
    directory: Path,
    options: ServeOptions,
    *,
    base_config: Path,
    base_weights: Sequence[Path],
) -> Written:
    """Write the base's shards, one shard of heads, and an index of all of them.

    Args:
        heads: full ones.
        directory: where to.
        options: the tree, and the directory's name for the commands.
        base_config: the base's ``config.json``.
        base_weights: its shards.

    Raises:
        InputError: the base is not kept as safetensors.
    """
    if any(path.suffix != ".safetensors" for path in base_weights):
        raise InputError(
            f"{heads.base.name_or_path}: combined copies the base's safetensors files, and it has "
            f"{base_weights[0].name}; save it as safetensors first"
        )
    total = len(base_weights) + 1
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for number, path in enumerate(base_weights, start=1):
        name = f"model-{number:05d}-of-{total:05d}.safetensors"
        shutil.copyfile(path, directory / name)
        with safe_open(path, framework="pt") as file:
            weight_map |= dict.fromkeys(file.keys(), name)
        num_bytes += path.stat().st_size
    tensors = {PREFIX + name: value for name, value in heads.tensors.items()}
    name = f"model-{total:05d}-of-{total:05d}.safetensors"
    write_safetensors(directory / name, tensors)
    weight_map |= dict.fromkeys(tensors, name)
    num_bytes += sum(value.nbytes for value in tensors.values())
    write_json(
        directory / INDEX_FILE,
        {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(weight_map.items()))},
    )
    config: dict[str, Any] = read_json(base_config)
    config["medusa_num_heads"] = heads.config.num_heads
    config["medusa_num_layers"] = heads.config.num_layers
    config["base_model_name_or_path"] = heads.base.name_or_path
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_choices(directory, options)
    start = fasterdecoding.start_command(heads, options, directory=str(options.directory))
    fails = "TGI, vLLM and TensorRT-LLM fail on it: for them export base and heads apart"
    return Written(start, ("the engine decodes one prompt at a time", fails))
