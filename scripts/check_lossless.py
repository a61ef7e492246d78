"""Whether sampling with heads has the base's own distribution, with more draws than the tests have.

    python scripts/check_lossless.py [--num-draws 200000] [--json]

Draws texts of four tokens from a seeded model with eight tokens, with heads at random, through a
chain and through a tree at two temperatures and top-p 0.9, and compares them with the exact
distribution by a chi-square test (texts that are expected fewer than five times are one cell). The
exit code is 1 if one of the four has p < 0.001.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.lossless_for_tests import (
    BATCH,
    CHAIN,
    TOP_P,
    TREE,
    chi_square,
    chi_square_p,
    drawn_texts,
)

LIMIT = 0.001


def check(*, num_draws: int, seed: int) -> list[dict[str, Any]]:
    """One row for each kind of tree and temperature."""
    rows = []
    for name, tree in (("chain", CHAIN), ("tree", TREE)):
        for temperature in (0.7, 1.0):
            counts, accepted, wanted = drawn_texts(
                tree, temperature=temperature, num_draws=num_draws, seed=seed
            )
            statistic, cells = chi_square(counts, wanted)
            rows.append(
                {
                    "candidates": name,
                    "num_nodes": tree.num_nodes,
                    "temperature": temperature,
                    "top_p": TOP_P,
                    "num_draws": sum(counts.values()),
                    "num_accepted": accepted,
                    "chi_square": statistic,
                    "degrees_of_freedom": cells - 1,
                    "p": chi_square_p(counts, wanted),
                }
            )
    return rows


def main() -> int:
    """Print a row for each kind of draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--num-draws", type=int, default=200_000, help=f"a multiple of {BATCH}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    if options.num_draws < BATCH or options.num_draws % BATCH:
        parser.error(f"--num-draws {options.num_draws}: must be a multiple of {BATCH}")
    rows = check(num_draws=options.num_draws, seed=options.seed)
    if options.json:
        print(json.dumps({"limit": LIMIT, "rows": rows}))
    else:
        print("candidates  nodes    T    draws  accepted  chi-square    df      p")
        for row in rows:
            print(
                f"{row['candidates']:>10} {row['num_nodes']:>6} {row['temperature']:>4} "
                f"{row['num_draws']:>8} {row['num_accepted']:>9} {row['chi_square']:>11.1f} "
                f"{row['degrees_of_freedom']:>5} {row['p']:>6.3f}"
            )
    return int(min(row["p"] for row in rows) < LIMIT)


if __name__ == "__main__":
    sys.exit(main())
