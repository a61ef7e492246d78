"""Memory that torch asks for."""

from __future__ import annotations

import os

import pytest

from medusa_train.host_memory import use_large_pages


def test_large_pages_are_only_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    use_large_pages()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    use_large_pages()
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "0"
