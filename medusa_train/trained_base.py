"""The base model that heads belong to: as it was, or with what it was trained to with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from medusa_train.base_model.fingerprint import base_fingerprint
from medusa_train.base_model.load import BaseModel, load_base_model
from medusa_train.errors import InputError
from medusa_train.heads.checkpoint import read_spec
from medusa_train.heads.config import BaseIdentity


def load_trained_base(heads: Path, base_model: str | None = None, **options: Any) -> BaseModel:
    """Load the base model of some heads.

    Args:
        heads: a heads directory.
        base_model: hub id or directory; None for the one that the heads name. Whether it is the
            right one the heads' loader checks by its fingerprint.
        **options: of :func:`medusa_train.base_model.load.load_base_model`.

    Raises:
        InputError: no such heads or base, or what the base was trained to is not there.
    """
    _, identity = read_spec(heads)
    if base_model is not None:
        # Another name may be a copy without the GGUF file.
        others = {name: value for name, value in options.items() if name not in _OF_THE_NAMED}
        return load_base_model(base_model, **others)
    named = {"gguf_file": identity.gguf_file, "revision": identity.revision}
    if identity.trained is None:
        return load_base_model(identity.name_or_path, **{**options, **named})
    trained = _trained_directory(heads, identity)
    if (trained / "config.json").exists():
        others = {name: value for name, value in options.items() if name not in _OF_THE_NAMED}
        return load_base_model(str(trained), **others)
    _check_original(heads, identity)
    return load_base_model(identity.name_or_path, **{**options, **named}, trained=trained)


_OF_THE_NAMED = frozenset({"gguf_file", "revision"})
"""Options that go with the name of a base, and with no other name."""


def _trained_directory(heads: Path, identity: BaseIdentity) -> Path:
    assert identity.trained is not None
    directory = (heads / identity.trained.directory).resolve()
    if not directory.is_dir():
        raise InputError(
            f"{heads}: heads of a base model that was trained with them, and {directory} is not "
            "there; give the trained base that medusa-train merge wrote (--base-model)"
        )
    return directory


def _check_original(heads: Path, identity: BaseIdentity) -> None:
    assert identity.trained is not None
    found = base_fingerprint(identity.name_or_path, revision=identity.revision)
    if found != identity.trained.original_fingerprint:
        raise InputError(
            f"{heads}: the base model {identity.name_or_path} has fingerprint {found}, and what "
            f"was trained belongs to {identity.trained.original_fingerprint}; give the trained "
            "base that medusa-train merge wrote (--base-model)"
        )
