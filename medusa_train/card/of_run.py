"""The card of a run's heads: what the stage ``card`` and the command write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa_train.card.base_card import read_base_card
from medusa_train.card.sources import CardSources, read_recipe, read_sources, run_of
from medusa_train.card.write import write_card
from medusa_train.console import log
from medusa_train.errors import InputError
from medusa_train.heads.checkpoint import read_spec
from medusa_train.run_dir import RunDir


def write_run_card(
    run: RunDir,
    *,
    base_model_id: str | None = None,
    license_id: str | None = None,
    languages: Sequence[str] = (),
) -> list[Path]:
    """Write the model card into a run's heads directory.

    Args:
        run: a run that has trained heads.
        base_model_id: instead of the recipe's ``card.base_model_id``.
        license_id: instead of the recipe's ``card.license``.
        languages: instead of the recipe's ``card.languages``.

    Returns:
        The files.

    Raises:
        InputError: no run, or no heads in it.
    """
    if not run.recipe.exists():
        raise InputError(f"{run.root}: no {run.recipe.name} in it; give the directory of a run")
    sources = card_sources(
        run.heads, base_model_id=base_model_id, license_id=license_id, languages=languages
    )
    files = [run.heads / name for name in write_card(run.heads, sources)]
    log(f"model card: {files[0]}")
    return files


def card_sources(
    heads: Path,
    *,
    base_model_id: str | None = None,
    license_id: str | None = None,
    languages: Sequence[str] = (),
) -> CardSources:
    """All that is known of heads: from their own files, and from their run while they lie in it.

    Raises:
        InputError: no heads, or a file of the run that cannot be read.
    """
    _, identity = read_spec(heads)
    run = run_of(heads)
    recipe: Mapping[str, Any] = {} if run is None else read_recipe(run.recipe)
    section = recipe.get("card") or {}
    distill = (recipe.get("data") or {}).get("distill") or {}
    base = read_base_card(
        identity.name_or_path,
        revision=identity.revision,
        hub_id=base_model_id or section.get("base_model_id"),
        license_id=license_id or section.get("license"),
        languages=languages or section.get("languages") or distill.get("languages") or (),
    )
    return read_sources(heads, run=run, base=base)
