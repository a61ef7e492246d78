"""The parts of one generation that several machines wrote → one data set."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from medusa_train.console import warn
from medusa_train.data.conversations import MANIFEST_FILE
from medusa_train.distill.assemble import Assembly, say
from medusa_train.distill.journal import Journal
from medusa_train.distill.run import JOURNAL_FILE, PLAN_FILE, WORK, check_same, read_plan
from medusa_train.errors import InputError, InputErrors
from medusa_train.run_dir import check_writable, locked


def merge(
    directories: Sequence[Path], output: Path, *, allow_missing: bool = False
) -> dict[str, Any]:
    """Put the shards of a generation together; they stay as they are.

    Args:
        directories: of the shards, in any order; or of a generation that is not finished.
        output: directory of the data set.
        allow_missing: leave out what no process has finished, instead of an error.

    Returns:
        The data set's manifest.

    Raises:
        InputError: a directory holds no shard, shards are of different generations or missing, or
            ``output`` holds a data set or a shard.
    """
    plans = [_plan(directory) for directory in directories]
    for directory, plan in zip(directories[1:], plans[1:], strict=True):
        check_same(
            plans[0],
            plan,
            directory,
            advice=f"only shards of one generation can be merged, and {directories[0]} is of this",
        )
    if not allow_missing:
        _check_complete(directories, plans)
    if (output / MANIFEST_FILE).exists():
        raise InputError(f"{output}: holds a data set; give another directory, or remove this one")
    if (output / WORK).exists():
        raise InputError(
            f"{output}: holds a shard or an unfinished generation; name a directory of its own for "
            "the data set, after those of the shards"
        )
    check_writable(output)
    with locked(output), ExitStack() as stack:
        journals = [stack.enter_context(Journal(d / WORK / JOURNAL_FILE)) for d in directories]
        shared = {key: value for key, value in plans[0].items() if key != "shard"}
        assembly = Assembly(journals, plan=shared)
        if assembly.missing:
            message = (
                f"{len(assembly.missing)} of {shared['num_units']} units are not finished, the "
                f"first is unit {assembly.missing[0]}"
            )
            if not allow_missing:
                raise InputError(
                    f"{output}: {message}; finish them, or give --allow-missing to leave them out"
                )
            if len(assembly.missing) == shared["num_units"]:
                raise InputError(f"{output}: no unit is finished yet; generate first, then merge")
            warn(f"{message}; they are left out")
        manifest = assembly.write(output)
    say(manifest, output=output)
    return manifest


def _plan(directory: Path) -> dict[str, Any]:
    path = directory / WORK / PLAN_FILE
    if not path.exists():
        reason = "holds no shard of a generation"
        if (directory / MANIFEST_FILE).exists():
            reason = "holds a finished data set, which needs no merge"
        raise InputError(f"{directory}: {reason}")
    return read_plan(path)


def _check_complete(directories: Sequence[Path], plans: Sequence[dict[str, Any]]) -> None:
    errors = []
    places: dict[int, Path] = {}
    num = 1
    for directory, plan in zip(directories, plans, strict=True):
        shard = plan["shard"] or {"index": 0, "num": 1}
        if places and shard["num"] != num:
            errors.append(
                f"{directory}: holds shard {shard['index']}/{shard['num']}, and {directories[0]} "
                f"is one of {num}; merge shards of one division"
            )
            continue
        num = shard["num"]
        other = places.setdefault(shard["index"], directory)
        if other is not directory:
            errors.append(
                f"{directory}: holds shard {shard['index']}/{shard['num']}, and so does {other}"
            )
    missing = [f"{index}/{num}" for index in range(num) if index not in places]
    if missing:
        errors.append(
            f"shard {', '.join(missing)}: not among the directories; give all, or --allow-missing "
            "to go without"
        )
    if errors:
        raise InputErrors(errors)
