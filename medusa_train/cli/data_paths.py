"""What ``inspect`` and ``convert`` are pointed at: refused here, before anything slow is loaded."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any

from medusa_train.errors import InputError


class Form(enum.StrEnum):
    """What ``convert`` writes."""

    DATASET = "dataset"
    SHAREGPT = "sharegpt"
    MESSAGES = "messages"
    TEXT = "text"
    PARQUET = "parquet"


_FORM_OF_SUFFIX = {
    "": Form.DATASET,
    ".json": Form.MESSAGES,
    ".jsonl": Form.MESSAGES,
    ".ndjson": Form.MESSAGES,
    ".parquet": Form.PARQUET,
}
_JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
_SUFFIXES = {
    Form.SHAREGPT: _JSON_SUFFIXES,
    Form.MESSAGES: _JSON_SUFFIXES,
    Form.TEXT: _JSON_SUFFIXES,
    Form.PARQUET: (".parquet",),
}
# What a generation keeps until its data set is complete.
_WORK_DIRECTORIES = ("generation", "blocks")


def read_facts(data: Path) -> dict[str, Any]:
    """The manifest of a data set directory; of a file, nothing.

    Raises:
        InputError: ``data`` is a directory, and no complete data set.
    """
    from medusa_train.data.conversations import CONVERSATIONS_FILE, MANIFEST_FILE, read_manifest

    if not data.is_dir():
        return {}
    is_there = [(data / name).is_file() for name in (CONVERSATIONS_FILE, MANIFEST_FILE)]
    if all(is_there):
        return read_manifest(data)
    if any((data / name).is_dir() for name in _WORK_DIRECTORIES):
        raise InputError(
            f"{data}: an unfinished generation, or a shard of one; run the same generate command "
            "again, which goes on where it stopped, or merge the shards"
        )
    if is_there[0]:
        raise InputError(
            f"{data}: an incomplete data set: it has no {MANIFEST_FILE}, which is written last; "
            "make it again"
        )
    raise InputError(
        f"{data}: not a data set directory: it has no {CONVERSATIONS_FILE}; "
        "give a data set directory or a file"
    )


def form_of(out: Path, to: Form | None) -> Form:
    """What to write to ``out``: what was asked for, or what its name says.

    Raises:
        InputError: the name says nothing, or something else.
    """
    suffix = out.suffix.lower()
    form = to or _FORM_OF_SUFFIX.get(suffix)
    if form is None:
        raise InputError(f"{out}: unknown kind of file {out.suffix!r}; say what it is with --to")
    expected = _SUFFIXES.get(form)
    if expected and suffix not in expected:
        raise InputError(
            f"{out}: would not be read back as {form.value}; give a name with {expected[0]}"
        )
    if form is Form.DATASET and suffix in {*_FORM_OF_SUFFIX, ".txt"} - {""}:
        raise InputError(f"{out}: a data set is a directory; give a name without {suffix}")
    return form


def check_output(out: Path, source: Path) -> None:
    """Refuse to replace anything, and to write among the input's own files.

    Raises:
        InputError: ``out`` is there, or lies inside ``source``.
    """
    if out.exists() or out.is_symlink():
        raise InputError(f"{out}: is already there; remove it, or give another name")
    if source.resolve() in out.resolve().parents:
        raise InputError(f"{out}: lies inside {source}; give a place outside it")
    parent = next(parent for parent in out.absolute().parents if parent.exists())
    if not parent.is_dir():
        raise InputError(f"{out}: cannot be made: {parent} is not a directory")
