"""A candidate tree as tensors: what attends to what, where each token comes from, which paths end.

A node is a path of ranks: ``(0, 2)`` is head 2's third choice after head 1's first. Node 0 is the
root, the base model's own next token; node i + 1 is the i-th path by length and then by its ranks.
This module is shipped inside exports, so it imports torch, the standard library, and the package's
errors and limits only.

Shapes: N nodes with the root, P paths from the root to a leaf, D depth of the tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from medusa_train.errors import ArgumentError
from medusa_train.limits import MAX_TREE_NODES

NONE = -1
"""Where there is no node, no head or no rank."""

Path = tuple[int, ...]


class TreeError(ArgumentError):
    """Paths that are no tree, or a tree that the heads do not have candidates for."""


@dataclass(frozen=True)
class Tree:
    """A candidate tree.

    Attributes:
        paths: of all nodes but the root, by (length, ranks); any order and any sequences are taken.

    Raises:
        TreeError: a path that is empty, no ranks, there twice, or without its prefix; more nodes
            than :data:`~medusa_train.limits.MAX_TREE_NODES`.
    """

    paths: tuple[Path, ...]

    def __post_init__(self) -> None:
        if len(self.paths) > MAX_TREE_NODES:
            raise TreeError(
                f"{len(self.paths):,} nodes are too many; give a tree of at most {MAX_TREE_NODES:,}"
            )
        paths = [_checked(path) for path in self.paths]
        known = {(), *paths}
        if len(known) <= len(paths):
            twice = next(path for i, path in enumerate(paths) if path in paths[:i])
            raise TreeError(f"path {list(twice)}: is there twice")
        for path in paths:
            if path[:-1] not in known:
                raise TreeError(
                    f"path {list(path)}: its prefix {list(path[:-1])} is not in the tree"
                )
        object.__setattr__(self, "paths", tuple(sorted(paths, key=_order)))

    @classmethod
    def from_paths(
        cls,
        paths: Iterable[Sequence[int]],
        *,
        num_heads: int | None = None,
        top_k: int | None = None,
    ) -> Tree:
        """The tree of ``paths``, which is what engines call ``medusa_choices``.

        Args:
            paths: of all nodes but the root.
            num_heads: refuse a tree that is deeper.
            top_k: refuse ranks from here on.

        Raises:
            TreeError: no tree, or one that does not fit.
        """
        tree = cls(_listed(paths))
        tree.check_fits(num_heads=num_heads, top_k=top_k)
        return tree

    @classmethod
    def chain(cls, length: int) -> Tree:
        """The first choice of each of the first ``length`` heads, one after the other."""
        return cls(tuple((0,) * depth for depth in range(1, length + 1)))

    def check_fits(self, *, num_heads: int | None = None, top_k: int | None = None) -> None:
        """Refuse a tree that needs more heads, or more of their choices, than there are.

        Raises:
            TreeError: it is deeper than ``num_heads`` or names a rank from ``top_k`` on.
        """
        for path in self.paths:
            if num_heads is not None and len(path) > num_heads:
                raise TreeError(
                    f"path {list(path)}: has depth {len(path)}, but there are {num_heads} heads"
                )
            if top_k is not None and max(path) >= top_k:
                raise TreeError(
                    f"path {list(path)}: has rank {max(path)}, but only the {top_k} most likely "
                    f"tokens of a head are candidates (ranks 0 to {top_k - 1})"
                )

    @property
    def num_nodes(self) -> int:
        """Nodes without the root: candidates."""
        return len(self.paths)

    @property
    def size(self) -> int:
        """N: tokens of a step, the root included."""
        return len(self.paths) + 1

    @property
    def depth(self) -> int:
        """D: heads that the tree uses; 0 for the root alone."""
        return len(self.paths[-1]) if self.paths else 0

    @property
    def num_ranks(self) -> int:
        """How many of a head's choices the tree needs at most; 0 for the root alone."""
        return max((rank for path in self.paths for rank in path), default=-1) + 1

    @cached_property
    def index(self) -> dict[Path, int]:
        """The node of each path; the empty path is the root."""
        return {path: node for node, path in enumerate(((), *self.paths))}

    @cached_property
    def parents(self) -> Tensor:
        """[N] int64: each node's parent; -1 for the root."""
        return torch.tensor([NONE, *(self.index[path[:-1]] for path in self.paths)])

    @cached_property
    def depths(self) -> Tensor:
        """[N] int64: position of each node after the root's; 0 for the root."""
        return torch.tensor([0, *map(len, self.paths)])

    @cached_property
    def ranks(self) -> Tensor:
        """[N] int64: which of its head's choices each node is; -1 for the root.

        Its head, counted from 0, is its depth less one.
        """
        return torch.tensor([NONE, *(path[-1] for path in self.paths)])

    @cached_property
    def children(self) -> Tensor:
        """[N, num_ranks] int64: the child of each node by rank; -1 where there is none."""
        table = torch.full((self.size, self.num_ranks), NONE)
        table[self.parents[1:], self.ranks[1:]] = torch.arange(1, self.size)
        return table

    @cached_property
    def mask(self) -> Tensor:
        """[N, N] bool: row i attends to column j, where j is i or one of its ancestors."""
        rows = torch.eye(self.size, dtype=torch.bool)
        # A parent comes before its children, so its row is complete.
        for node, parent in enumerate(self.parents[1:].tolist(), start=1):
            rows[node] |= rows[parent]
        return rows

    def candidate_indices(self, top_k: int) -> Tensor:
        """[N] int64: each node's token in the flat list of the root and then each head's ``top_k``.

        Args:
            top_k: choices that are listed for each head; at least :attr:`num_ranks`.
        """
        self.check_fits(top_k=top_k)
        return torch.where(self.depths > 0, 1 + (self.depths - 1) * top_k + self.ranks, 0)

    @cached_property
    def retrieve_indices(self) -> Tensor:
        """[P, D + 1] int64: the nodes from the root to each leaf, padded with -1.

        Leaves come last first, which is the order of the original implementation.
        """
        inner = {path[:-1] for path in self.paths}
        leaves = [path for path in reversed(self.paths) if path not in inner] or [()]
        rows = [[self.index[path[:end]] for end in range(len(path) + 1)] for path in leaves]
        return torch.tensor([row + [NONE] * (self.depth + 1 - len(row)) for row in rows])


def _order(path: Path) -> tuple[int, Path]:
    return len(path), path


def _listed(paths: object) -> tuple[Path, ...]:
    if not isinstance(paths, Iterable) or isinstance(paths, str):
        raise TreeError(f"must be a list of paths such as [[0], [0, 0]], got {paths!r}")
    return tuple(paths)


def _checked(path: object) -> Path:
    if not isinstance(path, Sequence) or isinstance(path, str) or not path:
        raise TreeError(f"path {path!r}: must be a list of one or more ranks")
    for rank in path:
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 0:
            raise TreeError(f"path {list(path)}: {rank!r} is no rank (0, 1, 2, …)")
    return tuple(path)
