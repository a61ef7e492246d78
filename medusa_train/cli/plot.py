"""``medusa-train plot``: the training curves of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from medusa_train.cli.app import Json


def plot(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN", help="Run directories; several are compared.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(help="Write here. Default: the directory report of the first run."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Draw the training curves of a run as PNG and HTML.

    The run may still be going on. Several runs are drawn into the same pictures.
    """
    from medusa_train.training_curves import as_dict, plot_runs

    written = plot_runs(runs, output=output)
    if as_json:
        typer.echo(json.dumps(as_dict(written), ensure_ascii=False))
        return
    for path in (written.page, *written.pictures):
        typer.echo(str(path))
