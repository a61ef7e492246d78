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
            value = value.get(part) if isinstance(value, dict) else None
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
    section = source.value
    for depth, part in enumerate(parts[:-1], start=1):
        if section.get(part) is None:
            section[part] = {}
            source.places.setdefault(parts[:depth], place)
        section = section[part]
        if not isinstance(section, dict):
            message = f"{'.'.join(parts[:depth])} is no section, so nothing in it can be set"
            source.mistakes.append(Mistake(place, parts, message))
            return
    section[parts[-1]] = document.value
    # What the file said about the old value is gone with it.
    for key in [key for key in source.places if key[: len(parts)] == parts]:
        del source.places[key]
    source.places[parts] = place
