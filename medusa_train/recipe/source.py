"""The values of a recipe file and of ``--set`` overrides, and where each of them was written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medusa_train.errors import InputError
from medusa_train.recipe.yaml_reader import Key, read, show

_AFTER_ALL_LINES = 10**9


@dataclass(frozen=True, slots=True)
class Place:
    """Where a value was written, as a message shows it; places sort by ``order``."""

    order: int
    text: str


@dataclass(frozen=True, slots=True)
class Mistake:
    """What is wrong with the value of ``key``."""

    place: Place
    key: Key
    message: str

    def __str__(self) -> str:
        name = ".".join(str(part) for part in self.key)
        return ": ".join(part for part in (self.place.text, name, self.message) if part)


@dataclass(slots=True)
class Source:
    """Plain values with their places; ``value`` is ``None`` when the file is no section."""

    path: Path | None
    value: dict[str, Any] | None = field(default_factory=dict)
    places: dict[Key, Place] = field(default_factory=dict)
    mistakes: list[Mistake] = field(default_factory=list)

    def place_of(self, key: Key) -> Place:
        """Where ``key``, or the closest section around it, was written."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.places:
                return self.places[key[:length]]
        return Place(0, str(self.path) if self.path else "")

    def get(self, key: Key) -> Any:
        """The value of ``key``, or ``None``."""
        value: Any = self.value
        for part in key:
            value = _child(value, part)
        return value


def read_source(path: Path | None, overrides: Sequence[str]) -> Source:
    """Read the file at ``path``, if any, then apply ``overrides`` of the form ``a.b=value``."""
    source = Source(path)
    if path is not None:
        _read_file(path, source)
    for number, override in enumerate(overrides):
        place = Place(_AFTER_ALL_LINES + number, f"--set {override}")
        _apply(override, source, place=place)
    return source


def read_text(path: Path) -> str:
    """The text of the file at ``path``.

    Raises:
        InputError: it is missing, no file, not readable or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text") from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error


def _read_file(path: Path, source: Source) -> None:
    document = read(read_text(path))
    for key, line in document.lines.items():
        source.places[key] = Place(line, f"{path}:{line}")
    source.places.pop((), None)
    for problem in document.problems:
        place = Place(problem.line, f"{path}:{problem.line}" if problem.line else str(path))
        source.mistakes.append(Mistake(place, problem.key, problem.message))
    if isinstance(document.value, dict):
        source.value = document.value
        return
    source.value = None
    if not document.problems:
        got = "nothing" if document.value is None else show(document.value)
        message = f"must be sections of keys and values; got {got}"
        source.mistakes.append(Mistake(Place(0, str(path)), (), message))


def _apply(override: str, source: Source, *, place: Place) -> None:
    name, equals, text = override.partition("=")
    parts = tuple(name.split("."))
    if not equals or not all(parts):
        message = "must be KEY=VALUE, such as heads.num_heads=3"
        source.mistakes.append(Mistake(place, (), message))
        return
    document = read(text)
    for problem in document.problems:
        source.mistakes.append(Mistake(place, (*parts, *problem.key), problem.message))
    if source.value is None:
        return
    section: Any = source.value
    key: Key = ()
    for part in parts[:-1]:
        key = (*key, _index(section, part))
        if isinstance(section, dict) and section.get(part) is None:
            section[part] = {}
            source.places.setdefault(key, place)
        section = _child(section, key[-1])
        if not isinstance(section, dict | list):
            message = f"{'.'.join(map(str, key))} is no section, so nothing in it can be set"
            source.mistakes.append(Mistake(place, parts, message))
            return
    last = _index(section, parts[-1])
    if isinstance(section, list) and not (isinstance(last, int) and last < len(section)):
        message = f"a list of {len(section)} has no item {parts[-1]!r}; the first is 0"
        source.mistakes.append(Mistake(place, parts, message))
        return
    section[last] = document.value
    key = (*key, last)
    # What the file said about the old value is gone with it.
    for old in [old for old in source.places if old[: len(key)] == key]:
        del source.places[old]
    source.places[key] = place


def _index(section: Any, part: str) -> str | int:
    """``part`` of a key as ``section`` has it: the items of a list are numbers."""
    return int(part) if isinstance(section, list) and part.isdecimal() else part


def _child(section: Any, part: str | int) -> Any:
    """The value of one part of a key, or ``None``."""
    if isinstance(section, dict):
        return section.get(part)
    if isinstance(section, list) and isinstance(part, int) and part < len(section):
        return section[part]
    return None
