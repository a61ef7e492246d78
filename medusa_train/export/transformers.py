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
from pathlib import Path

from medusa_train.decoding.custom_generate import OPTIONS_FILE
from medusa_train.export.format_a import write_safetensors
from medusa_train.export.source import HeadTensors, ServeOptions, Written
from medusa_train.heads.checkpoint import SPEC_FILE, WEIGHTS_FILE
from medusa_train.heads.config import to_spec
from medusa_train.run_dir import write_json, write_text

ENTRY = "medusa_train.decoding.custom_generate"
PACKAGE = "medusa_train."


def export_transformers(
    heads: HeadTensors, directory: Path, options: ServeOptions, *, num_tokens: int
) -> Written:
    """Write the directory.

    Args:
        heads: any.
        directory: where to; it may hold the base model.
        options: the candidates of each step, and the directory's name for the commands.
        num_tokens: ids of the tokenizer; greater ones are never proposed.
    """
    code = directory / "custom_generate"
    code.mkdir(parents=True)
    write_safetensors(directory / WEIGHTS_FILE, heads.tensors)
    write_json(directory / SPEC_FILE, to_spec(heads.config, heads.base))
    values = {"num_tokens": num_tokens, "tree": [list(path) for path in options.tree.paths]}
    write_text(directory / OPTIONS_FILE, json.dumps(values) + "\n")
    for name, text in flattened(ENTRY).items():
        (code / name).write_text(text, encoding="utf-8")
    place = str(options.directory)
    return Written(
        f"""\
torch and transformers are all that it needs:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

base = {heads.base.name_or_path!r}
model = AutoModelForCausalLM.from_pretrained(base)
tokenizer = AutoTokenizer.from_pretrained(base)
inputs = tokenizer("Hello", return_tensors="pt")
ids = model.generate(
    **inputs, custom_generate={place!r}, heads={place!r}, trust_remote_code=True, do_sample=False
)
print(tokenizer.decode(ids[0]))
```
"""
    )


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
