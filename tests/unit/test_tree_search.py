from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from medusa_train.metrics import walked_rows
from medusa_train.tree.latency import LatencyCurve
from medusa_train.tree.rank_paths import MISS, RankPaths, rows_of_steps, steps_to_end
from medusa_train.tree.search import (
    Limits,
    best_chain,
    best_tree,
    count_sorted,
    fastest_tree,
    improve_by_swaps,
    marginal_tree,
    num_possible,
    num_steps,
)
from medusa_train.tree.topology import Path as RankPath
from medusa_train.tree.topology import Tree
from tests.reference import tree_reference as reference

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "tree_search_marginal.json").read_text()
)
NUM_HEADS = 3
NUM_RANKS = 4
Text = tuple[list[list[int]], list[tuple[int, int]]]


def _text(seed: int) -> Text:
    """Answers whose ranks are even, falling, or alike at all heads of a position."""
    generator = np.random.default_rng(seed)
    rows: list[list[int]] = []
    spans: list[tuple[int, int]] = []
    for _ in range(6):
        length = int(generator.integers(1, 60))
        spans.append((len(rows), len(rows) + length))
        for left in reversed(range(length)):
            even = generator.integers(-1, NUM_RANKS, NUM_HEADS)
            falling = generator.geometric(0.5, NUM_HEADS) - 1
            alike = np.where(generator.random(NUM_HEADS) < 0.7, generator.integers(4), even)
            ranks = (even, np.where(falling < NUM_RANKS, falling, MISS), alike)[seed % 3]
            rows.append([int(r) if head < left else MISS for head, r in enumerate(ranks)])
    return rows, spans


def _paths(text: Text, *, top_k: int = NUM_RANKS, max_depth: int | None = None) -> RankPaths:
    rows, spans = text
    ranks = np.array(rows, dtype=np.int16)
    return RankPaths.of(ranks, spans=spans, top_k=top_k, max_depth=max_depth)


@cache
def _all_trees(num_nodes: int) -> list[frozenset[RankPath]]:
    return list(reference.all_trees(num_nodes, num_heads=NUM_HEADS, num_ranks=NUM_RANKS))


@pytest.mark.parametrize("seed", range(6))
def test_the_walk_equals_plain_loops_for_any_tree(seed: int) -> None:
    rows, spans = text = _text(seed)
    paths = _paths(text)
    generator = np.random.default_rng(seed)
    for size in range(6):
        trees = _all_trees(size)
        for index in generator.integers(0, len(trees), 5).tolist():
            tree = trees[index]
            nodes = paths.nodes(Tree(tuple(tree)))
            accepted = paths.accepted(nodes)
            assert accepted.tolist() == [reference.accepted(set(tree), row) for row in rows]
            next_rows = paths.next_rows(accepted)
            walked = walked_rows(accepted.tolist(), spans)
            assert sorted(rows_of_steps(next_rows, paths.starts).tolist()) == walked
            assert num_steps(paths, nodes) == len(walked)
            assert len(walked) == reference.steps(set(tree), rows, spans)
            for start, end in spans:
                inside = [row for row in walked if start <= row < end]
                assert steps_to_end(next_rows)[start] == len(inside)


def test_paths_are_counted() -> None:
    text = _text(2)
    paths = _paths(text)
    counts = Counter(
        tuple(row[:length])
        for row in text[0]
        for length in range(1, NUM_HEADS + 1)
        if MISS not in row[:length]
    )
    found = {paths.path(node): int(paths.count[node]) for node in range(paths.num_nodes)}
    assert found == counts
    assert list(found) == sorted(found, key=lambda path: (len(path), path))
    assert paths.tree(np.ones(paths.num_nodes, dtype=bool)) == Tree(tuple(counts))
    narrow = _paths(text, top_k=2, max_depth=2)
    shown = {narrow.path(node) for node in range(narrow.num_nodes)}
    assert shown == {path for path in counts if len(path) <= 2 and max(path) < 2}


@pytest.mark.parametrize("num_nodes", range(1, 8))
def test_the_count_sorted_tree_is_the_best_on_all_positions(num_nodes: int) -> None:
    for seed in range(3):
        rows, _ = text = _text(seed)
        paths = _paths(text)
        tree = paths.tree(count_sorted(paths, Limits(num_nodes)))
        assert set(tree.paths) == set(reference.most_frequent(rows, num_nodes))
        value = reference.accepted_on_all_rows(set(tree.paths), rows)
        counts = {paths.path(node): int(paths.count[node]) for node in range(paths.num_nodes)}
        others = (sum(counts.get(path, 0) for path in other) for other in _all_trees(num_nodes))
        assert value == max(others)


@pytest.mark.parametrize("seed", range(12))
def test_swaps_never_lengthen_the_walk(seed: int) -> None:
    paths = _paths(_text(seed))
    for num_nodes in (1, 2, 5, 9, 20):
        limits = Limits(num_nodes)
        before = count_sorted(paths, limits)
        swapped, best = improve_by_swaps(paths, before, limits), best_tree(paths, limits)
        assert swapped.sum() == before.sum()
        assert num_steps(paths, best) <= num_steps(paths, swapped) <= num_steps(paths, before)


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 4])
def test_swaps_come_within_a_percent_of_the_best_walk(num_nodes: int) -> None:
    for seed in range(18 if num_nodes < 4 else 9):
        paths = _paths(_text(seed))
        found = num_steps(paths, best_tree(paths, Limits(num_nodes)))
        trees = (paths.nodes(Tree(tuple(tree))) for tree in _all_trees(num_nodes))
        assert found <= 1.01 * min(num_steps(paths, nodes) for nodes in trees)


