"""Rows of cached hidden states: from RAM where the budget reaches, else from disk by position.

What is kept in RAM is kept in the system's page cache: all processes of a machine share one copy of
it. Rows beyond the budget are read one by one and forgotten at once, so that they push nothing out
(``docs/adr/0008``).
"""

from __future__ import annotations

import json
import math
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from medusa_train.errors import MedusaTrainError

_DTYPES = {"BF16": torch.bfloat16, "I8": torch.int8, "F32": torch.float32}
_LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, then the header, then the tensors."""
_AHEAD_BYTES = 128 << 10
"""What systems read ahead for one request, however much is asked for."""
_FREE_SHARE = 0.75
"""Of the memory that is free at the start; the rest is left to what training itself needs."""
_MEMORY_FILE = Path("/proc/meminfo")


class ShardReader:
    """Reads rows of a shard's tensors, [N, …] each.

    Args:
        path: the safetensors file.
        is_kept: whether what is read should stay in RAM.

    Raises:
        MedusaTrainError: the file cannot be opened.
    """

    def __init__(self, path: Path, *, is_kept: bool) -> None:
        self._path = path
        self._is_kept = is_kept
        try:
            self._handle = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise MedusaTrainError(f"{path}: cannot be read: {error.strerror}") from error
        weakref.finalize(self, os.close, self._handle)
        length = int.from_bytes(os.pread(self._handle, _LENGTH_BYTES, 0), "little")
        header = json.loads(os.pread(self._handle, length, _LENGTH_BYTES))
        first = _LENGTH_BYTES + length
        self._tensors = {
            name: (_DTYPES[entry["dtype"]], entry["shape"][1:], first + entry["data_offsets"][0])
            for name, entry in header.items()
            if name != "__metadata__"
        }
        if not is_kept:
            # Reading ahead would fetch megabytes around each conversation.
            _advise(self._handle, 0, 0, "RANDOM")

    def rows(self, name: str, start: int, end: int) -> Tensor:
        """Rows ``start`` … ``end`` − 1 of a tensor.

        Raises:
            MedusaTrainError: the file is shorter than it was.
        """
        dtype, shape, first = self._tensors[name]
        rows = torch.empty((end - start, *shape), dtype=dtype)
        place = first + start * math.prod(shape) * dtype.itemsize
        if not rows.nbytes:
            return rows
        count = os.preadv(self._handle, [rows.view(torch.uint8).numpy().data], place)
        if count != rows.nbytes:
            raise MedusaTrainError(
                f"{self._path}: ends before its last row; run the stage hidden-states again"
            )
        if not self._is_kept:
            _advise(self._handle, place, rows.nbytes, "DONTNEED")
        return rows


def num_kept(sizes: Sequence[int], *, ram_bytes: int) -> int:
    """How many files, from the first, have ``ram_bytes`` in all at most."""
    kept = 0
    for size in sizes:
        ram_bytes -= size
        if ram_bytes < 0:
            break
        kept += 1
    return kept


def spare_memory() -> int:
    """Bytes for hidden states where the recipe does not say: a part of what is free now."""
    try:
        lines = _MEMORY_FILE.read_text(encoding="ascii").splitlines()
    except OSError:
        # Not Linux: the system alone decides what stays.
        return 0
    available = next((line for line in lines if line.startswith("MemAvailable:")), "x 0")
    return int(int(available.split()[1]) * 1024 * _FREE_SHARE)


def read_ahead(paths: Sequence[Path]) -> threading.Thread:
    """Bring files into RAM while the caller goes on; what is there already costs nothing."""
    thread = threading.Thread(target=_read_ahead, args=(paths,), daemon=True)
    thread.start()
    return thread


def _read_ahead(paths: Sequence[Path]) -> None:
    for path in paths:
        try:
            with path.open("rb") as file:
                for place in range(0, path.stat().st_size, _AHEAD_BYTES):
                    _advise(file.fileno(), place, _AHEAD_BYTES, "WILLNEED")
        except OSError:
            # The cache may be gone by now; whoever reads it says so.
            return


def _advise(handle: int, place: int, length: int, what: str) -> None:
    """Tell the system what will be read; a system that takes no advice reads all the same."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, place, length, getattr(os, f"POSIX_FADV_{what}"))
