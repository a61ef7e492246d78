"""A directory for ``model.generate(custom_generate=DIR, heads=DIR)`` of transformers.

It holds the heads and, under ``custom_generate/``, the package's own modules. The library runs them
from a copy of its own, in which only ``from .name import …`` works, so they lie side by side and
their imports of each other are rewritten.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shutil
from pathlib import Path

from medusa_train.decoding.custom_generate import OPTIONS_FILE
from medusa_train.errors import InputError
from medusa_train.heads.checkpoint import SPEC_FILE, WEIGHTS_FILE, read_spec
from medusa_train.tree.topology import Tree

ENTRY = "medusa_train.decoding.custom_generate"
PACKAGE = "medusa_train."


def export_transformers(heads: Path, output: Path, *, tree: Tree, num_tokens: int) -> list[str]:
    """Write the directory.

    Args:
        heads: a heads directory.
        output: a new or empty directory, or one that holds the base model.
        tree: the candidates of each step.
        num_tokens: ids of the tokenizer; greater ones are never proposed.

    Returns:
        The names of the files that were written.

    Raises:
        InputError: no heads, or an export is there already.
    """
    read_spec(heads)
    code = output / "custom_generate"
    for path in (code, output / WEIGHTS_FILE):
        if path.exists():
            raise InputError(f"{path}: is there already; give another directory or remove it")
    code.mkdir(parents=True)
    for name in (WEIGHTS_FILE, SPEC_FILE):
        shutil.copyfile(heads / name, output / name)
    options = {"num_tokens": num_tokens, "tree": [list(path) for path in tree.paths]}
    (output / OPTIONS_FILE).write_text(json.dumps(options) + "\n", encoding="utf-8")
    for name, text in flattened(ENTRY).items():
        (code / name).write_text(text, encoding="utf-8")
    return sorted(str(path.relative_to(output)) for path in output.rglob("*") if path.is_file())


def flattened(entry: str) -> dict[str, str]:
    """The modules that ``entry`` needs, with imports rewritten; ``entry`` is ``generate.py``."""
    files: dict[str, str] = {}
    waiting = [entry]
    while waiting:
        module = waiting.pop()
        name = _flat_name(module, entry)
        if f"{name}.py" in files:
            continue
        source = _source(module)
        wanted = _own_imports(source)
        for other in wanted:
            source = re.sub(
                rf"^from {re.escape(other)} import",
                f"from .{_flat_name(other, entry)} import",
                source,
                flags=re.MULTILINE,
            )
        files[f"{name}.py"] = source
        waiting += wanted
    return files


def _flat_name(module: str, entry: str) -> str:
    return "generate" if module == entry else module.removeprefix(PACKAGE).replace(".", "_")


def _source(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).read_text(encoding="utf-8")


def _own_imports(source: str) -> list[str]:
    """The modules of this package that a source imports from."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return sorted({n.module for n in nodes if n.module and n.module.startswith(PACKAGE)})
