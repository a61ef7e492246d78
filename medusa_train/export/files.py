"""Tensors and JSON out of a directory that anybody may have made: nothing in it is run or trusted.

A path has to stay in the directory, a safetensors header has to describe the file that it is in, a
pickle may hold tensors and nothing else, and every number has to be finite.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from medusa_train.errors import InputError
from medusa_train.json_values import read_json

_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_COUNT = 256
"""Heads of a set and layers of a head."""
_PICKLES = frozenset({".pt", ".bin", ".pth"})
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_BITS = {"BOOL": 8, "I8": 8, "U8": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16}
_BITS |= {"I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64}


def check_count(value: int, *, where: str) -> int:
    """``value``, the greatest head or layer that names speak of, where it is not absurd.

    Raises:
        InputError: it is beyond :data:`MAX_COUNT`.
    """
    if value > MAX_COUNT:
        raise InputError(
            f"{where}: names speak of {value:,} heads or layers; at most {MAX_COUNT} are read"
        )
    return value


def inside(directory: Path, name: str) -> Path:
    """The file ``name`` of ``directory``, which need not be there.

    Raises:
        InputError: the name or a link leads out of the directory. Links into the store of the
            hub's cache, which is made of them, are allowed.
    """
    path = directory / name
    root = directory.resolve()
    allowed = [root]
    if directory.parent.name == "snapshots":
        allowed.append(directory.parent.parent.resolve() / "blobs")
    resolved = path.resolve()
    if not any(resolved.is_relative_to(parent) for parent in allowed):
        raise InputError(
            f"{directory}: {name} leads out of the directory, to {resolved}; nothing there is read"
        )
    return path


def require_directory(directory: Path) -> None:
    """Raise InputError where there is no such directory."""
    if not directory.is_dir():
        raise InputError(f"{directory}: no such directory")


def read_config(directory: Path, name: str = "config.json") -> dict[str, Any]:
    """The JSON object in a file of ``directory``.

    Raises:
        InputError: it is not there, leads elsewhere, or is no JSON object.
    """
    path = inside(directory, name)
    try:
        value = read_json(path)
    except RecursionError as error:
        raise InputError(f"{path}: not valid JSON: nested too deeply") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: must be a JSON object, got {type(value).__name__}")
    return value


def weight_files(directory: Path) -> list[str]:
    """The names of all files of ``directory`` that may hold tensors, in the order of the names."""
    return sorted(
        path.name
        for path in directory.iterdir()
        if path.suffix in {".safetensors", *_PICKLES} and not path.name.startswith(".")
    )


def indexed_files(directory: Path, index: str) -> list[str]:
    """The weight files that an index names.

    Raises:
        InputError: it is no index, or names a file outside the directory.
    """
    weight_map = read_config(directory, index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise InputError(f"{directory / index}: has no weight_map; fetch it again")
    names = sorted(set(weight_map.values()))
    for name in names:
        inside(directory, name)
    return names


def tensor_names(directory: Path, name: str) -> list[str]:
    """The names of a file's tensors; of a safetensors file only the header is read."""
    path = inside(directory, name)
    if path.suffix == ".safetensors":
        return sorted(_checked_header(path))
    return sorted(_read_pickle(path))


def read_tensors(directory: Path, name: str, *, only: str | None = None) -> dict[str, Tensor]:
    """All tensors of a file, on the CPU.

    Args:
        directory: where the file is.
        name: of the file.
        only: a regular expression; other tensors are left out.

    Raises:
        InputError: the file is not there, damaged, holds more than tensors, or leads elsewhere.
    """
    path = inside(directory, name)
    wanted = re.compile(only or "")
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    if path.suffix in _PICKLES:
        return {key: value for key, value in _read_pickle(path).items() if wanted.match(key)}
    keys = [key for key in _checked_header(path) if wanted.match(key)]
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in keys}
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not a readable safetensors file: {error}") from error


def check_values(tensors: Mapping[str, Tensor], *, where: Path, integers: Iterable[str]) -> None:
    """Refuse numbers that are not finite, and tensors that are no plain weights.

    Args:
        tensors: by name.
        where: the file, for the message.
        integers: names that hold ids instead of weights.
    """
    for name, tensor in sorted(tensors.items()):
        if name in integers:
            if tensor.is_floating_point():
                raise InputError(f"{where}: {name}: must hold ids, got {tensor.dtype}")
        elif tensor.dtype not in _DTYPES:
            raise InputError(
                f"{where}: {name}: has dtype {tensor.dtype}; quantised heads are not read"
            )
        elif not tensor.isfinite().all():
            raise InputError(f"{where}: {name}: holds values that are not finite")


def _checked_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file, which must describe the bytes that are there."""
    size = path.stat().st_size if path.is_file() else 0
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, _MAX_HEADER_BYTES):
            raise InputError(
                f"{path}: not a safetensors file: its header claims {length:,} bytes of {size:,}"
            )
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            extents = {key: _extent(value) for key, value in header.items()}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{path}: not a safetensors file: its header is damaged") from error
    body = size - 8 - length
    for name, (start, end, needed) in extents.items():
        if not 0 <= start <= end <= body:
            raise InputError(
                f"{path}: {name}: claims bytes {start:,} to {end:,}, but the file holds {body:,}"
            )
        if needed is not None and needed != end - start:
            raise InputError(
                f"{path}: {name}: its shape needs {needed:,} bytes, but it has {end - start:,}"
            )
    return dict(header)


def _extent(entry: Any) -> tuple[int, int, int | None]:
    """Where a tensor begins and ends, and the bytes that its shape needs, where that is known."""
    start, end = entry["data_offsets"]
    count = 1
    for dim in entry["shape"]:
        count *= int(dim)
    bits = _BITS.get(entry["dtype"])
    return int(start), int(end), None if bits is None else count * bits // 8


def _read_pickle(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise InputError(f"{path}: no such file")
    try:
        with warnings.catch_warnings():
            # Of other pickle protocols, which restricted loading reads or refuses all the same.
            warnings.simplefilter("ignore", UserWarning)
            value = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise InputError(
            f"{path}: holds more than tensors, or is no file of torch; nothing in it was run"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError, LookupError, TypeError) as error:
        raise InputError(f"{path}: not a readable file of torch ({type(error).__name__})") from (
            error
        )
    is_state = isinstance(value, dict) and all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in value.items()
    )
    if not is_state:
        raise InputError(f"{path}: must hold tensors by their names")
    return dict(value)
