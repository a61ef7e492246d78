"""``medusa-train``: check recipes and run them."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from medusa_train.cli.app import Overrides, make_app, print_errors
from medusa_train.errors import InputError

app = make_app("Train Medusa heads for a causal language model.", name="medusa-train")


class Stage(enum.StrEnum):
    """The stages of a run, in their order."""

    DATA = "data"
    DISTILL = "distill"
    HIDDEN_STATES = "hidden-states"
    TRAIN = "train"
    ACCURACY = "accuracy"


@app.command()
def run(
    recipe: Annotated[Path, typer.Argument(help="A YAML file.")],
    overrides: Overrides = None,
    only: Annotated[Stage | None, typer.Option(help="Run this stage and no other.")] = None,
    start: Annotated[
        Stage | None, typer.Option("--from", help="Run this stage again, and all after it.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would run and what would be skipped.")
    ] = False,
) -> None:
    """Run the stages of a recipe.

    A stage whose output is there already, made from the same things, is skipped.
    """
    from medusa_train.recipe.load import load_recipe

    if only is not None and start is not None:
        raise InputError("--only and --from: give one of them, not both")
    loaded = load_recipe(recipe, overrides or ())
    loaded.require_files()

    from medusa_train.pipeline import run_pipeline

    finished = run_pipeline(
        loaded,
        only=only.value if only else None,
        start=start.value if start else None,
        dry_run=dry_run,
    )
    if not dry_run and only in {None, Stage.ACCURACY}:
        _print_accuracy(finished.report)


def _print_accuracy(directory: Path) -> None:
    from medusa_train.evaluate.report import REPORT_FILE, summary_text
    from medusa_train.run_dir import read_json

    path = directory / REPORT_FILE
    if path.exists():
        typer.echo(summary_text(read_json(path)))
        typer.echo(f"\nreport: {directory / 'heads_accuracy.html'}")


@app.command()
def validate(
    recipes: Annotated[list[Path], typer.Argument(metavar="RECIPE", help="YAML files.")],
    overrides: Overrides = None,
) -> None:
    """Check recipes and print all mistakes.

    Each mistake is one line with its file and line. Neither weights nor torch are loaded.
    """
    from medusa_train.recipe.load import load_recipe

    failed = False
    for path in recipes:
        try:
            loaded = load_recipe(path, overrides or ())
        except InputError as error:
            print_errors(error)
            failed = True
        else:
            absent = f" ({len(loaded.missing)} of its files not here)" if loaded.missing else ""
            typer.echo(f"{path}: ok{absent}")
    if failed:
        raise typer.Exit(InputError.exit_code)


def main() -> None:
    """The console script."""
    app()
