"""Generated pages are fresh, and the page of errors quotes what the code says."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEADINGS = re.findall(r"^### `(.+)`$", (ROOT / "docs" / "errors.md").read_text("utf-8"), re.M)


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


@pytest.fixture(scope="module")
def texts() -> str:
    """Every text in the package, with ``…`` where a value is filled in."""
    found = []
    for path in (ROOT / "medusa_train").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append(_text(node))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def _text(node: ast.JoinedStr) -> str:
    parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return "".join(str(part) for part in parts)


@pytest.mark.parametrize("heading", HEADINGS)
def test_an_error_on_the_page_is_one_that_the_code_gives(heading, texts):
    """Typer's own words and the prefix of the command line are not in the package."""
    if heading.startswith("error: "):
        return
    for fragment in heading.split("…"):
        words = fragment.strip(" :;,'?")
        # Messages are put together from parts, so each clause is looked for by itself.
        for clause in [words] if words in texts else re.split("; |: ", words):
            assert clause in texts, clause


def test_the_page_has_them():
    assert len(HEADINGS) > 30
