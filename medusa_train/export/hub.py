"""A directory → a repository of the Hugging Face hub: exactly the files that are listed.

The token comes from the environment (``HF_TOKEN``) or from the login that is stored on this
machine, goes into requests alone, and is taken out of every text that a server sends back.
"""

from __future__ import annotations

import os
import stat
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.constants import is_offline_mode
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    disable_progress_bars,
    validate_repo_id,
)

from medusa_train.console import log, warn
from medusa_train.errors import InputError, MedusaTrainError

# The base of all that the client raises for requests; its own package has no name for it.
HTTPError: type[Exception] = HfHubHTTPError.__bases__[0]
_WEIGHTS = (".safetensors", ".pt")
_REMEDIES = {
    401: "the hub does not accept the token (401); make one that may write, and set HF_TOKEN or "
    "run `hf auth login`",
    403: "the token may not write there (403); it needs write access to this owner's repositories",
    404: "the hub has no such repository for this token (404); check the name and the token",
}


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file to send: its name in the repository, and its bytes."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class Push:
    """What was sent, or in a dry run what would be.

    Attributes:
        repo: ``OWNER/NAME``.
        files: every one.
        private: whether only those with access see the repository.
        url: of the repository; None in a dry run.
        commit: its new commit; None in a dry run.
    """

    repo: str
    files: tuple[ListedFile, ...]
    private: bool
    url: str | None = None
    commit: str | None = None


def push_to_hub(
    directory: Path,
    repo: str,
    *,
    files: Sequence[str] | None = None,
    private: bool = True,
    dry_run: bool = False,
    message: str = "Upload Medusa heads",
) -> Push:
    """Send files to a repository in one commit, and make the repository if there is none.

    Args:
        directory: where the files are.
        repo: ``OWNER/NAME``.
        files: names below ``directory``; None for those of :func:`files_to_push`.
        private: make a private repository, and refuse one that is there and public.
        dry_run: list the files; nothing is asked of the hub and nothing sent.
        message: of the commit.

    Raises:
        InputError: a name or file that cannot be meant, offline mode, no token, a token without the
            right, or a public repository where a private one is wanted.
        MedusaTrainError: the hub cannot be reached, or failed.
    """
    check_repo_name(repo)
    listed = files_to_push(directory) if files is None else list_files(directory, files)
    if dry_run:
        return Push(repo, listed, private)
    private = check_hub(repo, private=private)
    api = _api()
    with _explained(repo):
        api.create_repo(repo, private=private, exist_ok=True)
        operations = [CommitOperationAdd(file.name, str(directory / file.name)) for file in listed]
        log(f"sending {len(listed)} files to {repo}")
        with _as_our_warnings():
            commit = api.create_commit(repo, operations, commit_message=message)
        info = api.model_info(repo, revision=commit.oid)
    there = {sibling.rfilename for sibling in info.siblings or ()}
    if missing := [file.name for file in listed if file.name not in there]:
        raise MedusaTrainError(
            f"{repo}: the hub left out {', '.join(missing)}; look at the .gitignore of the "
            "repository"
        )
    return Push(repo, listed, private, url=f"{api.endpoint}/{repo}", commit=commit.oid)


def check_repo_name(repo: str) -> None:
    """Refuse what is no ``OWNER/NAME``.

    Raises:
        InputError: it is none.
    """
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise InputError(f"{repo}: is no name of a repository: {error}") from error
    if "/" not in repo:
        raise InputError(f"{repo}: is no name of a repository; give OWNER/NAME")


