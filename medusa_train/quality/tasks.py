"""Any task of lm-eval on both models, where that package is installed."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from medusa_train.console import log
from medusa_train.errors import InputError
from medusa_train.quality.pair import SIDES, Pair, Side

PACKAGE = "lm_eval"
BATCH_SIZE = 8
NUM_RESAMPLES = 1000


def check_tasks(tasks: Sequence[str], *, option: str) -> None:
    """See that lm-eval is there and knows the tasks, before weights are loaded.

    Args:
        tasks: names that lm-eval knows, or paths of YAML files with a task.
        option: what the user calls them.

    Raises:
        InputError: it is not installed, or one of them is no task.
    """
    if importlib.util.find_spec(PACKAGE) is None:
        raise InputError(f"{option}: needs the package {PACKAGE}; pip install {PACKAGE}")
    known = _manager().all_tasks
    for task in tasks:
        if task in known or Path(task).is_file():
            continue
        close = difflib.get_close_matches(task, known, n=1)
        hint = f"did you mean '{close[0]}'?" if close else "`lm-eval ls tasks` lists them"
        raise InputError(f"{option} {task}: no task of {PACKAGE} and no YAML file; {hint}")


def run_tasks(pair: Pair, tasks: Sequence[str], *, limit: int | None) -> dict[str, Any]:
    """``lm_eval`` of ``quality.json``: every metric of the tasks, of both models.

    Args:
        pair: the models.
        tasks: that :func:`check_tasks` lets pass.
        limit: the first so many samples of each task; None for all.
    """
    found = {side: _run(pair, side, tasks, limit=limit) for side in SIDES}
    return {"limit": limit, "tasks": list(_rows(found))}


def _run(pair: Pair, side: Side, tasks: Sequence[str], *, limit: int | None) -> dict[str, Any]:
    evaluator = importlib.import_module(f"{PACKAGE}.evaluator")
    models = importlib.import_module(f"{PACKAGE}.models.huggingface")
    log(f"{PACKAGE}: {', '.join(tasks)} with the {side} model")
    # stdout carries results alone.
    with pair.using(side) as base, contextlib.redirect_stdout(sys.stderr):
        result = evaluator.simple_evaluate(
            models.HFLM(pretrained=base.model, tokenizer=base.tokenizer, batch_size=BATCH_SIZE),
            tasks=list(tasks),
            limit=limit,
            bootstrap_iters=NUM_RESAMPLES,
            log_samples=False,
            task_manager=_manager(),
        )
    return dict(result)


@cache
def _manager() -> Any:
    """It reads thousands of files."""
    return importlib.import_module(f"{PACKAGE}.tasks").TaskManager()


def _rows(found: Mapping[Side, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    original, changed = (found[side]["results"] for side in SIDES)
    counts = found["original"].get("n-samples", {})
    better = found["original"].get("higher_is_better", {})
    for task, values in original.items():
        for key, value in values.items():
            metric, comma, kept = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = f"{metric}_stderr,{kept}"
            other = changed[task][key]
            more = bool(better.get(task, {}).get(metric))
            yield {
                "task": task,
                "metric": metric if kept == "none" else key,
                "num_samples": counts.get(task, {}).get("effective"),
                "original": value,
                "original_stderr": _number(values.get(error)),
                "changed": other,
                "changed_stderr": _number(changed[task].get(error)),
                "retained_share": other / value if more and value > 0 else None,
            }


def _number(value: Any) -> float | None:
    """lm-eval writes N/A where there is no standard error."""
    return float(value) if isinstance(value, int | float) else None
