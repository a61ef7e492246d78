"""What conversations begin with: prompts of files and data sets, and those that the model writes.

Prompts of files are copied to a scratch file once, so that memory does not grow with their number.
"""

from __future__ import annotations

import json
import sys
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from medusa_train.console import warn
from medusa_train.data.files import RawRow
from medusa_train.data.report import Tally
from medusa_train.data.sources import iterate_prompts, usable_rows
from medusa_train.data.turns import Turns
from medusa_train.distill.demo_prompts import demo_prompts_path
from medusa_train.distill.settings import DistillSettings, PromptSource
from medusa_train.errors import InputError, MedusaTrainError
from medusa_train.run_dir import file_fingerprint

MAGPIE = "magpie"
CONTINUATION = "continuation"
_COLUMNS = ("messages", "conversations", "conversation", "turns", "prompt", "instruction", "text")


@dataclass(frozen=True, slots=True)
class Opening:
    """How one conversation begins.

    Attributes:
        index: its place among all prompts of the generation.
        source: where it came from, as rows name it.
        messages: the turns before the first answer; None: the model writes them.
        later: the turns of the user after that, to be replayed.
        text: plain text that the model goes on with, for a model without a chat template.
        tools: descriptions of tools that the template shows the model.
    """

    index: int
    source: str
    messages: tuple[dict[str, Any], ...] | None = None
    later: tuple[dict[str, Any], ...] = ()
    text: str | None = None
    tools: tuple[Any, ...] | None = None


class Openings:
    """All prompts of a generation, in order; a context manager that removes its scratch files.

    Args:
        settings: the sources and the number of prompts.
        has_template: whether prompts are turns of a chat; else they are plain text.
        scratch: directory for scratch files.

    Raises:
        InputError: a source cannot be read, holds no prompt, or holds chats where there is no
            template.
    """

    def __init__(self, settings: DistillSettings, *, has_template: bool, scratch: Path) -> None:
        self._settings = settings
        self._has_template = has_template
        self._resources = ExitStack()
        self._names = [_name(source, has_template) for source in settings.sources]
        try:
            self._stored = [self._store(source, scratch) for source in settings.sources]
            sizes = _sizes(settings, [None if s is None else len(s) for s in self._stored])
        except BaseException:
            self._resources.close()
            raise
        self._which, self._places = _interleaved(sizes)

    def __enter__(self) -> Openings:
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def __len__(self) -> int:
        return len(self._which)

    @property
    def sizes(self) -> dict[str, int]:
        """Prompts by the name of their source."""
        counts = np.bincount(self._which, minlength=len(self._names))
        sizes: dict[str, int] = {}
        for name, count in zip(self._names, counts.tolist(), strict=True):
            sizes[name] = sizes.get(name, 0) + count
        return sizes

    def identity(self) -> list[dict[str, Any]]:
        """What of the sources decides the prompts, as JSON; a file counts by its content."""
        identities = []
        for source, stored in zip(self._settings.sources, self._stored, strict=True):
            content = None if stored is None else stored.content
            identities.append(
                {
                    "source": source.source,
                    "content": content,
                    "limit": source.limit,
                    "weight": source.weight,
                }
            )
        return identities

    def between(self, first: int, end: int) -> Iterator[Opening]:
        """The prompts ``first`` … ``end - 1``."""
        for index in range(first, min(end, len(self))):
            which = int(self._which[index])
            stored = self._stored[which]
            if stored is None:
                yield Opening(index, self._names[which])
            else:
                yield stored.opening(index, self._names[which], int(self._places[index]))

    def _store(self, source: PromptSource, scratch: Path) -> _Stored | None:
        if source.source == "model":
            return None
        return self._resources.enter_context(
            _Stored(source, has_template=self._has_template, scratch=scratch)
        )


class _Stored:
    """The prompts of one file or data set, in a scratch file that has no name."""

    def __init__(self, source: PromptSource, *, has_template: bool, scratch: Path) -> None:
        self._has_template = has_template
        self._offsets = array("q")
        self._file = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115 — closed with this object
        try:
            self._fill(source)
        except OSError as error:
            self._file.close()
            raise MedusaTrainError(f"{scratch}: cannot be written: {error.strerror}") from error
        except BaseException:
            self._file.close()
            raise

    def _fill(self, source: PromptSource) -> None:
        tally = Tally()
        rows, where, self.content = _open(source, tally)
        if source.limit is not None:
            rows = islice(rows, source.limit)
        for row in rows:
            self._offsets.append(self._file.tell())
            self._file.write(self._line(row, where))
        report = tally.report()
        for line in report.location_lines():
            warn(line)
        if not self._offsets:
            raise InputError(f"{where}: no prompts: {report.summary() or 'there are no rows'}")

    def __enter__(self) -> _Stored:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._offsets)

    def opening(self, index: int, source: str, place: int) -> Opening:
        """The prompt at ``place``."""
        self._file.seek(self._offsets[place])
        row = json.loads(self._file.readline())
        if not self._has_template:
            return Opening(index, source, text=row["text"])
        tools = None if row["tools"] is None else tuple(row["tools"])
        return Opening(index, source, tuple(row["messages"]), tuple(row["later"]), tools=tools)

    def _line(self, row: Turns, where: str) -> bytes:
        value: dict[str, Any]
        if self._has_template:
            asked = ({"role": "user", "content": row.text},) if row.text is not None else ()
            value = {"messages": [*row.messages, *asked], "later": row.later, "tools": row.tools}
        elif row.text is None:
            raise InputError(
                f"{where}: holds chats, and the base model's tokenizer has no chat template; give "
                "one (data.chat_template in a recipe), or plain text to be continued"
            )
        else:
            value = {"text": row.text}
        return json.dumps(value, default=str).encode() + b"\n"


