"""How engines read ``medusa_choices.json``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from medusa_train.export.files import inside
from medusa_train.export.loaders.view import View
from medusa_train.json_values import read_json

_FILE = "medusa_choices.json"


def check_choices(
    directory: Path,
    result: View,
    *,
    depth: int,
    max_rank: int | None = None,
    max_nodes: int | None = None,
) -> None:
    """Add errors for a tree that the engine cannot run; a directory need not have one.

    Args:
        directory: where the file is.
        result: gets the errors.
        depth: heads that there are.
        max_rank: candidates that the engine lists for each head.
        max_nodes: nodes that it has room for.
    """
    path = inside(directory, _FILE)
    if not path.exists():
        result.note(f"there is no {_FILE}: give the engine a tree")
        return
    paths: Any = read_json(path)
    if not _is_list_of_paths(paths):
        result.error(f"{_FILE}: must be a list of lists of ranks")
        return
    known = {tuple(path) for path in paths}
    for path_ in sorted(known, key=lambda p: (len(p), p)):
        if len(path_) > 1 and path_[:-1] not in known:
            result.error(f"{_FILE}: {list(path_)} is there without its prefix {list(path_[:-1])}")
            return
    if paths != sorted(paths, key=lambda p: (len(p), p)):
        result.warning(f"{_FILE}: is not sorted by length and ranks")
    deepest = max((len(p) for p in known), default=0)
    widest = max((rank for p in known for rank in p), default=0)
    if deepest > depth:
        result.error(f"{_FILE}: has depth {deepest}, but there are {depth} heads")
    if max_rank is not None and widest >= max_rank:
        result.error(
            f"{_FILE}: has rank {widest}, but the engine lists {max_rank} tokens of each head "
            f"(ranks 0 to {max_rank - 1})"
        )
    if max_nodes is not None and len(known) > max_nodes:
        result.error(f"{_FILE}: has {len(known)} nodes, but the engine takes {max_nodes} at most")


def _is_list_of_paths(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(path, list) and path and all(type(rank) is int and rank >= 0 for rank in path)
        for path in value
    )
