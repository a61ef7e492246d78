"""``medusa-eval speedup``."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Annotated

import typer

from medusa_train.cli.app import Json
from medusa_train.cli.options import (
    BaseName,
    IsCompiled,
    MaxNewTokens,
    NumBootstrap,
    Template,
    TreeFile,
    finite,
    whole_numbers,
)
from medusa_train.errors import InputError
from medusa_train.limits import MAX_SEED


class TimedDtype(enum.StrEnum):
    """The dtypes in which decoding is timed."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def speedup(
    heads: Annotated[Path, typer.Argument(help="A heads directory, such as RUN/heads.")],
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Prompts, as for a generation: rows with turns, messages or text. The first user "
            "turns are answered. Default: those that the run held out, else some of ours."
        ),
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="The first so many prompts. Default: all.")
    ] = None,
    max_new_tokens: MaxNewTokens = 192,
    base_model: BaseName = None,
    dtype: Annotated[
        list[TimedDtype] | None,
        typer.Option(
            help="Type of the base's weights; may be given many times. The fastest is taken for "
            "each side. Default: float32 and bfloat16 on a CPU, bfloat16 elsewhere."
        ),
    ] = None,
    tree: TreeFile = None,
    compiled: IsCompiled = False,
    chat_template: Template = None,
    temperature: Annotated[
        float,
        typer.Option(callback=finite, help="0, greedy: only then can equal output be checked."),
    ] = 0.0,
    num_probe: Annotated[
        int,
        typer.Option(
            min=0,
            help="Prompts on which dtypes are tried, before the fastest runs on all; 0: every "
            "dtype is checked and timed on all prompts.",
        ),
    ] = 4,
    repeats: Annotated[
        int, typer.Option(min=1, help="Timed runs of each prompt; their median counts.")
    ] = 1,
    warmup: Annotated[
        int, typer.Option(min=0, help="Runs of each way of decoding that are not counted.")
    ] = 1,
    batch_sizes: Annotated[
        str | None,
        typer.Option(metavar="N,N,…", help="Also measure batches of these sizes, such as 1,4,8."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the report (JSON, Markdown, HTML, PNG) here.")
    ] = None,
    num_bootstrap: NumBootstrap = 1000,
    seed: Annotated[
        int,
        typer.Option(min=0, max=MAX_SEED, help="Seed of the order of runs and of the resampling."),
    ] = 0,
    as_json: Json = False,
) -> None:
    """Measure the speed with heads against plain decoding, at equal output."""
    if temperature != 0:
        raise InputError(
            f"--temperature {temperature}: speed is measured with greedy decoding, whose output "
            "can be compared; give 0 or leave it out"
        )
    sizes = whole_numbers(batch_sizes, option="--batch-sizes", example="1,4,8")
    from medusa_train.evaluate.speed_report import speedup_summary
    from medusa_train.speed.measure import measure_speedup
    from medusa_train.speed.options import SpeedupOptions

    report = measure_speedup(
        heads,
        options=SpeedupOptions(
            prompts=prompts,
            num_prompts=num_prompts,
            max_new_tokens=max_new_tokens,
            base_model=base_model,
            dtypes=tuple(name.value for name in dtype or ()),
            tree=tree,
            compiled=compiled,
            chat_template=chat_template,
            num_probe=num_probe,
            repeats=repeats,
            warmup=warmup,
            batch_sizes=tuple(dict.fromkeys(sizes)),
            num_bootstrap=num_bootstrap,
            seed=seed,
            output=output,
        ),
    )
    typer.echo(json.dumps(report) if as_json else speedup_summary(report))