def _open(source: PromptSource, tally: Tally) -> tuple[Iterator[Turns], str, Any]:
    """The rows of a source, what messages call it, and what tells its content from another."""
    if source.source == "dataset":
        assert source.path is not None
        raw, content = _dataset_rows(source)
        return usable_rows(raw, tally, is_prompts=True), source.path, content
    path = demo_prompts_path() if source.source == "demo" else Path(source.path or "")
    try:
        content = file_fingerprint(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    return iterate_prompts(path, tally), str(path), content


def _dataset_rows(source: PromptSource) -> tuple[Iterator[RawRow], Any]:
    """The rows of a data set of the ``datasets`` library, which knows hub names and directories."""
    import datasets

    assert source.path is not None
    if not sys.stderr.isatty():
        # In a log file its bar is one long line.
        datasets.disable_progress_bars()
    try:
        loaded = datasets.load_dataset(source.path, source.name, split=source.split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise InputError(
            f"{source.path}: split {source.split!r} cannot be loaded: {reason}"
        ) from error
    columns = list(loaded.column_names)
    column = source.column or next((name for name in _COLUMNS if name in columns), None)
    if column is None or column not in columns:
        wanted = f"no column {column!r}" if column else "no column that is known to hold prompts"
        raise InputError(
            f"{source.path}: {wanted}; name one of {', '.join(columns)} as the source's column"
        )
    is_known = column in _COLUMNS

    def rows() -> Iterator[RawRow]:
        for number, row in enumerate(loaded, start=1):
            value = {name: row[name] for name in columns} if is_known else row[column]
            yield RawRow(f"{source.path}:{number}", value)

    return rows(), [source.path, source.name, source.split, column, loaded._fingerprint]


def _name(source: PromptSource, has_template: bool) -> str:
    match source.source:
        case "model":
            return MAGPIE if has_template else CONTINUATION
        case "demo":
            return "demo"
        case _:
            return Path(source.path or "").name


def _sizes(settings: DistillSettings, available: Sequence[int | None]) -> list[int]:
    """How many prompts each source gives: by weight, and all of a source that has fewer.

    Raises:
        InputError: there is no number of prompts for those that the model writes.
    """
    if settings.num_prompts is None:
        if None in available:
            raise InputError(
                "num_prompts: must be given where the model writes prompts (source: model)"
            )
        return [size for size in available if size is not None]
    sizes = [0] * len(available)
    open_sources = set(range(len(available)))
    left = settings.num_prompts
    while left and open_sources:
        shares = _by_weight(left, {i: settings.sources[i].weight for i in sorted(open_sources)})
        for i, share in shares.items():
            limit = available[i]
            taken = share if limit is None else min(share, limit - sizes[i])
            sizes[i] += taken
            left -= taken
            if limit is not None and sizes[i] == limit:
                open_sources.discard(i)
    if left:
        warn(f"the sources hold {sum(sizes)} prompts; {settings.num_prompts} were asked for")
    return sizes


def _by_weight(total: int, weights: dict[int, float]) -> dict[int, int]:
    """Whole numbers in proportion to ``weights`` that add up to ``total``: largest remainders."""
    whole = sum(weights.values())
    exact = {i: total * weight / whole for i, weight in weights.items()}
    shares = {i: int(share) for i, share in exact.items()}
    by_rest = sorted(weights, key=lambda i: (shares[i] - exact[i], i))
    for i in by_rest[: total - sum(shares.values())]:
        shares[i] += 1
    return shares


def _interleaved(sizes: Sequence[int]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Which source each prompt is of, and its place there: every stretch has the mixture's shares.

    Returns:
        int16 [N] and int64 [N].
    """
    which = np.repeat(np.arange(len(sizes), dtype=np.int16), sizes)
    places = np.concatenate([np.arange(size) for size in sizes]) if sizes else np.zeros(0, np.int64)
    when = np.concatenate([(np.arange(size) + 0.5) / max(size, 1) for size in sizes])
    order = np.argsort(when, kind="stable")
    return which[order], places[order]
