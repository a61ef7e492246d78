"""Whether one set of heads is better than another, on the same text.

    medusa-eval heads-accuracy FIRST/heads --data TEXT --output first
    medusa-eval heads-accuracy SECOND/heads --data TEXT --output second
    python scripts/compare_heads.py first/ranks.safetensors second/ranks.safetensors [--json]

Prints the acceptance length of each top-1 chain, and the ratio of the second's gain to the first's:
a gain is the acceptance length less the one token that a plain step gives. The 95 % interval of the
ratio is paired: each resample of the conversations is taken from both.
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


def compare(first: Ranks, second: Ranks, *, num_bootstrap: int, seed: int) -> dict[str, Any]:
    """The figures of both chains, and of the ratio of their gains.

    Args:
        first: ranks of the heads that the others are measured against.
        second: ranks of the other heads.
        num_bootstrap: resamples of the conversations.
        seed: of the resampling.

    Raises:
        InputError: the ranks are not of the same answers, or the first chain gains nothing.
    """
    texts = [ranks.metadata.get("data_fingerprint") for ranks in (first, second)]
    places = ("conversation", "position", "span")
    if texts[0] != texts[1] or not all(
        torch.equal(getattr(first, name), getattr(second, name)) for name in places
    ):
        raise InputError("the two files hold the ranks of different texts; measure on the same one")
    chains = [walk(num_accepted(ranks), ranks) for ranks in (first, second)]
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
        "chains": [
            {"acceptance_length": chain.value, "ci95": chain.interval(weights)} for chain in chains
        ],
        "gain_ratio": float(gains[1] / gains[0]),
        "gain_ratio_ci95": [float(low), float(high)],
    }


def main() -> None:
    """Read two files and print the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("first", type=Path, help="ranks.safetensors to compare with")
    parser.add_argument("second", type=Path, help="ranks.safetensors of the other heads")
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
