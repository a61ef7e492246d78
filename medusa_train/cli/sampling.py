"""How ``medusa-eval generate`` and ``chat`` choose tokens: the options, and what goes together."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from medusa_train.cli.options import finite
from medusa_train.errors import InputError
from medusa_train.limits import MAX_SEED, MAX_TEMPERATURE, MIN_TEMPERATURE

Temperature = Annotated[
    float, typer.Option(min=0, max=MAX_TEMPERATURE, callback=finite, help="0 is greedy.")
]
TopP = Annotated[
    float, typer.Option(min=0, max=1, callback=finite, help="Nucleus; above 0; 1 is off.")
]
TopK = Annotated[int, typer.Option(min=0, help="Most probable tokens only; 0 is off.")]
Seed = Annotated[int | None, typer.Option(min=0, max=MAX_SEED, help="Seed of sampling.")]
IsTypical = Annotated[
    bool, typer.Option("--typical", help="Typical acceptance: faster, another distribution.")
]


def answer_options(
    *,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    is_typical: bool,
    seed: int | None,
) -> Any:
    """The options of an answer.

    Raises:
        InputError: an option of sampling where nothing is sampled, an empty nucleus, or a
            temperature at which logits overflow.
    """
    if 0 < temperature < MIN_TEMPERATURE:
        raise InputError(
            f"--temperature: must be 0, which is greedy, or at least {MIN_TEMPERATURE}; got "
            f"{temperature}"
        )
    if top_p == 0:
        raise InputError("--top-p: must be above 0 and at most 1, got 0")
    given = {
        "--typical": is_typical,
        "--top-p": top_p != 1,
        "--top-k": top_k != 0,
        "--seed": seed is not None,
    }
    for name, is_given in given.items():
        if is_given and temperature == 0:
            raise InputError(
                f"{name}: is for sampling, and temperature 0 is greedy; give a --temperature above "
                f"0, or leave {name} out"
            )
    from medusa_train.answers import AnswerOptions
    from medusa_train.decoding.acceptance import Typical

    return AnswerOptions(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        typical=Typical() if is_typical else None,
    )
