"""How this process gets memory from the system: what costs time on a CPU."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGEST = 32 << 20
"""The greatest _MMAP_THRESHOLD that is allowed, in bytes."""


def use_large_pages() -> None:
    """Let torch ask for large memory pages, as NumPy does; it reads this when it first allocates.

    Decoding reads all weights at each step, and with small pages a CPU looks up an address for
    every 4 KiB. Training allocates and frees, and there clearing large pages costs more than that.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Let the C library keep what is freed in here for the next tensor, and give it back after.

    A forward pass on a CPU makes hundreds of tensors of some MiB. The library returns such blocks
    to the system at once, and clearing their pages again costs as much as the elementwise
    operations themselves. Nothing changes without glibc. Tensors of more than 32 MiB, its limit,
    are returned all the same.
    """
    library = _glibc()
    if library is None:
        yield
        return
    for name, value in ((_MMAP_THRESHOLD, _LARGEST), (_TRIM_THRESHOLD, 2**31 - 1)):
        library.mallopt(name, value)
    library.mallopt(_TOP_PAD, 8 * _LARGEST)
    try:
        yield
    finally:
        # What the library's own adaption ends at once a block of its limit was freed.
        library.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST)
        library.mallopt(_TOP_PAD, 0)
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if platform.system() == "Linux" else None
    has_all = library is not None and all(
        hasattr(library, name) for name in ("gnu_get_libc_version", "mallopt", "malloc_trim")
    )
    return library if has_all else None
