"""The tree as files and words: ``tree.json``, ``medusa_choices.json``, picture and table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa_train.errors import InputError
from medusa_train.evaluate.accuracy import MIN_CONVERSATIONS
from medusa_train.evaluate.ranks import RANKS_FILE, Ranks, read_ranks
from medusa_train.evaluate.tables import (
    ABSENT,
    counted,
    interval,
    number,
    plain_table,
    sampling_phrase,
)
from medusa_train.evaluate.tree_picture import PICTURE, tree_plot
from medusa_train.json_values import read_json
from medusa_train.page.drawing import svg_file
from medusa_train.run_dir import atomic_path, write_json, write_text
from medusa_train.tree.latency import LatencyCurve

TREE_FILE = "tree.json"
CHOICES_FILE = "medusa_choices.json"


def find_ranks(path: Path) -> Ranks:
    """The ranks in a file, in a report's directory, or in a run directory.

    Raises:
        InputError: there are none.
    """
    if not path.is_dir():
        return read_ranks(path)
    places = [path / RANKS_FILE, path / "report" / RANKS_FILE]
    found = [place for place in places if place.exists()]
    if not found:
        raise InputError(
            f"{path}: no {RANKS_FILE} in it; medusa-eval heads-accuracy HEADS --output DIR makes "
            "one"
        )
    return read_ranks(found[0])


def read_latency(path: Path) -> LatencyCurve:
    """The times of a step, ``{"1": ms, "8": ms, …}``, by themselves or as ``latency_ms``.

    Raises:
        InputError: no such file, or no times in it.
    """
    value = read_json(path)
    times = value.get("latency_ms", value) if isinstance(value, dict) else value
    if not isinstance(times, dict):
        raise InputError(f'{path}: must be a JSON object like {{"1": 20.5, "16": 31.0}}')
    try:
        return LatencyCurve.of(times)
    except ValueError as error:
        raise InputError(
            f"{path}: {error}; a curve has the milliseconds of a step by its number of tokens"
        ) from error


def write_tree(result: Mapping[str, Any], *, directory: Path, choices: Path | None = None) -> None:
    """Write every form of the tree into ``directory``; ``tree.json`` comes last.

    Args:
        result: ``tree.json`` as an object.
        directory: made if needed.
        choices: directory of ``medusa_choices.json``; None for the same.
    """
    remove_tree(directory)
    plot = tree_plot(result)
    if plot is not None:
        with atomic_path(directory / f"{PICTURE}.png") as temporary:
            temporary.write_bytes(plot.png)
        write_text(directory / f"{PICTURE}.svg", svg_file(plot))
    write_text((choices or directory) / CHOICES_FILE, json.dumps(result["paths"]) + "\n")
    write_json(directory / TREE_FILE, result)


def remove_tree(directory: Path) -> None:
    """Remove the tree that was found for a report that is made anew."""
    for name in (TREE_FILE, f"{PICTURE}.png", f"{PICTURE}.svg"):
        (directory / name).unlink(missing_ok=True)


def tree_summary(result: Mapping[str, Any]) -> str:
    """The comparison as plain text of fixed columns, for a terminal or a log."""
    return "\n".join(
        [
            *text_lines(result),
            "",
            plain_table([comparison_columns(result), *comparison_rows(result)]),
        ]
    )


def text_lines(result: Mapping[str, Any]) -> list[str]:
    """What was searched, what is reported on, and what its sampling means."""
    searched, reported = (
        f"{counted(text['num_conversations'], 'conversation')} "
        f"({counted(text['num_positions'], 'position')})"
        for text in (result["searched"], result["reported"])
    )
    what = result["reported"]["what"]
    intervals = "intervals: 95 %, percentile bootstrap over conversations"
    if result["reported"]["num_conversations"] < MIN_CONVERSATIONS:
        intervals = f"no intervals: they need {MIN_CONVERSATIONS} conversations"
    lines = [
        f"searched: {searched}",
        f"figures: {reported}, {what}; {intervals}",
        f"text: {sampling_phrase(result['reported']['text_sampling'])}",
    ]
    if result["latency_ms"] is not None:
        lines.append("tokens/s: tokens per step divided by the measured time of such a step")
    return lines


def comparison_columns(result: Mapping[str, Any]) -> list[str]:
    """The names of the comparison's columns."""
    speed = [] if result["latency_ms"] is None else ["tokens/s"]
    return ["", "nodes", "depth", "tokens per step", "95 %", *speed, "tree is longer by", "95 %"]


def comparison_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """One row of cells for the tree and for each that it is compared with."""
    rows = []
    for row in result["comparison"]:
        is_tree = row["name"] == "tree"
        speed = [] if result["latency_ms"] is None else [row.get("tokens_per_second")]
        rows.append(
            [
                row["name"],
                str(row["num_nodes"]),
                str(row["depth"]),
                number(row["acceptance_length"]),
                interval(row["ci95"]),
                *(number(value, digits=1) for value in speed),
                "" if is_tree else number(row["tree_is_longer_by"]),
                "" if is_tree else _signed(row["tree_is_longer_by_ci95"]),
            ]
        )
    return rows


def _signed(value: Sequence[float] | None) -> str:
    """An interval that may go below zero."""
    return ABSENT if value is None else f"{value[0]:.3f} to {value[1]:.3f}"
