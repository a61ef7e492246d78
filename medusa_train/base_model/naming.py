"""Is a base model's name a hub id, or the path of a directory that is not here?

The hub knows no paths, and asking it for one is slow: without a network it takes minutes.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from medusa_train.errors import InputError


def check_name(name_or_path: str) -> None:
    """Refuse what can only be a path and is none, before the hub is asked for it.

    ``OWNER/NAME`` is taken for a path too where a directory OWNER is here, unless the hub's cache
    has a model of that name.

    Raises:
        InputError: no such directory.
    """
    if Path(name_or_path).exists():
        return
    if _can_be_no_id(name_or_path):
        raise InputError(
            f"{name_or_path}: no such directory; give a model's directory, or a hub id such as "
            "OWNER/NAME"
        )
    parent = Path(name_or_path).parent
    if "/" in name_or_path and parent.is_dir() and not _is_cached(name_or_path):
        raise InputError(
            f"{name_or_path}: no such directory, and the directory {parent} is here; for a model "
            f"of the hub by that name, run hf download {name_or_path} first"
        )


def _can_be_no_id(name: str) -> bool:
    """Whether no model of the hub can have this name: ids are NAME or OWNER/NAME."""
    is_relative = name.split("/", 1)[0] in {".", "..", "~"}
    return is_relative or name.startswith("/") or name.count("/") > 1 or "\\" in name


def _is_cached(hub_id: str) -> bool:
    folder = repo_folder_name(repo_id=hub_id, repo_type="model")
    return (Path(constants.HF_HUB_CACHE) / folder).is_dir()
