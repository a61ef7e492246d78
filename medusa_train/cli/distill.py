"""``medusa-distill``: let the base model write its own training data, and look at data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from medusa_train.cli import data_files
from medusa_train.cli.app import Json, Overrides, make_app
from medusa_train.errors import InputError

app = make_app("Make and inspect training conversations.", name="medusa-distill")
app.command()(data_files.inspect)
app.command()(data_files.convert)


@app.command()
def generate(
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory of the data set.")],
    config: Annotated[
        Path | None,
        typer.Argument(help="A YAML file with base_model and data.distill, or flags alone."),
    ] = None,
    overrides: Overrides = None,
    base_model: Annotated[str | None, typer.Option(help="base_model.name_or_path")] = None,
    dtype: Annotated[str | None, typer.Option(help="base_model.dtype")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="File of prompts; none: the model writes them.")
    ] = None,
    num_prompts: Annotated[int | None, typer.Option(help="How many prompts.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of the answers; 0: greedy.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows decoded together.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all draws.")] = None,
    as_json: Json = False,
) -> None:
    """Let the base model write conversations, with or without a file of prompts.

    Killed or interrupted, the same command goes on where it stopped. Every key that has no flag is
    set with --set, such as --set data.distill.top_p=0.9.
    """
    from medusa_train.recipe.load import load_distill_config

    flags = {
        "base_model.name_or_path": base_model,
        "base_model.dtype": dtype,
        "data.distill.prompts": None if prompts is None else str(prompts),
        "data.distill.num_prompts": num_prompts,
        "data.distill.temperature": temperature,
        "data.distill.max_new_tokens": max_new_tokens,
        "data.distill.batch_size": batch_size,
        "data.distill.seed": seed,
    }
    given = [f"{key}={json.dumps(value)}" for key, value in flags.items() if value is not None]
    if config is None and base_model is None:
        raise InputError("give a CONFIG, or --base-model with --prompts or --num-prompts")
    loaded = load_distill_config(config, [*given, *(overrides or ())])
    loaded.require_files()

    from medusa_train.stages import generate_dataset

    manifest = generate_dataset(loaded, output=output)
    if as_json:
        typer.echo(json.dumps(manifest))
    else:
        typer.echo(f"{output}: {manifest['num_conversations']} conversations")


def main() -> None:
    """The console script."""
    app()
