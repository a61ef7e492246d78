"""``medusa-train card``: the model card of a run's heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from medusa_train.cli.app import Json


def card(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    base_model_id: Annotated[
        str | None,
        typer.Option(help="Id of the base model on the hub. Default: the recipe's, else its name."),
    ] = None,
    license_id: Annotated[
        str | None,
        typer.Option(
            "--license",
            help="Licence of the base model, such as apache-2.0. Default: the recipe's, else what "
            "the base model's own card says.",
        ),
    ] = None,
    languages: Annotated[
        list[str] | None,
        typer.Option("--language", help="Code of a language, such as en. May be given many times."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write the model card of a run's heads, RUN/heads/README.md, with its plots beside it.

    The stage card of a run does the same; this adds what was measured after it, such as RUN/report
    by medusa-eval speedup. What is not known is left out.
    """
    from medusa_train.card.of_run import write_run_card
    from medusa_train.run_dir import RunDir

    files = write_run_card(
        RunDir(run),
        base_model_id=base_model_id,
        license_id=license_id,
        languages=languages or (),
    )
    if as_json:
        typer.echo(json.dumps({"files": [str(file) for file in files]}, ensure_ascii=False))
        return
    for file in files:
        typer.echo(str(file))
