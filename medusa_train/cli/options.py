"""Options that several commands share."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer


class Dtype(enum.StrEnum):
    """The dtypes of a base model, as in recipes."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


BaseName = Annotated[
    str | None,
    typer.Option(
        "--base-model", help="Hub id or directory of the base. Default: the one the heads name."
    ),
]
TreeFile = Annotated[
    Path | None,
    typer.Option(
        help="JSON list of paths such as [[0], [0, 0]]. Default: the heads' medusa_choices.json, "
        "else the top-1 chain."
    ),
]
Template = Annotated[str | None, typer.Option(help="Jinja template or its path.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the base.")
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")]
IsCompiled = Annotated[
    bool,
    typer.Option("--compile", help="Compile the step: faster after a minute or two at the start."),
]
