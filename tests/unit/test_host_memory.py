"""Memory that torch asks for."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest
import torch

from medusa_train.host_memory import freed_memory_kept, use_large_pages


def test_large_pages_are_only_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    use_large_pages()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    use_large_pages()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "0"


def _resident() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_memory_is_kept_inside_and_given_back_after() -> None:
    mib = 2**20

    def use() -> None:
        tensors = [torch.ones(16 * mib, dtype=torch.uint8) for _ in range(8)]
        del tensors

    use()
    before = _resident()
    with freed_memory_kept():
        use()
        inside = _resident()
    assert inside - before > 100 * mib
    assert _resident() - before < 16 * mib
