"""A model card as files: README.md, and its pictures in a folder beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

from medusa_train.card.body import PICTURES, card_body
from medusa_train.card.markdown import FOLDER
from medusa_train.card.metadata import card_metadata
from medusa_train.card.sources import CardSources
from medusa_train.card.usage import Use
from medusa_train.run_dir import atomic_path, write_text

CARD_FILE = "README.md"
CARD_VERSION = 2
"""Of what a card says; a card of an older one is written again."""


def write_card(
    directory: Path,
    sources: CardSources,
    *,
    use: Use | None = None,
    name: str = CARD_FILE,
) -> list[str]:
    """Write the card into ``directory``; its text comes last.

    Args:
        directory: of the heads, or of an export.
        sources: what is known.
        use: of the files there; None for a heads directory.
        name: of the card's file.

    Returns:
        The names of the files.
    """
    text = card_text(sources, use=use)
    shown = {picture.name: picture for picture in sources.pictures if picture.name in PICTURES}
    for old in set(PICTURES) - shown.keys():
        (directory / FOLDER / f"{old}.png").unlink(missing_ok=True)
    for picture in shown.values():
        with atomic_path(directory / FOLDER / picture.path.name) as temporary:
            shutil.copyfile(picture.path, temporary)
    write_text(directory / name, text)
    return [name, *(f"{FOLDER}/{picture}.png" for picture in sorted(shown))]


def card_text(sources: CardSources, *, use: Use | None = None) -> str:
    """The whole card, metadata first."""
    metadata = card_metadata(sources, use=use)
    return f"---\n{metadata.to_yaml()}\n---\n\n{card_body(sources, use=use)}"
