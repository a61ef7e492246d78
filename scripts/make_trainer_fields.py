"""Write the names and types of ``transformers.TrainingArguments`` where recipes are checked.

``medusa-train validate`` must not import torch, so it reads this list instead. Run it after an
upgrade of transformers; a test compares the list with the installed version.

    python scripts/make_trainer_fields.py
"""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

from medusa_train.run_dir import write_text

OUTPUT = Path(__file__).parents[1] / "medusa_train" / "recipe" / "trainer_fields.json"

YAML_TYPES = {bool: "bool", int: "int", float: "float", str: "str", dict: "dict", list: "list"}


def collect() -> dict[str, dict[str, Any]]:
    """Each argument that YAML can express: its types, and its choices where it has them."""
    from transformers import TrainingArguments

    hints = typing.get_type_hints(TrainingArguments)
    result = {}
    for field in dataclasses.fields(TrainingArguments):
        names, choices = _types(hints[field.name])
        choices += field.metadata.get("choices", [])
        if names - {"null"}:
            entry: dict[str, Any] = {"types": sorted(names)}
            if choices:
                entry["choices"] = choices
            result[field.name] = entry
    return result


def render() -> str:
    """The text of the list, one argument per line."""
    lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in collect().items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _types(hint: Any) -> tuple[set[str], list[str]]:
    origin = typing.get_origin(hint)
    if origin in {typing.Union, types.UnionType}:
        names: set[str] = set()
        choices: list[str] = []
        for part in typing.get_args(hint):
            part_names, part_choices = _types(part)
            names |= part_names
            choices += part_choices
        return names, choices
    if origin is typing.Literal:
        return {"bool" if isinstance(value, bool) else "str" for value in typing.get_args(hint)}, []
    if hint is type(None):
        return {"null"}, []
    base = origin or hint
    if isinstance(base, type) and issubclass(base, enum.Enum):
        return {"str"}, [str(member.value) for member in base]
    return ({YAML_TYPES[base]}, []) if base in YAML_TYPES else (set(), [])


def main() -> int:
    """Write the list."""
    write_text(OUTPUT, render())
    return 0


if __name__ == "__main__":
    sys.exit(main())