def test_another_tree_can_walk_further() -> None:
    """Rank 0 is the most frequent, but half of its rows are skipped, and none of rank 1's."""
    ranks = [0, 0, 0, 0, MISS, 1, MISS, 1, MISS, 1, MISS]
    paths = _paths(([[rank] for rank in ranks], [(0, 11)]))
    most_frequent, best = count_sorted(paths, Limits(1)), best_tree(paths, Limits(1))
    assert paths.tree(most_frequent).paths == ((0,),)
    assert num_steps(paths, most_frequent) == 2 + 1 + 6
    assert paths.tree(best).paths == ((1,),)
    assert num_steps(paths, best) == 4 + 1 + 3


def test_zero_counts_are_never_added() -> None:
    paths = _paths(([[0, 1], [MISS, MISS]], [(0, 2)]))
    limits = Limits(63)
    assert paths.tree(count_sorted(paths, limits)).paths == ((0,), (0, 1))
    assert paths.tree(best_tree(paths, limits)).paths == ((0,), (0, 1))
    nothing = _paths(([[MISS, MISS]], [(0, 1)]))
    assert best_tree(nothing, limits).tolist() == []
    assert num_steps(nothing, best_tree(nothing, limits)) == 1
    empty = RankPaths.of(np.empty((0, 2), dtype=np.int16), spans=[], top_k=3)
    assert num_steps(empty, best_tree(empty, limits)) == 0


@pytest.mark.parametrize("seed", range(6))
def test_limits_of_each_depth_are_kept(seed: int) -> None:
    paths = _paths(_text(seed))
    limits = Limits(9, per_depth=(2, 3))
    for nodes in (count_sorted(paths, limits), best_tree(paths, limits)):
        depths = Counter(map(len, paths.tree(nodes).paths))
        assert depths[1] <= 2
        assert depths[2] <= 3
        assert sum(depths.values()) <= 9


def test_what_is_possible() -> None:
    assert num_possible(num_heads=2, top_k=2) == 6
    assert num_possible(num_heads=2, top_k=2, limits=Limits(63)) == 6
    assert num_possible(num_heads=4, top_k=10, limits=Limits(63)) == 63
    assert num_possible(num_heads=3, top_k=10, limits=Limits(63, per_depth=(2, 5, 1))) == 8


def test_the_chain_is_the_shortest_that_is_best() -> None:
    text = ([[0, 0, 1], [0, MISS, MISS], [MISS] * 3], [(0, 3)])
    assert best_chain(_paths(text)) == Tree.chain(2)
    assert best_chain(_paths(text), max_length=1) == Tree.chain(1)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: str(case["num_nodes"]))
def test_the_original_implementation_gives_the_same_marginal_tree(case: dict[str, list]) -> None:
    limits = Limits(case["num_nodes"])  # type: ignore[arg-type]
    found = marginal_tree(case["marginal_accuracy"], limits)
    assert [list(path) for path in found] == case["paths"]


def test_marginal_trees_have_only_what_can_be_right() -> None:
    assert marginal_tree([[0.5, 0.0], [0.0, 0.25]], Limits(10)) == ((0,), (0, 1))
    assert marginal_tree([[0.5, 0.4], [0.3, 0.2]], Limits(10, per_depth=(1,))) == (
        (0,), (0, 0), (0, 1),
    )  # fmt: skip


def test_a_latency_curve_is_straight_between_what_was_measured() -> None:
    curve = LatencyCurve.of({"8": 4.0, "2": 1.0, "16": 5})
    assert [curve.milliseconds(size) for size in (1, 2, 4, 5, 8, 12, 16)] == [
        1.0, 1.0, 2.0, 2.5, 4.0, 4.5, 5.0,
    ]  # fmt: skip
    assert curve.largest == 16
    assert curve.as_json() == {"2": 1.0, "8": 4.0, "16": 5.0}
    assert LatencyCurve.of({2: 1.0, 8: 4.0, 16: 5.0}) == curve


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({}, "has no time of a step of two or more tokens"),
        ({"1": 3.0}, "has no time of a step of two or more tokens"),
        ({"0": 3.0}, "'0' is no number of tokens"),
        ({"1.5": 3.0}, "'1.5' is no number of tokens"),
        ({"2": 0.0}, "0.0 is no time in milliseconds"),
        ({"2": float("nan")}, "nan is no time in milliseconds"),
        ({"2": "3"}, "'3' is no time in milliseconds"),
        ({"2": True}, "True is no time in milliseconds"),
    ],
)
def test_what_is_no_latency_curve_is_refused(times: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LatencyCurve.of(times)


@pytest.mark.parametrize("seed", range(4))
def test_the_fastest_tree_of_all_small_ones(seed: int) -> None:
    paths = _paths(_text(seed))
    curves = {
        "dear": LatencyCurve.of({1: 10, 4: 30}),
        "cheap": LatencyCurve.of({1: 10, 4: 10.1}),
        "dear from three": LatencyCurve.of({1: 10, 3: 10.5, 4: 20}),
    }
    for curve in curves.values():
        found = fastest_tree(paths, Limits(63), curve)
        assert 1 <= found.sum() <= 3
        every = [Tree(tuple(tree)) for size in (1, 2, 3) for tree in _all_trees(size)]
        times = [num_steps(paths, paths.nodes(t)) * curve.milliseconds(t.size) for t in every]
        time = num_steps(paths, found) * curve.milliseconds(int(found.sum()) + 1)
        assert time <= 1.01 * min(times)
    assert fastest_tree(paths, Limits(63), curves["cheap"]).sum() == 3
    assert best_chain(paths, latency=curves["dear"]).depth == 1
