"""The run directory: paths, atomic writes, manifests, fingerprints and the lock.

Every finished file is written under a temporary name in its own directory and renamed, so that a
file that exists is complete (design: files between stages).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_train.errors import InputError, MedusaTrainError
from medusa_train.json_values import FINGERPRINT_LENGTH


@dataclass(frozen=True, slots=True)
class RunDir:
    """The files of one run, all below ``root``."""

    root: Path

    @property
    def recipe(self) -> Path:
        return self.root / "recipe.resolved.yaml"

    @property
    def manifest(self) -> Path:
        return self.root / "manifest.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def hidden_states(self) -> Path:
        return self.root / "hidden_states"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def heads(self) -> Path:
        return self.root / "heads"

    @property
    def adapters(self) -> Path:
        return self.root / "adapters"

    @property
    def base(self) -> Path:
        return self.root / "base"

    @property
    def warm_up(self) -> RunDir:
        return RunDir(self.root / "warm_up")

    @property
    def report(self) -> Path:
        return self.root / "report"

    @property
    def exports(self) -> Path:
        return self.root / "exports"


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; rename it to ``path`` when the block succeeds.

    Raises:
        MedusaTrainError: the file cannot be written (disk full, no permission).
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
    except OSError as error:
        raise MedusaTrainError(f"{path}: cannot be written: {error.strerror}") from error
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp makes files that only their owner can read; a result has the user's own umask.
        temporary.chmod(0o666 & ~_umask())
        _sync(temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise MedusaTrainError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary directory beside ``path`` that takes its place when the block succeeds.

    A directory that was there is replaced; it is set aside first, since a rename cannot replace a
    directory that has files in it.

    Raises:
        MedusaTrainError: the directory cannot be made (no permission, a file in the way).
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise MedusaTrainError(f"{path}: cannot be written: {error.strerror}") from error
    try:
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        if path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
            os.replace(path, old / "old")
            os.replace(temporary, path)
            shutil.rmtree(old)
        else:
            os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` to ``path`` atomically as indented JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_json_lines(path: Path, values: Iterable[Any]) -> None:
    """Write each of ``values`` on a line of ``path``, atomically."""
    text = "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)
    write_text(path, text)


def read_json_lines(path: Path) -> list[Any]:
    """The lines of an append-only file; a last one that a kill cut short is left out.

    A file that is not there has no lines.
    """
    if not path.exists():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def file_fingerprint(path: Path) -> str:
    """A short hash of a whole file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:FINGERPRINT_LENGTH]


def check_writable(directory: Path) -> None:
    """Make ``directory`` and prove that files can be written there, before long work begins.

    Raises:
        InputError: it cannot be made or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise InputError(f"{directory}: cannot be written: {error.strerror}") from error


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the only lock on ``directory``; the kernel releases it when the process dies.

    Raises:
        InputError: another process works in this directory, or it cannot be written.
    """
    check_writable(directory)
    path = directory / ".lock"
    try:
        opened = path.open("w")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error
    with opened as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(
                f"{directory}: another process is working here; wait for it or use another one"
            ) from error
        yield


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
