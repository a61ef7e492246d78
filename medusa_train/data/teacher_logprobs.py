"""A teacher's log-probabilities beside a data set: ``teacher_logprobs/`` with shards and an index.

A shard ``NNNNN.safetensors`` holds those of some consecutive rows: ``token_ids`` int32 [T, N] and
``logprobs`` float32 [T, N] (T: the tokens of all assistant spans of its rows, in order; N: kept per
token) and ``offsets`` int64 [rows + 1], where each row begins and the last one ends. Its metadata
name the rows. ``index.json`` comes last, so that its presence means complete.

Cutting a row (:func:`medusa_train.data.conversations.truncate`) cuts its spans from the end, so the
first entries of a row are those of the cut one.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from medusa_train.errors import InputError
from medusa_train.json_values import read_json
from medusa_train.run_dir import atomic_path, write_json

SCHEMA_VERSION = 1
TEACHER_DIRECTORY = "teacher_logprobs"
INDEX_FILE = "index.json"
MAX_SHARD_BYTES = 256 * 2**20
BYTES_PER_ENTRY = 8
# One key: safetensors writes several in any order, and equal rows must give equal bytes.
_METADATA = "teacher_logprobs"

Kind = Literal["top", "samples"]
Arrays = tuple[NDArray[np.int32], NDArray[np.float32]]


def num_bytes(num_tokens: int, num: int) -> int:
    """The size on disk of ``num`` entries for each of ``num_tokens``, but for headers."""
    return BYTES_PER_ENTRY * num_tokens * num


def encode(token_ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> str:
    """One row's arrays, both [T, N], as base64 text for a line of JSON."""
    _check_shapes(token_ids, logprobs)
    data = token_ids.astype("<i4").tobytes() + logprobs.astype("<f4").tobytes()
    return base64.b64encode(data).decode("ascii")


