from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from medusa_train.limits import MAX_TREE_NODES
from medusa_train.tree.topology import Tree, TreeError

GOLDEN: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "golden" / "tree_buffers.json").read_text()
)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_the_original_implementation_gives_the_same_tensors(case: dict[str, Any]) -> None:
    tree = Tree.from_paths(case["paths"], num_heads=5, top_k=10)
    rows = ["".join(str(int(cell)) for cell in row) for row in tree.mask.tolist()]
    assert rows == case["attention_mask"]
    assert tree.depths.tolist() == case["position_ids"]
    assert tree.candidate_indices(10).tolist() == case["tree_indices"]
    assert tree.retrieve_indices.tolist() == case["retrieve_indices"]


def test_a_tree_by_hand() -> None:
    tree = Tree(((1,), (0, 2), (0,)))
    assert tree.paths == ((0,), (1,), (0, 2))
    assert (tree.num_nodes, tree.size, tree.depth, tree.num_ranks) == (3, 4, 2, 3)
    assert tree.parents.tolist() == [-1, 0, 0, 1]
    assert tree.ranks.tolist() == [-1, 0, 1, 2]
    assert tree.children.tolist() == [[1, 2, -1], [-1, -1, 3], [-1, -1, -1], [-1, -1, -1]]
    assert tree.candidate_indices(4).tolist() == [0, 1, 2, 7]
    assert tree.retrieve_indices.tolist() == [[0, 1, 3], [0, 2, -1]]


def test_chains_and_the_root_alone() -> None:
    assert Tree.chain(3).paths == ((0,), (0, 0), (0, 0, 0))
    assert Tree.chain(3).mask.tolist() == [[j <= i for j in range(4)] for i in range(4)]
    root = Tree.chain(0)
    assert root == Tree(())
    assert (root.num_nodes, root.size, root.depth, root.num_ranks) == (0, 1, 0, 0)
    assert root.mask.tolist() == [[True]]
    assert root.retrieve_indices.tolist() == [[0]]
    assert root.children.shape == (1, 0)
    assert root.candidate_indices(10).tolist() == [0]


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0], [0, 1, 0]], r"path \[0, 1, 0\]: its prefix \[0, 1\] is not in the tree"),
        ([[1, 0], [0]], r"path \[1, 0\]: its prefix \[1\] is not in the tree"),
        ([[0], [1], [0]], r"path \[0\]: is there twice"),
        ([[0], []], r"path \[\]: must be a list of one or more ranks"),
        ([0, 1], r"path 0: must be a list of one or more ranks"),
        (["0"], r"path '0': must be a list of one or more ranks"),
        ([[0], [-1]], r"path \[-1\]: -1 is no rank"),
        ([[0.0]], r"path \[0.0\]: 0.0 is no rank"),
        ([[True]], r"path \[True\]: True is no rank"),
    ],
)
def test_what_is_no_tree_is_refused(paths: Any, message: str) -> None:
    with pytest.raises(TreeError, match=message):
        Tree.from_paths(paths)


@pytest.mark.parametrize("paths", [5, None, 1.5, "[[0]]"])
def test_what_is_no_list_of_paths_is_refused(paths: Any) -> None:
    with pytest.raises(
        TreeError, match=r"must be a list of paths such as \[\[0\], \[0, 0\]\], got"
    ):
        Tree.from_paths(paths)


def test_a_tree_has_no_more_nodes_than_its_limit() -> None:
    assert Tree.from_paths([[rank] for rank in range(MAX_TREE_NODES)]).num_nodes == MAX_TREE_NODES
    with pytest.raises(TreeError, match=r"1,025 nodes are too many; give a tree of at most 1,024"):
        Tree.from_paths([[rank] for rank in range(MAX_TREE_NODES + 1)])


def test_a_tree_that_the_heads_cannot_fill_is_refused() -> None:
    with pytest.raises(TreeError, match=r"path \[0, 0, 0\]: has depth 3, but there are 2 heads"):
        Tree.from_paths(Tree.chain(3).paths, num_heads=2)
    with pytest.raises(TreeError, match=r"path \[4\]: has rank 4, but only the 4 most likely"):
        Tree.from_paths([[0], [4]], top_k=4)
    with pytest.raises(TreeError, match="has rank 4"):
        Tree(((4,),)).candidate_indices(4)
