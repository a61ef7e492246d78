"""Run several recipes one after the other in this process, which a launcher may have started.

Starting Python and importing torch takes longer than a tiny run, so tests put runs together.

    torchrun --nproc-per-node 2 many_runs.py RUNS.json

RUNS.json is a list of runs, each the path of a recipe and then its ``--set`` overrides.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from medusa_train.cli.app import keep_output_clean
from medusa_train.distributed import process_group
from medusa_train.pipeline import run_pipeline
from medusa_train.recipe.load import load_recipe


def main() -> None:
    keep_output_clean()
    runs = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with process_group():
        for recipe, *overrides in runs:
            run_pipeline(load_recipe(Path(recipe), overrides))


if __name__ == "__main__":
    main()
