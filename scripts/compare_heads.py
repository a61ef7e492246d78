"""Whether one set of heads is better than another, on the same text.

    medusa-eval heads-accuracy FIRST/heads --data TEXT --output first
    medusa-eval heads-accuracy SECOND/heads --data TEXT --output second
    python scripts/compare_heads.py first/ranks.safetensors second/ranks.safetensors [--json]

Prints the acceptance length of each top-1 chain, and the ratio of the second's gain to the first's:
a gain is the acceptance length less the one token that a plain step gives. The 95 % interval of the
ratio is paired: each resample of the conversations is taken from both.

``--trees FIRST SECOND`` walks a tree of each instead (``medusa_choices.json``). ``--own-answers``:
the texts are the two base models' own answers to the same prompts in the same order (Medusa-2
changes the base), and conversations are paired by their place in the file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medusa_train.errors import InputError
from medusa_train.evaluate.accuracy import bootstrap_weights, num_accepted, walk
from medusa_train.evaluate.ranks import Ranks, read_ranks
from medusa_train.evaluate.tables import counted, interval, number
from medusa_train.evaluate.tree import num_accepted_by
from medusa_train.medusa_model import read_tree
from medusa_train.tree.topology import Tree


def compare(
    first: Ranks,
    second: Ranks,
    *,
    num_bootstrap: int,
    seed: int,
    trees: tuple[Tree, Tree] | None = None,
    own_answers: bool = False,
) -> dict[str, Any]:
    """The figures of both chains or trees, and of the ratio of their gains.

    Args:
        first: ranks of the heads that the others are measured against.
        second: ranks of the other heads.
        num_bootstrap: resamples of the conversations.
        seed: of the resampling.
        trees: to walk, of the first and of the second; None walks the top-1 chains.
        own_answers: the texts are two answers to each prompt, paired by their place.

    Raises:
        InputError: the ranks are not of the same answers, or the first heads gain nothing.
    """
    if own_answers:
        _check_numbers(first, second)
    else:
        _check_texts(first, second)
    if trees is None:
        chains = [walk(num_accepted(ranks), ranks) for ranks in (first, second)]
    else:
        both = zip(trees, (first, second), strict=True)
        chains = [walk(num_accepted_by(tree, ranks), ranks) for tree, ranks in both]
    weights = bootstrap_weights(len(chains[0].numerator), num_bootstrap=num_bootstrap, seed=seed)
    # [2] gains, and [2, num_bootstrap] gains of the resamples.
    gains = [chain.numerator.sum() / chain.denominator.sum() - 1 for chain in chains]
    drawn = [(weights @ chain.numerator) / (weights @ chain.denominator) - 1 for chain in chains]
    if not gains[0]:
        raise InputError("the first heads gain nothing, so there is no ratio to their gain")
    usable = drawn[0] > 0
    low, high = np.percentile(drawn[1][usable] / drawn[0][usable], [2.5, 97.5])
    return {
        "num_conversations": len(chains[0].numerator),
        "num_positions": len(first.ranks),
        "walks": "chains" if trees is None else "trees",
        "chains": [
            {"acceptance_length": chain.value, "ci95": chain.interval(weights)} for chain in chains
        ],
        "gain_ratio": float(gains[1] / gains[0]),
        "gain_ratio_ci95": [float(low), float(high)],
    }


def _check_texts(first: Ranks, second: Ranks) -> None:
    texts = [ranks.metadata.get("data_fingerprint") for ranks in (first, second)]
    places = ("conversation", "position", "span")
    if texts[0] != texts[1] or not all(
        torch.equal(getattr(first, name), getattr(second, name)) for name in places
    ):
        raise InputError(
            "the two files hold the ranks of different texts; measure on the same one, or give "
            "--own-answers if they answer the same prompts"
        )


def _check_numbers(first: Ranks, second: Ranks) -> None:
    numbers = [int(ranks.conversation.max()) + 1 for ranks in (first, second)]
    if numbers[0] != numbers[1]:
        raise InputError(
            f"the two files hold the ranks of {numbers[0]} and {numbers[1]} conversations; "
            "--own-answers pairs them by their place, so none may be missing"
        )


def main() -> None:
    """Read two files and print the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("first", type=Path, help="ranks.safetensors to compare with")
    parser.add_argument("second", type=Path, help="ranks.safetensors of the other heads")
    parser.add_argument(
        "--trees", type=Path, nargs=2, metavar=("FIRST", "SECOND"), help="walk these, not chains"
    )
    parser.add_argument(
        "--own-answers", action="store_true", help="two bases' answers to the same prompts"
    )
    parser.add_argument("--num-bootstrap", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    try:
        result = compare(
            read_ranks(options.first),
            read_ranks(options.second),
            num_bootstrap=options.num_bootstrap,
            seed=options.seed,
            trees=tuple(map(read_tree, options.trees)) if options.trees else None,
            own_answers=options.own_answers,
        )
    except InputError as error:
        parser.error(str(error))
    if options.json:
        print(json.dumps(result))
        return
    print(
        f"{counted(result['num_conversations'], 'conversation')}, "
        f"{counted(result['num_positions'], 'position')}"
    )
    for name, chain in zip((options.first, options.second), result["chains"], strict=True):
        print(f"{name}: {number(chain['acceptance_length'])} ({interval(chain['ci95'])})")
    print(
        "ratio of the gains (acceptance length − 1): "
        f"{number(result['gain_ratio'])} ({interval(result['gain_ratio_ci95'])})"
    )


if __name__ == "__main__":
    main()
