"""How this process gets memory from the system: what costs time on a CPU."""

from __future__ import annotations

import os


def use_large_pages() -> None:
    """Let torch ask for large memory pages, as NumPy does; it reads this when it first allocates.

    Decoding reads all weights at each step, and with small pages a CPU looks up an address for
    every 4 KiB. Training allocates and frees, and there clearing large pages costs more than that.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
