"""What the base model's own card says: its id on the hub, its licence, its languages.

What is not known is None, and the card of the heads leaves it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from medusa_train.console import log

CARD_FILE = "README.md"
# The base of all that the client raises for requests; its own package has no name for it.
_HTTPError: type[Exception] = HfHubHTTPError.__bases__[0]
_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class BaseCard:
    """The base model as the hub knows it.

    Attributes:
        name: what to call it: the id on the hub, else the last part of its path.
        hub_id: on the hub.
        license: as the hub abbreviates it; ``other`` has a name and a link.
        license_name: of a licence that the hub has no abbreviation for.
        license_link: to its text.
        languages: their codes.
    """

    name: str
    hub_id: str | None = None
    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    languages: tuple[str, ...] = ()


def read_base_card(
    name_or_path: str,
    *,
    revision: str | None = None,
    hub_id: str | None = None,
    license_id: str | None = None,
    languages: Sequence[str] = (),
) -> BaseCard:
    """Look at the base model's card, in its directory or on the hub.

    Args:
        name_or_path: hub id or directory.
        revision: on the hub.
        hub_id: of a base in a directory, where the user tells.
        license_id: of the base, where the user tells.
        languages: of the heads, where the user tells.
    """
    directory = Path(name_or_path)
    is_guessed = hub_id is None
    if hub_id is None and not directory.exists() and _is_hub_id(name_or_path):
        hub_id = name_or_path
    data: dict[str, Any] = {}
    try:
        if (directory / CARD_FILE).is_file():
            data = _metadata((directory / CARD_FILE).read_text(encoding="utf-8"))
        elif hub_id is not None:
            own = revision if hub_id == name_or_path else None
            path = hf_hub_download(hub_id, CARD_FILE, revision=own, etag_timeout=_SECONDS)
            data = _metadata(Path(path).read_text(encoding="utf-8"))
    except RepositoryNotFoundError:
        # A directory that is elsewhere may be named like a repository.
        log(f"{hub_id}: the hub has no such model; the card leaves its licence out")
        hub_id = None if is_guessed else hub_id
    except (_HTTPError, OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split()).split(". ")[0]
        log(f"{name_or_path}: its own card could not be read, so its licence is left out: {reason}")
    if license_id is None:
        license_id = _text(data.get("license"))
        more = {key: _text(data.get(key)) for key in ("license_name", "license_link")}
    else:
        more = {}
    return BaseCard(
        name=hub_id or directory.name or name_or_path,
        hub_id=hub_id,
        license=license_id,
        languages=tuple(languages) or _texts(data.get("language")),
        **more,
    )


def _is_hub_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _metadata(text: str) -> dict[str, Any]:
    data: dict[str, Any] = ModelCard(text, ignore_metadata_errors=True).data.to_dict()
    return data


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _texts(value: Any) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(text for text in map(_text, values) if text is not None)
