"""Heads of a repository of the Hugging Face hub → a directory on this machine, to import from."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from medusa_train.console import log
from medusa_train.errors import InputError, MedusaTrainError
from medusa_train.export.hub import HTTPError, quiet_in_logs, without_token

_READ = ("config.json", "*.index.json", "medusa_choices.json")
_WEIGHTS = ("*.safetensors", "*.pt", "*.pth", "*.bin")


def local_directory(source: str, *, revision: str | None = None, file: str | None = None) -> Path:
    """``source`` where it is a directory, else the files of that repository that hold heads.

    They are fetched into the hub's cache on this machine. Nothing in them is run.

    Args:
        source: a directory, or ``OWNER/NAME`` on the hub.
        revision: a branch, tag or commit of the repository.
        file: fetch this weights file alone.

    Raises:
        InputError: neither of both is there, or the hub cannot be reached.
        MedusaTrainError: the hub failed.
    """
    directory = Path(source)
    if directory.exists() or not _is_repository(source):
        if revision is not None:
            raise InputError(
                f"--revision: is for a repository of the hub, and {source} is none; leave it out"
            )
        return directory
    quiet_in_logs()
    log(f"fetching {source} from the hub")
    try:
        found = snapshot_download(
            source,
            revision=revision,
            allow_patterns=[*_READ, *(_WEIGHTS if file is None else [file])],
            ignore_patterns=["*/*"],
            library_name="medusa-train",
        )
    except GatedRepoError:
        raise InputError(
            f"{source}: is a gated repository of the hub; ask for access on its page, and set "
            "HF_TOKEN or run `hf auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise InputError(
            f"{source}: no such directory, and the hub has no such repository for this token; "
            "check the name, and set HF_TOKEN for a private one"
        ) from None
    except RevisionNotFoundError:
        raise InputError(
            f"--revision: {source} has no {revision or 'main'}; give a branch, a tag or a commit"
        ) from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        said = without_token(error.server_message or "no reason given")
        raise MedusaTrainError(f"{source}: the hub answered {status}: {said}") from None
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{source}: no such directory, and it could not be fetched from the hub: "
            f"{without_token(str(error).splitlines()[0])}; check the name and the network"
        ) from None
    return Path(found)


def _is_repository(source: str) -> bool:
    try:
        validate_repo_id(source)
    except HFValidationError:
        return False
    return source.count("/") == 1
