"""The model cards of exports: how the files are used, and what their run measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from medusa_train.card.markdown import code
from medusa_train.card.of_run import card_sources
from medusa_train.card.sources import CardSources
from medusa_train.card.usage import LIBRARY, Use, base_to_load
from medusa_train.card.write import CARD_FILE, write_card
from medusa_train.export.verify import Target
from medusa_train.export_options import ExportChoices

CARD_BESIDE_BASE = "README.medusa.md"


def write_export_card(
    target: Target,
    heads: Path,
    directory: Path,
    *,
    output: Path,
    chosen: ExportChoices,
    start: str,
    notes: tuple[str, ...],
    holds_base: bool,
) -> None:
    """Write the model card of heads for an engine, with its start command and the warnings.

    Beside a base model, whose own README.md stays as it is, it is ``README.medusa.md``.

    Args:
        target: the engine.
        heads: the heads directory that is exported.
        directory: where the files are now.
        output: where they will be, as the start command names it.
        chosen: what the user chose.
        start: how to start the engine, in Markdown.
        notes: what its user should know, a sentence each.
        holds_base: whether the base model is in the directory.
    """
    sources = _sources(heads, chosen)
    use = _use(target, f"For {target}.\n\n{_start(start, sources, output, chosen)}", notes=notes)
    name = CARD_BESIDE_BASE if (directory / CARD_FILE).exists() else CARD_FILE
    write_card(directory, sources, use=replace(use, holds_base=holds_base), name=name)


def write_pair_card(
    target: Target,
    heads: Path,
    output: Path,
    *,
    chosen: ExportChoices,
    start: str,
    notes: tuple[str, ...],
    directories: tuple[str, str],
) -> None:
    """Write the model card of a base and its heads in two directories beside it.

    Args:
        target: the engine.
        heads: the heads directory that is exported.
        output: the directory of both.
        chosen: what the user chose.
        start: how to start the engine, in Markdown.
        notes: what its user should know, a sentence each.
        directories: the names of the base's and the heads' directory.
    """
    base_name, heads_name = directories
    sources = _sources(heads, chosen)
    text = (
        f"For {target}. `{base_name}` is the model, which was trained together with its heads, and "
        f"`{heads_name}` the heads. They belong together: with the original, "
        f"{code(sources.base.name)}, fewer guesses are right. `base_model_name_or_path` in "
        f"`{heads_name}/config.json` says where `{base_name}` was written; where an engine reads "
        f"it, it has to say where `{base_name}` is.\n\n{_start(start, sources, output, chosen)}"
    )
    use = _use(target, text, notes=notes)
    write_card(output, sources, use=replace(use, holds_base=True))


def _sources(heads: Path, chosen: ExportChoices) -> CardSources:
    sources = card_sources(heads)
    if chosen.num_heads is not None:
        sources = sources.first(chosen.num_heads)
    if chosen.tree_file is not None:
        sources = replace(sources, tree=None, tree_paths=None)
    return sources


def _start(start: str, sources: CardSources, output: Path, chosen: ExportChoices) -> str:
    """The start command as a reader of the card can use it."""
    if chosen.repo is None:
        return start
    # Whoever reads it there has other directories.
    root = output if chosen.repo_root is None else chosen.repo_root
    for place in (root.resolve(), root):
        start = start.replace(str(place), "DIRECTORY")
    if "/" in (name := sources.identity.name_or_path):
        start = start.replace(name, base_to_load(sources))
    return f"DIRECTORY is what `hf download {chosen.repo}` prints.\n\n{start}"


def _use(target: Target, text: str, *, notes: tuple[str, ...]) -> Use:
    points = "".join(f"- {note[:1].upper()}{note[1:]}.\n" for note in notes)
    known = f"\n\n### Good to know\n\n{points}" if points else ""
    is_ours = target == "transformers"
    return Use(
        text=f"{text.strip()}{known}",
        library="transformers" if is_ours else LIBRARY,
        tags=(target, "custom_generate") if is_ours else (target,),
    )
