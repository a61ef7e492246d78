"""Which base model is it? A fingerprint from its files, without loading the weights.

It covers the config without paths, the tensors' names, shapes and dtypes, and the first and last
MiB of each weights file: a fine-tune, a conversion or another revision changes it, a copy does not.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

from medusa_train.errors import InputError
from medusa_train.run_dir import fingerprint

_SAMPLE_BYTES = 1 << 20
_PATH_KEYS = frozenset({"_name_or_path", "name_or_path"})
_SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")


def base_fingerprint(
    name_or_path: str, *, gguf_file: str | None = None, revision: str | None = None
) -> str:
    """The fingerprint of a hub id, a local directory, or a GGUF file in either.

    Raises:
        InputError: no config or no weights are found there.
    """
    if gguf_file is not None:
        path = _file(name_or_path, gguf_file, revision=revision)
        if path is None:
            raise InputError(f"{name_or_path}: no file {gguf_file} in it")
        return fingerprint({"gguf": _sample(path)})
    config_path = _file(name_or_path, "config.json", revision=revision)
    if config_path is None:
        raise InputError(f"{name_or_path}: no config.json in it, so it is no model")
    config = json.loads(config_path.read_text(encoding="utf-8"))
    files = _weight_files(name_or_path, revision=revision)
    return fingerprint(
        {
            "config": {key: value for key, value in config.items() if key not in _PATH_KEYS},
            "weights": [[path.name, _header(path), _sample(path)] for path in files],
        }
    )


def _weight_files(name_or_path: str, *, revision: str | None) -> list[Path]:
    for single in _SINGLE_FILES:
        index = _file(name_or_path, f"{single}.index.json", revision=revision)
        if index is not None:
            shards = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
            paths = [_file(name_or_path, shard, revision=revision) for shard in shards]
            if None in paths:
                missing = shards[paths.index(None)]
                raise InputError(f"{name_or_path}: the weights file {missing} is missing")
            return [path for path in paths if path is not None]
        path = _file(name_or_path, single, revision=revision)
        if path is not None:
            return [path]
    raise InputError(f"{name_or_path}: no {' or '.join(_SINGLE_FILES)} in it, so it has no weights")


def _file(name_or_path: str, filename: str, *, revision: str | None) -> Path | None:
    try:
        path = cached_file(
            name_or_path,
            filename,
            revision=revision,
            _raise_exceptions_for_missing_entries=False,
        )
    except OSError as error:
        raise InputError(f"{name_or_path}: {first_line(error)}") from error
    return None if path is None else Path(path)


def _header(path: Path) -> Any:
    """Names, shapes and dtypes of a safetensors file; other files have no header to read safely."""
    if path.suffix != ".safetensors":
        return None
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise InputError(f"{path}: not a safetensors file")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {name: [entry["dtype"], entry["shape"]] for name, entry in header.items()}


def _sample(path: Path) -> str:
    """A hash of a file's size, its first and its last MiB."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(_SAMPLE_BYTES))
        file.seek(max(_SAMPLE_BYTES, size - _SAMPLE_BYTES))
        digest.update(file.read())
    return digest.hexdigest()


def first_line(error: Exception) -> str:
    """The first line of a library's message; its others are advice for that library's callers."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