def check_hub(repo: str, *, private: bool) -> bool:
    """Find out before long work whether ``repo`` can be written to; nothing is changed.

    Returns:
        Whether the repository is private, or will be.

    Raises:
        InputError: offline mode, no token, a wrong one, or a public repository where a private one
            is wanted.
        MedusaTrainError: the hub cannot be reached, or failed.
    """
    if is_offline_mode():
        raise InputError(
            f"{repo}: nothing can be sent in offline mode; unset HF_HUB_OFFLINE, or look at the "
            "files with --dry-run"
        )
    if get_token() is None:
        raise InputError(
            f"{repo}: there is no token for the hub; set HF_TOKEN or run `hf auth login`"
        )
    with _explained(repo):
        try:
            info = _api().model_info(repo)
        except RepositoryNotFoundError:
            return private  # what is not there, or not for this token, create_repo says better
    if private and not info.private:
        raise InputError(
            f"{repo}: is there and public, so everyone would see the files; give --public, or "
            "another name"
        )
    return bool(info.private)


def files_to_push(directory: Path) -> tuple[ListedFile, ...]:
    """What of a directory is sent where no list says it: all but hidden files and ``.pt`` files.

    Raises:
        InputError: no directory of heads or of an export, or a link that leads out of it.
    """
    if not directory.is_dir():
        raise InputError(f"{directory}: no such directory")
    if not any(path.suffix in _WEIGHTS for path in directory.iterdir()):
        raise InputError(
            f"{directory}: no weights in it; give a heads directory or what an export wrote"
        )
    names: list[str] = []
    left_out: list[str] = []
    for root, folders, files in os.walk(directory):
        below = Path(root).relative_to(directory)
        left_out += [f"{below / name}/" for name in folders if name.startswith(".")]
        folders[:] = [name for name in folders if not name.startswith(".")]
        # os.walk does not follow a link to a folder, so it is looked at like a file.
        links = [name for name in folders if (Path(root) / name).is_symlink()]
        for name in [*files, *links]:
            kept = not (name.startswith(".") or name.endswith(".pt"))
            (names if kept else left_out).append((below / name).as_posix())
    if left_out:
        log(f"{directory}: not sent: {', '.join(sorted(left_out))}")
    return list_files(directory, names)


def list_files(directory: Path, names: Sequence[str]) -> tuple[ListedFile, ...]:
    """The files of these names, sorted, each a plain file that lies in ``directory``.

    Raises:
        InputError: one is hidden, elsewhere, not there, or no plain file.
    """
    root = directory.resolve()
    listed = []
    for name in sorted(set(names)):
        path = directory / name
        parts = PurePosixPath(name).parts
        if Path(name).is_absolute() or any(part.startswith(".") for part in parts):
            raise InputError(f"{path}: hidden files and files elsewhere are not sent")
        if not path.resolve().is_relative_to(root):
            raise InputError(
                f"{path}: is a link that leads out of {directory}; put a copy in its place"
            )
        try:
            status = path.stat()
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path}: is no plain file; put a copy of the files in its place")
        listed.append(ListedFile(name, status.st_size))
    return tuple(listed)


def quiet_in_logs() -> None:
    """Switch the client's progress bars off where they do not go to a terminal."""
    if not sys.stderr.isatty():
        # In a log file each bar is one long line.
        disable_progress_bars()


def _api() -> HfApi:
    quiet_in_logs()
    return HfApi(library_name="medusa-train")


@contextmanager
def _as_our_warnings() -> Iterator[None]:
    """What the hub remarks on the model card is a line of ours."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        warn(" ".join(str(warning.message).split()))


@contextmanager
def _explained(repo: str) -> Iterator[None]:
    """Turn what the hub's client raises into one line that says what to do."""
    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in _REMEDIES:
            raise InputError(f"{repo}: {_REMEDIES[status]}") from None
        said = without_token(error.server_message or "no reason given")
        raise MedusaTrainError(f"{repo}: the hub answered {status}: {said}") from None
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        # The client's own texts; one for a failed upload names the file and wraps the cause.
        cause = error.__cause__ or error
        said = without_token(f"{error}" if cause is error else f"{error} {cause}")
        raise MedusaTrainError(
            f"{repo}: the files could not be sent: {said}; what was committed before is as it was"
        ) from None


def without_token(text: str) -> str:
    """One line of a text from outside, with the token, should it be there, taken out."""
    token = get_token()
    return " ".join((text.replace(token, "…") if token else text).split())
