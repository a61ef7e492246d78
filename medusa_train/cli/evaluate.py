"""``medusa-eval``: measure trained heads."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Annotated

import typer

from medusa_train.cli.app import Json, make_app

app = make_app("Measure trained Medusa heads.", name="medusa-eval")


class Dtype(enum.StrEnum):
    """The dtypes of a base model, as in recipes."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


@app.command("heads-accuracy")
def heads_accuracy(
    heads: Annotated[Path, typer.Argument(help="A heads directory, such as RUN/heads.")],
    data: Annotated[
        Path | None,
        typer.Option(
            help="A data set directory, or a ShareGPT, messages or text file. Default: what the "
            "run held out."
        ),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(help="Hub id or directory of the base. Default: the one the heads name."),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Type of the base's weights.")] = Dtype.AUTO,
    chat_template: Annotated[
        str | None, typer.Option(help="Jinja template or its path, for chats in a file.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write the report (JSON, Markdown, HTML, PNG) here.")
    ] = None,
    top_k: Annotated[int, typer.Option(min=1, max=100, help="Ranks to report.")] = 10,
    num_bootstrap: Annotated[
        int, typer.Option(min=1, help="Resamples of the conversations for the intervals.")
    ] = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the resampling.")] = 0,
    as_json: Json = False,
) -> None:
    """Say exactly how good heads are, on text that they were not trained on."""
    from medusa_train.measure import measure_heads

    report = measure_heads(
        heads,
        data=data,
        base_model=base_model,
        dtype=dtype.value,
        chat_template=chat_template,
        output=output,
        top_k=top_k,
        num_bootstrap=num_bootstrap,
        seed=seed,
    )
    if as_json:
        typer.echo(json.dumps(report))
        return
    from medusa_train.evaluate.report import summary_text

    typer.echo(summary_text(report))


def main() -> None:
    """The console script."""
    app()
