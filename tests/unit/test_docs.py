"""Generated pages are fresh, and the page of errors holds the texts that the code gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_recipe_page_is_fresh():
    """On failure: `make docs`."""
    result = subprocess.run(
        [sys.executable, "-c", "import make_docs; print(make_docs.render(), end='')"],
        cwd=ROOT / "scripts",
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
