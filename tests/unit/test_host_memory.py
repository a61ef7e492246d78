"""Memory that torch asks for."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from medusa_train.host_memory import use_large_pages


def test_large_pages_are_only_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    use_large_pages()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    use_large_pages()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "0"


USE = """
import os
import torch
from medusa_train.host_memory import freed_memory_kept

def resident():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def use():
    tensors = [torch.ones(16 * 2**20, dtype=torch.uint8) for _ in range(8)]
    del tensors

use()
before = resident()
with freed_memory_kept():
    use()
    inside = resident()
print((inside - before) // 2**20, (resident() - before) // 2**20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_memory_is_kept_inside_and_given_back_after() -> None:
    """In a process of its own, whose heap has no room yet."""
    found = subprocess.run([sys.executable, "-c", USE], capture_output=True, check=True, text=True)
    kept, left = map(int, found.stdout.split())
    assert kept > 100
    assert left < 16
