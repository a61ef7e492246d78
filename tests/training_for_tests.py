"""A run on a tiny base, from recipe text to heads, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from medusa_train.data.conversations import Conversation, write_dataset
from medusa_train.recipe.load import LoadedRecipe, load_recipe

CYCLE = (7, 12, 9, 30, 21, 8, 17, 26, 11, 40, 33)


def conversation(
    ids: Sequence[int], spans: Sequence[tuple[int, int]], *, name: str = "row"
) -> Conversation:
    """A row with given ids and spans; its user turn is its name, so that names decide the split."""
    return Conversation(
        id=name,
        source="test",
        messages=({"role": "user", "content": name},),
        input_ids=tuple(ids),
        assistant_spans=tuple(spans),
        finish_reasons=("given",) * len(spans),
    )


def cyclic_rows(count: int, *, length: int = 48) -> list[Conversation]:
    """Rows that all continue one token cycle of period 11, from different places in it."""
    rows = []
    for n in range(count):
        ids = [CYCLE[(n + i) % len(CYCLE)] for i in range(length + n % 5)]
        rows.append(conversation(ids, [(4, len(ids))], name=f"row {n}"))
    return rows


def write_recipe(
    directory: Path,
    *,
    base: Path,
    rows: Sequence[Conversation],
    overrides: Sequence[str] = (),
) -> LoadedRecipe:
    """Write a data set and a recipe that trains on it, and load the recipe."""
    data = directory / "dataset"
    write_dataset(data, rows, manifest={"chat_template_hash": None})
    recipe = {
        "base_model": {"name_or_path": str(base), "dtype": "float32"},
        "heads": {"num_heads": 3},
        "data": {"path": str(data), "eval_fraction": 0.25},
        "train": {
            "compute_dtype": "float32",
            "trainer": {
                "per_device_train_batch_size": 4,
                "max_steps": 4,
                "logging_steps": 1,
                "save_steps": 2,
                "use_cpu": True,
            },
        },
        "evaluate": {"num_bootstrap": 50},
        "run_dir": str(directory / "run"),
    }
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return load_recipe(path, list(overrides))
