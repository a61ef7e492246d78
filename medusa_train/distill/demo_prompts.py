"""A small set of prompts that comes with the package, to try a generation without a corpus.

120 prompts, written for this project and under its licence: questions, writing, code, maths,
lists, passages to read, translation, role play, tables and short chat; thirteen are in other
languages than English, twelve have a system turn, and twenty go on with further turns of the user,
which make sense whatever the answers are. The first rows are as mixed as the whole.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def demo_prompts_path() -> Path:
    """The JSON Lines file of the prompts: rows with ``messages``, or with ``turns`` of the user."""
    # The package is never imported from an archive: its data files are files.
    return Path(str(files("medusa_train.distill") / "demo_prompts.jsonl"))
