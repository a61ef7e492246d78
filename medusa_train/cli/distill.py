"""``medusa-distill``: let the base model write its own training data, and look at data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from medusa_train.cli import data_files
from medusa_train.cli.app import Json, Overrides, make_app
from medusa_train.cli.options import MOST_DIGITS
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
    turns: Annotated[int | None, typer.Option(help="Turns of each conversation.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of the answers; 0: greedy.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows decoded together.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of all draws.")] = None,
    teacher_top_n: Annotated[
        int | None, typer.Option(help="Keep log-probabilities of the n most likely tokens.")
    ] = None,
    teacher_samples: Annotated[
        int | None, typer.Option(help="Keep log-probabilities of n tokens drawn at random.")
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option(help="URL of a server that writes instead of this process; many times."),
    ] = None,
    exact_ids: Annotated[
        bool, typer.Option("--exact-ids", help="Refuse servers without token ids.")
    ] = False,
    shard: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Do part I of N, from 0; merge puts them together."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Let the base model write conversations, with or without prompts.

    Killed or interrupted, the same command goes on where it stopped. Every key that has no flag is
    set with --set, such as --set data.distill.top_p=0.9.
    """
    from medusa_train.recipe.load import load_distill_config

    flags: dict[str, Any] = {
        "base_model.name_or_path": base_model,
        "base_model.dtype": dtype,
        "data.distill.prompts": None if prompts is None else str(prompts),
        "data.distill.num_prompts": num_prompts,
        "data.distill.turns": turns,
        "data.distill.temperature": temperature,
        "data.distill.max_new_tokens": max_new_tokens,
        "data.distill.batch_size": batch_size,
        "data.distill.seed": seed,
        "data.distill.teacher_top_n": teacher_top_n,
        "data.distill.teacher_samples": teacher_samples,
        "data.distill.server.urls": server or None,
        "data.distill.server.exact_ids": exact_ids or None,
    }
    given = [f"{key}={json.dumps(value)}" for key, value in flags.items() if value is not None]
    if config is None and base_model is None:
        raise InputError("give a CONFIG, or --base-model with --prompts or --num-prompts")
    part = None if shard is None else _shard(shard)
    loaded = load_distill_config(config, [*given, *(overrides or ())])
    loaded.require_files()

    from medusa_train.generation import generate_dataset

    _show(generate_dataset(loaded, output=output, shard=part), output=output, as_json=as_json)


@app.command()
def merge(
    shards: Annotated[
        list[Path], typer.Argument(help="Directories of the shards, then the data set's.")
    ],
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Leave out what is not finished.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Put the shards of one generation together: medusa-distill merge SHARD... OUT.

    With --allow-missing also what an unfinished generation has so far. The shards stay as they are.
    """
    *directories, output = shards
    if not directories:
        raise InputError("give the directories of the shards and then that of the data set")

    from medusa_train.distill.merge import merge as merge_shards

    manifest = merge_shards(directories, output, allow_missing=allow_missing)
    _show(manifest, output=output, as_json=as_json)


def _show(manifest: dict[str, Any], *, output: Path, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(manifest))
    else:
        typer.echo(f"{output}: {manifest['num_conversations']} conversations")


def _shard(text: str) -> tuple[int, int]:
    index, slash, num = text.partition("/")
    is_short = max(len(index), len(num)) <= MOST_DIGITS
    are_numbers = index.isdecimal() and num.isdecimal()
    if not (slash and is_short and are_numbers and int(index) < int(num)):
        raise InputError(f"--shard: must be I/N with 0 <= I < N, such as 0/4; got {text!r}")
    return int(index), int(num)


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
