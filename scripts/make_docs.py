"""Write ``docs/recipes.md`` from the recipe schema; a test checks that it is fresh.

python scripts/make_docs.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from medusa_train.recipe.schema import Recipe
from medusa_train.recipe.trainer_block import REFUSED, REMOVED, trainer_fields
from medusa_train.run_dir import write_text

OUTPUT = Path(__file__).parents[1] / "docs" / "recipes.md"

INTRODUCTION = """\
# Recipes

<!-- Written by scripts/make_docs.py from medusa_train/recipe/schema.py; do not edit. -->

A recipe is a YAML file that says everything one run needs to know. `medusa-train validate FILE`
prints every mistake in it with its line; `medusa-train run FILE` runs it.

- Unknown keys, keys that are there twice, and values of another type are errors.
- `1e-4` is a number; `yes`, `no`, `on`, `off` and `1:30` are text; `012` is an error.
- A relative path of `data.path`, `data.chat_template`, `data.distill.prompts`, a source of prompts
  or another file is looked up in the working directory, then beside the recipe.
- `--set KEY=VALUE` sets any key, and VALUE is read like a value in the file:
  `--set heads.num_heads=3`, `--set data.distill=null`, `--set 'train.trainer={max_steps: 100}'`,
  `--set data.distill.sources.0.weight=2` (items of a list count from 0).
- `runs/NAME/recipe.resolved.yaml` is the recipe of a run with every default written out.
"""

TRAINER = """\
## train.trainer

Arguments of `transformers.TrainingArguments`, by their own names: {names}.

May not be set here:

| key | why |
|---|---|
{refused}

Arguments of older releases of transformers, which are gone:

| key | instead |
|---|---|
{removed}
"""


def render() -> str:
    """The text of ``docs/recipes.md``."""
    parts = [INTRODUCTION, "## Sections\n", _table(Recipe)]
    parts += _sections(Recipe, prefix="")
    names = ", ".join(f"`{name}`" for name in trainer_fields() if name not in REFUSED)
    parts.append(
        TRAINER.format(
            names=names,
            refused="\n".join(f"| `{key}` | {why} |" for key, why in REFUSED.items()),
            removed="\n".join(f"| `{key}` | {why} |" for key, why in REMOVED.items()),
        )
    )
    return "\n".join(parts)


def _sections(model: type[BaseModel], *, prefix: str) -> list[str]:
    parts: list[str] = []
    for name, field in model.model_fields.items():
        section = _section_of(field)
        if section is not None:
            key = f"{prefix}{name}"
            mark = "##" if not prefix else "###"
            parts += [f"{mark} {key}\n\n{(section.__doc__ or '').strip()}\n", _table(section)]
            parts += _sections(section, prefix=f"{key}.")
    return parts


def _table(model: type[BaseModel]) -> str:
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for name, field in model.model_fields.items():
        meaning = " ".join((field.description or "").split())
        rows.append(f"| `{name}` | {_value(field)} | {_default(field)} | {meaning} |")
    return "\n".join(rows) + "\n"


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    for option in (field.annotation, *get_args(field.annotation)):
        if _is_section(option):
            section: type[BaseModel] = option
            return section
    return None


def _is_section(option: Any) -> bool:
    return isinstance(option, type) and issubclass(option, BaseModel)


def _value(field: FieldInfo) -> str:
    limits: list[Any] = list(field.metadata)
    names = []
    for option in _options(field.annotation):
        limits += [m for info in getattr(option, "__metadata__", ()) for m in info.metadata]
        names.append(_type_name(option))
    text = " or ".join(names)
    return text + "".join(f", {limit}" for limit in map(_limit, limits) if limit)


def _options(annotation: Any) -> tuple[Any, ...]:
    args = get_args(annotation)
    return args if type(None) in args else (annotation,)


def _type_name(option: Any) -> str:
    base = getattr(option, "__origin__", option)
    if base is type(None):
        return "null"
    if choices := [arg for arg in get_args(option) if isinstance(arg, str)]:
        return ", ".join(f"`{choice}`" for choice in choices)
    if base is list:
        [item] = get_args(option)
        origin = getattr(item, "__origin__", item)
        if any(isinstance(choice, str) for choice in get_args(item)):
            return f"list of {_type_name(item)}"
        return "list of sections" if _is_section(origin) else f"list of {_type_name(item)}s"
    names = {bool: "true, false", int: "whole number", float: "number", str: "text"}
    return names.get(base, "section")


def _limit(limit: Any) -> str | None:
    match limit:
        case Ge(ge=0):
            return "not negative"
        case Ge():
            return f"≥ {limit.ge}"
        case Gt():
            return f"> {limit.gt:g}"
        case Le():
            return f"≤ {limit.le:g}" if isinstance(limit.le, float) else f"≤ {limit.le}"
        case Lt():
            return f"< {limit.lt:g}"
    return None


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        empty = {None: "required", dict: "`{}`", list: "`[]`"}
        return empty[field.default_factory]
    if isinstance(field.default, BaseModel):
        return "see below"
    if field.default is None:
        return "null"
    value = field.default
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def main() -> int:
    """Write the page."""
    write_text(OUTPUT, render())
    return 0


if __name__ == "__main__":
    sys.exit(main())
