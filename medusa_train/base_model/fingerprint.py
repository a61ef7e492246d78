"""Which base model is it? A fingerprint from its files, without loading the weights.

It covers the config without paths, the tensors' names, shapes and dtypes, and the first and last
MiB of each weights file: a conversion, another revision or a fine-tune of all weights changes it, a
copy does not, and neither does a change in the middle of a file alone.

A base that was trained with its heads has the fingerprint that its heads name, made from the
original's and from what was trained. A model that it was merged into keeps that in its config,
beside the fingerprint of its own files, without which it does not count.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from transformers.utils.hub import cached_file

from medusa_train.base_model.naming import check_name
from medusa_train.errors import InputError
from medusa_train.json_values import fingerprint, read_json

_SAMPLE_BYTES = 1 << 20
_PATH_KEYS = frozenset({"_name_or_path", "name_or_path"})
TRAINED_KEY = "medusa_train"
"""Key of a config that says what was merged into the model."""
_SINGLE_FILES = ("model.safetensors", "pytorch_model.bin")
OWN_CODE = (
    "it comes with code of its own, which runs only where base_model.trust_remote_code or "
    "--trust-remote-code says so; only for sources that you trust"
)
"""What to do where :func:`needs_its_code`."""


def base_fingerprint(
    name_or_path: str, *, gguf_file: str | None = None, revision: str | None = None
) -> str:
    """The fingerprint of a hub id, a local directory, or a GGUF file in either.

    Raises:
        InputError: no config or no weights are found there.
    """
    if gguf_file is not None:
        path = model_file(name_or_path, gguf_file, revision=revision)
        if path is None:
            raise InputError(f"{name_or_path}: no file {gguf_file} in it")
        return fingerprint({"gguf": _sample(path)})
    config_path = model_file(name_or_path, "config.json", revision=revision)
    if config_path is None:
        if not Path(name_or_path).exists():
            raise InputError(
                f"{name_or_path}: no such directory, and the hub gave no config.json for it; check "
                "the name and the network"
            )
        raise InputError(f"{name_or_path}: no config.json in it, so it is no model")
    config = _json_object(config_path)
    trained = config.pop(TRAINED_KEY, None)
    files = weight_files(name_or_path, revision=revision)
    found = fingerprint(
        {
            "config": {key: value for key, value in config.items() if key not in _PATH_KEYS},
            "weights": [[path.name, _header(path), _sample(path)] for path in files],
        }
    )
    is_untouched = isinstance(trained, dict) and trained.get("files_fingerprint") == found
    return str(trained["fingerprint"]) if is_untouched else found


def weight_files(name_or_path: str, *, revision: str | None = None) -> list[Path]:
    """The weights of a hub id or a local directory, shard after shard.

    Raises:
        InputError: there are none, or one is missing.
    """
    for single in _SINGLE_FILES:
        index = model_file(name_or_path, f"{single}.index.json", revision=revision)
        if index is not None:
            weight_map = _json_object(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise InputError(f"{index}: has no weight_map; fetch it again")
            shards = sorted(set(weight_map.values()))
            paths = [model_file(name_or_path, shard, revision=revision) for shard in shards]
            if None in paths:
                missing = shards[paths.index(None)]
                raise InputError(f"{name_or_path}: the weights file {missing} is missing")
            return [path for path in paths if path is not None]
        path = model_file(name_or_path, single, revision=revision)
        if path is not None:
            return [path]
    raise InputError(f"{name_or_path}: no {' or '.join(_SINGLE_FILES)} in it, so it has no weights")


def model_file(name_or_path: str, filename: str, *, revision: str | None = None) -> Path | None:
    """A file of a hub id or a local directory, or None where it has none of that name.

    Raises:
        InputError: no such directory, or the hub refuses the model.
    """
    check_name(name_or_path)
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
        size = path.stat().st_size
        if length > size:
            raise InputError(f"{path}: not a safetensors file")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            ends = [entry["data_offsets"][1] for entry in header.values()]
            shapes = {name: [entry["dtype"], entry["shape"]] for name, entry in header.items()}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise InputError(f"{path}: not a safetensors file") from error
    end = 8 + length + max(ends, default=0)
    if end > size:
        raise InputError(f"{path}: has {size:,} of its {end:,} bytes; fetch it again")
    return shapes


def _json_object(path: Path) -> dict[str, Any]:
    value = read_json(path)
    if not isinstance(value, dict):
        raise InputError(f"{path}: must be a JSON object, got {type(value).__name__}")
    return value


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
    if needs_its_code(error):
        return OWN_CODE
    return text.splitlines()[0] if text else type(error).__name__


def needs_its_code(error: Exception) -> bool:
    """Whether transformers refused a model because code that comes with it would have to run."""
    return "trust_remote_code=True" in str(error)
