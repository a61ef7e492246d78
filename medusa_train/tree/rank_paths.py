"""The rank paths of a text, and the steps that a decoder takes over it with any tree.

At each position the ranks of the true tokens at heads 1, 2, … are a path; a tree gets as many
candidates accepted there as it has prefixes of that path. All prefixes that occur form a trie, and
a tree is a set of its nodes.

Shapes: N positions (rows), K heads, M nodes of the trie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from medusa_train.tree.topology import Path, Tree

MISS = -1

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RankPaths:
    """The trie of a text's rank paths. Nodes are sorted by (length, ranks), as a tree's are.

    Attributes:
        node_at: [N, K] the node of the first 1, 2, … K ranks of each row; M where one is a miss.
        count: [M] rows that have the node.
        depth: [M] its length, 1 to K.
        parent: [M] the node without its last rank; -1 at length 1.
        rank: [M] its last rank.
        starts: first row of each answer.
        ends: [N] the row after the last one of the same answer.
    """

    node_at: Ints
    count: Ints
    depth: Ints
    parent: Ints
    rank: Ints
    starts: Ints
    ends: Ints

    @classmethod
    def of(
        cls,
        ranks: npt.NDArray[np.integer],
        *,
        spans: Sequence[tuple[int, int]],
        top_k: int,
        max_depth: int | None = None,
    ) -> RankPaths:
        """Count the paths.

        Args:
            ranks: [N, K] ranks of the true tokens, ``MISS`` where there is none.
            spans: row ranges [start, end) of the answers, which cover all rows in order.
            top_k: ranks from here on are misses.
            max_depth: heads from here on are left out.
        """
        ranks = ranks[:, :max_depth].astype(np.int64)
        num_rows, num_heads = ranks.shape
        known = (ranks != MISS) & (ranks < top_k)
        known = np.logical_and.accumulate(known, axis=1)
        node_at = np.full((num_rows, num_heads), -1, dtype=np.int64)
        before = np.zeros(num_rows, dtype=np.int64)  # number of the prefix among those of its depth
        parts: list[tuple[Ints, Ints, Ints, Ints]] = []
        first, first_before = 0, -1
        for head in range(num_heads):
            rows = np.flatnonzero(known[:, head])
            keys = before[rows] * top_k + ranks[rows, head]
            unique, numbers, counts = np.unique(keys, return_inverse=True, return_counts=True)
            parents = unique // top_k + first_before if head else np.full(len(unique), -1)
            parts.append((counts, np.full(len(unique), head + 1), parents, unique % top_k))
            before[rows] = numbers
            node_at[rows, head] = numbers + first
            first, first_before = first + len(unique), first
        count, depth, parent, rank = (
            np.concatenate([np.empty(0, dtype=np.int64), *column])
            for column in zip(*parts, strict=True)
        )
        node_at[node_at < 0] = len(count)
        lengths = [end - start for start, end in spans]
        assert sum(lengths) == num_rows, "the spans cover all rows"
        starts = np.array([start for start, _ in spans], dtype=np.int64)
        ends = np.repeat(np.array([end for _, end in spans], dtype=np.int64), lengths)
        return cls(node_at, count, depth, parent, rank, starts, ends)

    @property
    def num_rows(self) -> int:
        """N, which is also how many tokens the answers have."""
        return len(self.ends)

    @property
    def num_nodes(self) -> int:
        """M."""
        return len(self.count)

    @property
    def num_heads(self) -> int:
        """K."""
        return int(self.node_at.shape[1])

    def path(self, node: int) -> Path:
        """The ranks of a node."""
        ranks: list[int] = []
        while node >= 0:
            ranks.append(int(self.rank[node]))
            node = int(self.parent[node])
        return tuple(reversed(ranks))

    def tree(self, nodes: Flags) -> Tree:
        """The tree of a set of nodes, [M] bool."""
        return Tree(tuple(self.path(int(node)) for node in np.flatnonzero(nodes)))

    def nodes(self, tree: Tree) -> Flags:
        """[M] bool: the nodes of a tree, as far as they occur in the text."""
        found = np.zeros(self.num_nodes, dtype=bool)
        of_path: dict[Path, int] = {(): -1}
        number = {
            (int(parent), int(rank)): node
            for node, (parent, rank) in enumerate(zip(self.parent, self.rank, strict=True))
        }
        for path in tree.paths:
            above = of_path.get(path[:-1])
            node = None if above is None else number.get((above, path[-1]))
            if node is not None:
                of_path[path] = node
                found[node] = True
        return found

    def accepted(self, nodes: Flags) -> Ints:
        """[N] candidates that the tree of ``nodes`` [M] gets accepted on each row."""
        result: Ints = np.append(nodes, False)[self.node_at].sum(axis=1)
        return result

    def next_rows(self, accepted: Ints) -> Ints:
        """[N + 1] the row after a step from each row; N after an answer's last step, and from N."""
        rows = np.arange(self.num_rows) + accepted + 1
        return np.append(np.where(rows < self.ends, rows, self.num_rows), self.num_rows)


def steps_to_end(next_rows: Ints) -> Ints:
    """[N + 1] steps from each row to its answer's end, by doubling: 1, 2, 4, … steps at a time."""
    end = len(next_rows) - 1
    steps = np.ones(end + 1, dtype=np.int64)
    steps[end] = 0
    jump = next_rows
    while (jump != end).any():
        steps += steps[jump]
        jump = jump[jump]
    return steps


def rows_of_steps(next_rows: Ints, starts: Ints) -> Ints:
    """The rows on which a decoder that begins on ``starts`` takes its steps, in no order."""
    end = len(next_rows) - 1
    jumps = [next_rows]
    while (jumps[-1] != end).any():
        jumps.append(jumps[-1][jumps[-1]])
    rows = starts
    for jump in reversed(jumps):
        reached = jump[rows]
        rows = np.concatenate([rows, reached[reached != end]])
    return rows
