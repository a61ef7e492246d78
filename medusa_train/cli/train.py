"""``medusa-train``: check recipes and run them."""

from __future__ import annotations

import enum
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from medusa_train.cli.app import Json, Overrides, make_app, print_errors
from medusa_train.cli.card import card
from medusa_train.cli.export import export, import_heads, verify
from medusa_train.cli.hub import push
from medusa_train.cli.options import Dtype, TrustRemoteCode
from medusa_train.cli.plot import plot
from medusa_train.errors import InputError

if TYPE_CHECKING:
    from medusa_train.plan.estimate import Estimate

app = make_app("Train Medusa heads for a causal language model.", name="medusa-train")


class Stage(enum.StrEnum):
    """The stages of a run, in their order."""

    DATA = "data"
    DISTILL = "distill"
    HIDDEN_STATES = "hidden-states"
    TRAIN = "train"
    ACCURACY = "accuracy"
    TREE = "tree"
    QUALITY = "quality"
    EXPORT = "export"
    CARD = "card"


@app.command()
def run(
    recipe: Annotated[Path, typer.Argument(help="A YAML file.")],
    overrides: Overrides = None,
    only: Annotated[Stage | None, typer.Option(help="Run this stage and no other.")] = None,
    start: Annotated[
        Stage | None, typer.Option("--from", help="Run this stage again, and all after it.")
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes to start, one per device; without it, one for each accelerator here.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would run and what would be skipped.")
    ] = False,
) -> None:
    """Run the stages of a recipe.

    A stage whose output is there already, made from the same things, is skipped. With several
    accelerators the command starts itself once for each of them, as torchrun does; under torchrun,
    accelerate or deepspeed it is one of their processes.
    """
    from medusa_train.recipe.load import load_recipe

    if only is not None and start is not None:
        raise InputError("--only and --from: give one of them, not both")
    loaded = load_recipe(recipe, overrides or ())
    loaded.require_files()

    from medusa_train.launch import processes_to_start, run_again

    num_processes = 0 if dry_run else processes_to_start(loaded.recipe, devices=devices)
    if num_processes:
        # Each process has said itself how it ended.
        sys.exit(run_again(sys.argv[1:], num_processes=num_processes))

    from medusa_train.console import is_main_process
    from medusa_train.pipeline import run_pipeline

    finished = run_pipeline(
        loaded,
        only=only.value if only else None,
        start=start.value if start else None,
        dry_run=dry_run,
    )
    if not dry_run and only in {None, Stage.ACCURACY} and is_main_process():
        _print_accuracy(finished.report)


def _print_accuracy(directory: Path) -> None:
    from medusa_train.evaluate.report import REPORT_FILE, summary_text
    from medusa_train.json_values import read_json

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


@app.command()
def plan(
    recipe: Annotated[Path, typer.Argument(help="A YAML file.")],
    overrides: Overrides = None,
    devices: Annotated[
        int | None,
        typer.Option(min=1, help="Devices to train on; without it, those of this machine."),
    ] = None,
    benchmark: Annotated[
        bool, typer.Option(help="Measure this device for a few seconds, to say how long it takes.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Say what a recipe needs: parameters, memory, operations, disk and time.

    The base model's config is read and no weights are. What does not fit is a warning that says
    what to set.
    """
    from medusa_train.recipe.load import load_recipe

    loaded = load_recipe(recipe, overrides or ())

    from medusa_train.console import warn
    from medusa_train.planning import plan_recipe

    estimate = plan_recipe(loaded, devices=devices, with_benchmark=benchmark)
    for warning in estimate.warnings:
        warn(warning)
    if as_json:
        typer.echo(json.dumps(estimate.as_dict(), ensure_ascii=False))
    else:
        _print_plan(estimate)


def _print_plan(estimate: Estimate) -> None:
    from rich.console import Console

    from medusa_train.plan.tables import plan_tables

    console = Console(highlight=False, soft_wrap=True)
    for part in plan_tables(estimate):
        console.print(part, markup=not isinstance(part, str))


@app.command()
def merge(
    run: Annotated[Path, typer.Argument(help="A run directory, or a heads directory.")],
    output: Annotated[Path, typer.Argument(help="The directory to write.")],
    base_model: Annotated[
        str | None,
        typer.Option(help="The original base. Default: the one that the heads name."),
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="Type of the weights. Default: the original's.")
    ] = Dtype.AUTO,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Json = False,
) -> None:
    """Write the base model that was trained with the heads as a plain model directory.

    For method: medusa2. The heads go with it: give it as --base-model.
    """
    from medusa_train.merging import merge_run

    result = merge_run(
        run,
        output,
        base_model=base_model,
        dtype=dtype.value,
        trust_remote_code=trust_remote_code,
    )
    if as_json:
        typer.echo(json.dumps(result))
    else:
        typer.echo(f"{output}: the trained base model, {result['fingerprint']}")


app.command()(export)
app.command("import")(import_heads)
app.command()(verify)
app.command()(plot)
app.command()(card)
app.command()(push)


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
