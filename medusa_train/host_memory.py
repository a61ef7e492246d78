"""How this process gets memory from the system: what costs time on a CPU."""

from __future__ import annotations

import os


def use_large_pages() -> None:
    """Let torch ask for large memory pages, as NumPy does; it reads this when it first allocates.

    Weights are read once a step, and with small pages a CPU looks up an address for every 4 KiB.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