def decode(text: str, *, num: int) -> Arrays:
    """What :func:`encode` was given; ``num`` is N.

    Raises:
        ValueError: no such text, or not of N entries per token.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"teacher: no base64 text: {error}") from error
    if len(data) % num_bytes(1, num):
        raise ValueError(f"teacher: {len(data)} bytes are not {num} entries per token")
    half = len(data) // 2
    token_ids = np.frombuffer(data[:half], "<i4").astype(np.int32).reshape(-1, num)
    return token_ids, np.frombuffer(data[half:], "<f4").astype(np.float32).reshape(-1, num)


@dataclass(frozen=True, slots=True)
class _Shard:
    """A line of the index."""

    file: str
    num_rows: int
    num_tokens: int


class TeacherShardWriter:
    """Writes a directory row by row; keeps one shard in memory.

    What an earlier or unfinished writing left in ``directory`` is removed first.

    Args:
        directory: of the shards; made if needed.
        kind: ``top`` or ``samples``.
        num: N, entries per token.
        max_shard_bytes: a shard is not larger, unless a single row is.
    """

    def __init__(
        self, directory: Path, *, kind: Kind, num: int, max_shard_bytes: int = MAX_SHARD_BYTES
    ) -> None:
        self.directory = directory
        self.kind = kind
        self.num = num
        self.max_shard_bytes = max_shard_bytes
        self._shards: list[_Shard] = []
        self._row_ids: list[str] = []
        self._arrays: list[Arrays] = []
        self._num_tokens = 0
        self._seen: set[str] = set()
        (directory / INDEX_FILE).unlink(missing_ok=True)
        for path in directory.glob("[0-9]*.safetensors"):
            path.unlink()

    def add(
        self, row_id: str, *, token_ids: NDArray[np.int32], logprobs: NDArray[np.float32]
    ) -> None:
        """Add a row's entries, both [T, N], T tokens of its assistant spans in order.

        Raises:
            ValueError: a row that was added before, or arrays of other shapes.
            MedusaTrainError: the disk is full.
        """
        _check_shapes(token_ids, logprobs)
        if token_ids.shape[1] != self.num:
            raise ValueError(f"{self.num} entries per token needed, got {token_ids.shape[1]}")
        if row_id in self._seen:
            raise ValueError(f"row {row_id!r} was added before")
        self._seen.add(row_id)
        num_tokens = self._num_tokens + len(token_ids)
        if self._row_ids and num_bytes(num_tokens, self.num) > self.max_shard_bytes:
            self._flush()
        self._row_ids.append(row_id)
        self._arrays.append((token_ids, logprobs))
        self._num_tokens += len(token_ids)

    def finish(self) -> dict[str, Any]:
        """Write what is left and the index; returns the index."""
        if self._row_ids:
            self._flush()
        index = {
            "schema_version": SCHEMA_VERSION,
            "kind": self.kind,
            "num": self.num,
            "num_rows": sum(shard.num_rows for shard in self._shards),
            "num_tokens": sum(shard.num_tokens for shard in self._shards),
            "shards": [asdict(shard) for shard in self._shards],
        }
        write_json(self.directory / INDEX_FILE, index)
        return index

    def _flush(self) -> None:
        name = f"{len(self._shards):05d}.safetensors"
        lengths = [len(token_ids) for token_ids, _ in self._arrays]
        tensors: dict[str, NDArray[Any]] = {
            "token_ids": np.concatenate([t for t, _ in self._arrays]).astype(np.int32),
            "logprobs": np.concatenate([p for _, p in self._arrays]).astype(np.float32),
            "offsets": np.cumsum([0, *lengths], dtype=np.int64),
        }
        facts = {"kind": self.kind, "num": self.num, "row_ids": self._row_ids}
        with atomic_path(self.directory / name) as temporary:
            save_file(tensors, temporary, {_METADATA: json.dumps(facts)})
        self._shards.append(_Shard(name, len(self._row_ids), self._num_tokens))
        self._row_ids, self._arrays, self._num_tokens = [], [], 0


class TeacherLogprobsReader:
    """The entries of each row, from memory-mapped shards; :func:`read_teacher` makes it.

    Attributes:
        kind: ``top`` (most likely first) or ``samples`` (independent draws).
        num: N, entries per token.
        num_tokens: of all rows.
    """

    def __init__(self, directory: Path, *, kind: Kind, num: int, shards: Sequence[_Shard]) -> None:
        self.directory = directory
        self.kind: Kind = kind
        self.num = num
        self.num_tokens = 0
        self._places: dict[str, tuple[str, int, int]] = {}
        self._open: dict[str, safe_open] = {}
        for shard in shards:
            self._add_shard(shard)

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._places)

    def __contains__(self, row_id: object) -> bool:
        """Whether there are entries of a row."""
        return row_id in self._places

    def num_tokens_of(self, row_id: str) -> int:
        """T of one row, without reading its entries.

        Raises:
            InputError: there is no such row.
        """
        _, start, end = self._place(row_id)
        return end - start

    def of(self, row_id: str) -> Arrays:
        """``token_ids`` int32 [T, N] and ``logprobs`` float32 [T, N] of one row.

        Raises:
            InputError: there is no such row, or its shard is gone.
        """
        name, start, end = self._place(row_id)
        if start == end:  # safetensors cuts no empty slices
            return np.zeros((0, self.num), np.int32), np.zeros((0, self.num), np.float32)
        if name not in self._open:
            self._open[name] = _open_shard(self.directory / name)
        token_ids, logprobs = (
            self._open[name].get_slice(key)[start:end]  # type: ignore[no-untyped-call]
            for key in ("token_ids", "logprobs")
        )
        return token_ids, logprobs

    def _place(self, row_id: str) -> tuple[str, int, int]:
        place = self._places.get(row_id)
        if place is None:
            raise InputError(
                f"{self.directory}: holds no teacher log-probabilities of row {row_id!r}; "
                "they belong to other data, generate both together"
            )
        return place

    def _add_shard(self, shard: _Shard) -> None:
        path = self.directory / shard.file
        row_ids, offsets = _read_shard(path, shard, kind=self.kind, num=self.num)
        for row_id, start, end in zip(row_ids, offsets[:-1], offsets[1:], strict=True):
            if row_id in self._places:
                raise InputError(
                    f"{path}: row {row_id!r} is also in {self._places[row_id][0]}; generate the "
                    "data again"
                )
            self._places[row_id] = (shard.file, start, end)
        self.num_tokens += shard.num_tokens


def read_teacher(directory: Path) -> TeacherLogprobsReader:
    """Open ``teacher_logprobs/`` of a data set; checks all shards, reads no entries.

    Raises:
        InputError: there is no index (not finished, say), or a shard is missing or is not what the
            index says.
    """
    path = directory / INDEX_FILE
    index = read_json(path)
    version = index.get("schema_version") if isinstance(index, dict) else None
    if version != SCHEMA_VERSION:
        raise InputError(
            f"{path}: schema_version: must be {SCHEMA_VERSION}, got {version!r}; make it again"
        )
    try:
        kind, num = index["kind"], index["num"]
        shards = [_Shard(**shard) for shard in index["shards"]]
    except (KeyError, TypeError) as error:
        raise InputError(f"{path}: is no index of teacher log-probabilities: {error}") from error
    return TeacherLogprobsReader(directory, kind=kind, num=num, shards=shards)


def _check_shapes(token_ids: NDArray[np.int32], logprobs: NDArray[np.float32]) -> None:
    if token_ids.ndim != 2 or token_ids.shape != logprobs.shape:
        raise ValueError(f"two arrays [T, N] needed, got {token_ids.shape} and {logprobs.shape}")


def _open_shard(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="numpy")
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; generate the data again") from error
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read: {error}; generate the data again") from error


def _read_shard(path: Path, shard: _Shard, *, kind: Kind, num: int) -> tuple[list[str], list[int]]:
    """The ids of a shard's rows and their offsets; refuses what the index does not say."""
    with _open_shard(path) as file:
        facts = json.loads((file.metadata() or {}).get(_METADATA, "{}"))
        shape = [shard.num_tokens, num]
        for problem in _problems(file, shape, num_rows=shard.num_rows):
            raise InputError(f"{path}: {problem}; generate the data again")
        offsets = file.get_tensor("offsets").tolist()
    row_ids = facts.get("row_ids", [])
    right = (
        (facts.get("kind"), facts.get("num"), len(row_ids)) == (kind, num, shard.num_rows)
        and (offsets[0], offsets[-1]) == (0, shard.num_tokens)
        and offsets == sorted(offsets)
    )
    if not right:
        raise InputError(f"{path}: is not the shard that the index names; generate the data again")
    return row_ids, offsets


def _problems(file: Any, shape: list[int], *, num_rows: int) -> Iterator[str]:
    expected = {
        "token_ids": ("I32", shape),
        "logprobs": ("F32", shape),
        "offsets": ("I64", [num_rows + 1]),
    }
    missing = expected.keys() - set(file.keys())
    if missing:
        yield f"tensor {min(missing)!r} is missing"
        return
    for name, (dtype, wanted) in expected.items():
        view = file.get_slice(name)
        if (view.get_dtype(), view.get_shape()) != (dtype, wanted):
            yield f"{name}: must be {dtype} {wanted}, got {view.get_dtype()} {view.get_shape()}"
