"""The best candidate tree for a number of nodes, from the rank paths of a text.

The most frequent rank paths maximise the accepted nodes per position over all positions. A decoder
skips the positions that it has accepted, so another tree can need fewer steps: nodes are swapped as
long as that makes the walk shorter, from there and from a tree that is grown along the walk.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from medusa_train.tree.latency import LatencyCurve
from medusa_train.tree.rank_paths import (
    Flags,
    Ints,
    RankPaths,
    rows_of_steps,
    steps_to_end,
)
from medusa_train.tree.topology import Path, Tree

ONE_SWAP = (64,)
"""How many swaps are walked before the search gives up; the most promising ones come first."""

TWO_SWAPS = (16, 4)
"""How many first swaps are gone on from, and how many second ones are walked for each."""

NUM_SIZES = 3
"""Sizes of a tree that are searched in full when a latency curve chooses among them."""

MAX_ADDED = 64
"""Nodes outside the tree that are considered for a swap at a time."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a tree may be.

    Attributes:
        num_nodes: without the root.
        per_depth: most nodes at depths 1, 2, …; depths beyond have no limit of their own.
    """

    num_nodes: int
    per_depth: tuple[int, ...] = ()

    def at(self, depth: int) -> int:
        """Most nodes of a depth (1-based)."""
        if depth > len(self.per_depth):
            return self.num_nodes
        return min(self.num_nodes, self.per_depth[depth - 1])


def num_possible(*, num_heads: int, top_k: int, limits: Limits | None = None) -> int:
    """Nodes that any tree can have at most, without the root."""
    total, width = 0, 1
    for depth in range(1, num_heads + 1):
        width = width * top_k if limits is None else min(width * top_k, limits.at(depth))
        total += width
    return total if limits is None else min(total, limits.num_nodes)


def count_sorted(paths: RankPaths, limits: Limits) -> Flags:
    """[M] bool: the most frequent paths, by (count descending, length, ranks).

    A prefix is at least as frequent as what it begins and shorter, so the first ones by this order
    are a tree. Paths that do not occur are not in the trie and never added. With limits per depth a
    path whose depth is full is passed over, and so is all that it begins.
    """
    chosen = np.zeros(paths.num_nodes, dtype=bool)
    free = [limits.at(depth) for depth in range(1, paths.num_heads + 1)]
    left = limits.num_nodes
    for node in np.lexsort((np.arange(paths.num_nodes), -paths.count)).tolist():
        depth, parent = int(paths.depth[node]) - 1, int(paths.parent[node])
        if left and free[depth] and (parent < 0 or chosen[parent]):
            chosen[node] = True
            free[depth] -= 1
            left -= 1
    return chosen


def num_steps(paths: RankPaths, nodes: Flags) -> int:
    """Steps of a decoder over all answers with the tree of ``nodes`` [M]."""
    steps = steps_to_end(paths.next_rows(paths.accepted(nodes)))
    return int(steps[paths.starts].sum())


def best_tree(paths: RankPaths, limits: Limits) -> Flags:
    """[M] bool: the best tree that swaps find; on the text never worse than the count-sorted."""
    starts = (count_sorted(paths, limits), _grown(paths, limits))
    found = [improve_by_swaps(paths, nodes, limits) for nodes in starts]
    best = min(found, key=lambda nodes: num_steps(paths, nodes))
    return improve_by_swaps(paths, best, limits, tries=TWO_SWAPS)


def fastest_tree(paths: RankPaths, limits: Limits, latency: LatencyCurve) -> Flags:
    """[M] bool: the tree with the most tokens per second, of up to as many nodes as were measured.

    Every size is tried with the most frequent paths; the best few are searched in full.
    """
    most = min(limits.num_nodes, latency.largest - 1)
    sized = [count_sorted(paths, replace(limits, num_nodes=n)) for n in range(1, most + 1)]

    def seconds(nodes: Flags) -> float:
        return num_steps(paths, nodes) * latency.milliseconds(int(nodes.sum()) + 1)

    candidates = sorted(sized, key=seconds)[:NUM_SIZES]
    sizes = sorted({int(nodes.sum()) for nodes in candidates})
    found = [best_tree(paths, replace(limits, num_nodes=size)) for size in sizes]
    return min(found, key=seconds)


def _grown(paths: RankPaths, limits: Limits) -> Flags:
    """[M] bool: the node that shortens the walk most by the estimate, again and again."""
    nodes = np.zeros(paths.num_nodes, dtype=bool)
    for _ in range(limits.num_nodes):
        gain, _ = _values(paths, nodes)
        gain[_is_full(paths, nodes, limits)[paths.depth - 1]] = 0
        node = int(gain.argmax()) if len(gain) else -1
        if node < 0 or gain[node] <= 0:
            break
        nodes[node] = True
    return nodes


def _is_full(paths: RankPaths, nodes: Flags, limits: Limits) -> Flags:
    """[K] bool: whether depth 1, 2, … may have no more nodes."""
    counts = np.bincount(paths.depth[nodes], minlength=paths.num_heads + 1)[1:]
    return counts >= [limits.at(depth) for depth in range(1, paths.num_heads + 1)]


def improve_by_swaps(
    paths: RankPaths, nodes: Flags, limits: Limits, *, tries: tuple[int, ...] = ONE_SWAP
) -> Flags:
    """Swap a leaf for another node as long as the walk over the text gets shorter.

    What a swap is worth is estimated for all of them at once, then the walk decides.

    Args:
        paths: of the text.
        nodes: [M] bool, a tree.
        limits: kept; the number of nodes stays what it is.
        tries: as many numbers as swaps are made at a time.

    Returns:
        [M] bool: a tree that needs no more steps.
    """
    better: Flags | None = nodes
    while better is not None:
        nodes = better
        better = _shorter(paths, nodes, limits, steps=num_steps(paths, nodes), tries=tries)
    return nodes


def _shorter(
    paths: RankPaths, nodes: Flags, limits: Limits, *, steps: int, tries: tuple[int, ...]
) -> Flags | None:
    """A tree that needs fewer than ``steps``, after as many swaps as there are ``tries``."""
    for added, removed in _promising_swaps(paths, nodes, limits)[: tries[0]]:
        swapped = nodes.copy()
        swapped[added], swapped[removed] = True, False
        if len(tries) > 1:
            found = _shorter(paths, swapped, limits, steps=steps, tries=tries[1:])
            if found is not None:
                return found
        elif num_steps(paths, swapped) < steps:
            return swapped
    return None


def _promising_swaps(paths: RankPaths, nodes: Flags, limits: Limits) -> list[tuple[int, int]]:
    """(node to add, leaf to remove), the most promising first."""
    gain, loss = _values(paths, nodes)
    has_child = np.zeros(paths.num_nodes, dtype=bool)
    inner = paths.parent[nodes]
    has_child[inner[inner >= 0]] = True
    leaves = np.flatnonzero(nodes & ~has_child)
    added = np.flatnonzero(gain > 0)
    added = added[np.argsort(-gain[added], kind="stable")[:MAX_ADDED]]
    worth = gain[added][:, None] - loss[leaves][None, :]
    is_allowed = paths.parent[added][:, None] != leaves[None, :]
    at_added, at_leaf = paths.depth[added][:, None], paths.depth[leaves][None, :]
    is_allowed &= (at_added == at_leaf) | ~_is_full(paths, nodes, limits)[at_added - 1]
    places = np.flatnonzero(is_allowed)
    order = places[np.argsort(-worth.ravel()[places], kind="stable")]
    rows, columns = np.unravel_index(order, worth.shape)
    return list(zip(added[rows].tolist(), leaves[columns].tolist(), strict=True))


def _values(paths: RankPaths, nodes: Flags) -> tuple[Ints, Ints]:
    """[M] each: steps that adding a node saves, and steps that removing a leaf costs.

    At each step of the walk one more node would be accepted, or the last one would not, and from
    there the walk goes on as it does with the tree as it is. That is the exact value of one change
    of one step, and all but exact for a change at all steps.
    """
    accepted = paths.accepted(nodes)
    next_rows = paths.next_rows(accepted)
    steps = steps_to_end(next_rows)
    rows = rows_of_steps(next_rows, paths.starts)
    depth = accepted[rows]
    after = steps[next_rows[rows]]

    beyond = np.append(paths.node_at[rows], np.full((len(rows), 1), paths.num_nodes), axis=1)
    candidate = np.take_along_axis(beyond, depth[:, None], axis=1)[:, 0]
    grows = candidate < paths.num_nodes
    further = paths.next_rows(accepted + 1)
    saved = after[grows] - steps[further[rows[grows]]]
    gain = np.bincount(candidate[grows], weights=saved, minlength=paths.num_nodes)

    falls = depth > 0
    last = paths.node_at[rows[falls], depth[falls] - 1]
    lost = steps[rows[falls] + depth[falls]] - after[falls]
    loss = np.bincount(last, weights=lost, minlength=paths.num_nodes)
    return gain.astype(np.int64), loss.astype(np.int64)


def best_chain(
    paths: RankPaths, *, max_length: int | None = None, latency: LatencyCurve | None = None
) -> Tree:
    """The shortest of the chains of first choices that need the fewest steps, or the least time."""
    longest = paths.num_heads if max_length is None else min(max_length, paths.num_heads)
    if latency is not None:
        longest = min(longest, latency.largest - 1)

    def cost(chain: Tree) -> float:
        steps = num_steps(paths, paths.nodes(chain))
        return steps if latency is None else steps * latency.milliseconds(chain.size)

    return min((Tree.chain(length) for length in range(1, longest + 1)), key=cost)


def marginal_tree(
    accuracy: npt.NDArray[np.float64] | Sequence[Sequence[float]], limits: Limits
) -> tuple[Path, ...]:
    """The paths of the best tree if heads were right independently of each other, best first.

    A node is worth the product of the accuracies along its path; of equal ones the shorter, then
    the one with smaller ranks is taken. Nodes that are worth nothing are never added.

    Args:
        accuracy: [K, R] share of head k's pairs whose true token has rank r.
        limits: of the tree.
    """
    table = np.asarray(accuracy, dtype=np.float64).tolist()
    chosen: list[Path] = []
    free = [limits.at(depth) for depth in range(1, len(table) + 1)]
    waiting: list[tuple[float, int, Path]] = []

    def offer(path: Path, value: float) -> None:
        if len(path) < len(table):
            for rank, share in enumerate(table[len(path)]):
                if value * share > 0:
                    heapq.heappush(waiting, (-value * share, len(path) + 1, (*path, rank)))

    offer((), 1.0)
    while waiting and len(chosen) < limits.num_nodes:
        value, depth, path = heapq.heappop(waiting)
        if free[depth - 1]:
            free[depth - 1] -= 1
            chosen.append(path)
            offer(path, -value)
    return tuple(chosen)
