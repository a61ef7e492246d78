"""``medusa-train push``, and what ``export`` does with the hub: the same for every target."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medusa_train.cli.app import Json
from medusa_train.errors import InputError

if TYPE_CHECKING:
    from medusa_train.export.hub import ListedFile, Push

PushTo = Annotated[
    str | None,
    typer.Option(
        metavar="OWNER/NAME",
        help="Send the files to this repository of the hub too. The token is that of HF_TOKEN or "
        "of the stored login.",
    ),
]
IsPublic = Annotated[
    bool, typer.Option("--public", help="A public repository. Default: a private one.")
]
IsDryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="List the files with their sizes; write and send nothing."),
]


@dataclass(frozen=True, slots=True)
class Export:
    """An export that is being made.

    Attributes:
        directory: where its files go.
        output: where the user wants them.
        repo: of the hub; None for none.
        public: whether everyone may see them there.
        dry_run: whether they only are listed.
    """

    directory: Path
    output: Path
    repo: str | None
    public: bool
    dry_run: bool

    def finish(self, files: Sequence[str], *, as_json: bool, facts: Mapping[str, object]) -> None:
        """Send what was written, or list what would be, and say so, in JSON with ``facts``."""
        from medusa_train.export.hub import list_files, push_to_hub

        result: dict[str, object] = {"output": str(self.output), **facts, "files": list(files)}
        # A base model in the directory may have come with hidden files.
        names = [name for name in files if not any(p.startswith(".") for p in name.split("/"))]
        if self.repo is not None:
            sent = push_to_hub(
                self.directory,
                self.repo,
                files=names,
                private=not self.public,
                dry_run=self.dry_run,
            )
            result["hub"] = asdict(sent)
            if not as_json:
                _show(sent.files, _fate(sent))
        elif self.dry_run and not as_json:
            _show(list_files(self.directory, names), "nothing was written")
        if as_json:
            typer.echo(json.dumps({**result, "dry_run": self.dry_run}, ensure_ascii=False))


@contextmanager
def exported(output: Path, *, repo: str | None, public: bool, dry_run: bool) -> Iterator[Export]:
    """A place for an export: ``output``, or in a dry run one that goes when it is listed.

    Raises:
        InputError: options that do not go together, or a repository that cannot be written to.
    """
    if public and repo is None:
        raise InputError("--public: is for what is sent to the hub; give --push-to-hub with it")
    if repo is not None:
        from medusa_train.export.hub import check_hub, check_repo_name

        check_repo_name(repo)
        if not dry_run:
            check_hub(repo, private=not public)
    if not dry_run:
        yield Export(output, output, repo, public, dry_run)
        return
    parent = next(path for path in output.absolute().parents if path.is_dir())
    with tempfile.TemporaryDirectory(prefix=".dry-run.", dir=parent) as temporary:
        yield Export(Path(temporary) / output.name, output, repo, public, dry_run)


def push(
    directory: Annotated[Path, typer.Argument(help="A heads directory, or what an export wrote.")],
    repo: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="Repository of the hub.")],
    public: IsPublic = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the files with their sizes; send nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Send a directory of heads to the hub, in one commit.

    Hidden files and .pt files are left out. The token is that of HF_TOKEN or of the stored login.
    """
    from medusa_train.export.hub import push_to_hub

    sent = push_to_hub(directory, repo, private=not public, dry_run=dry_run)
    if as_json:
        typer.echo(json.dumps({**asdict(sent), "dry_run": dry_run}))
    else:
        _show(sent.files, _fate(sent))


def _show(files: Sequence[ListedFile], fate: str) -> None:
    width = max(len(f"{file.size:,}") for file in files)
    for file in files:
        typer.echo(f"{file.size:>{width},}  {file.name}")
    typer.echo(f"{len(files)} files, {sum(file.size for file in files):,} bytes; {fate}")


def _fate(push: Push) -> str:
    kind = "private" if push.private else "public"
    if push.url is None:
        return f"would go to {push.repo} ({kind}); nothing was sent"
    return f"sent to {push.url} ({kind}), commit {push.commit}"
