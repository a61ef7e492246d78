"""Options that several commands share."""

from __future__ import annotations

import enum
import math
from pathlib import Path
from typing import Annotated

import typer

from medusa_train.errors import InputError
from medusa_train.limits import MAX_BOOTSTRAP, MAX_SEED

MOST_DIGITS = 18
"""Of a number inside a text: Python reads none of thousands of digits."""


class Dtype(enum.StrEnum):
    """The dtypes of a base model, as in recipes."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def finite(value: float | None) -> float | None:
    """Refuse nan and inf, which no range of an option leaves out by itself.

    Raises:
        typer.BadParameter: the number is not finite.
    """
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


def whole_numbers(text: str | None, *, option: str, example: str) -> tuple[int, ...]:
    """Numbers above 0 with commas between; none where the option is not given.

    Args:
        text: what the user gave.
        option: its name.
        example: what could have been given.

    Raises:
        InputError: it is something else.
    """
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) <= MOST_DIGITS and int(part) for part in parts):
        raise InputError(f"{option} {text}: must be numbers with commas between, as {example}")
    return tuple(int(part) for part in parts)


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
NumBootstrap = Annotated[
    int,
    typer.Option(min=1, max=MAX_BOOTSTRAP, help="Resamples of the text for the intervals."),
]
BootstrapSeed = Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of the resampling.")]
IsCompiled = Annotated[
    bool,
    typer.Option("--compile", help="Compile the step: faster after a minute or two at the start."),
]
