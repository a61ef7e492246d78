"""Laws of candidate trees, for any tree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from medusa_train.tree.topology import Path, Tree


@st.composite
def trees(draw: st.DrawFn, *, num_heads: int = 4, top_k: int = 5, most: int = 20) -> Tree:
    """Random paths with all their prefixes."""
    path = st.lists(st.integers(0, top_k - 1), min_size=1, max_size=num_heads)
    drawn = draw(st.lists(path, max_size=most))
    paths = {tuple(p[:end]) for p in drawn for end in range(1, len(p) + 1)}
    return Tree.from_paths(draw(st.permutations(sorted(paths))))


def _node_paths(tree: Tree) -> list[Path]:
    return [(), *tree.paths]


@given(trees())
def test_the_mask_is_the_ancestor_relation(tree: Tree) -> None:
    paths = _node_paths(tree)
    expected = [[path[: len(other)] == other for other in paths] for path in paths]
    assert tree.mask.tolist() == expected
    assert tree.mask.sum(dim=1).tolist() == (tree.depths + 1).tolist()


@given(trees())
def test_parents_children_and_candidates_agree(tree: Tree) -> None:
    paths = _node_paths(tree)
    for node, path in enumerate(paths[1:], start=1):
        parent = int(tree.parents[node])
        assert paths[parent] == path[:-1]
        assert int(tree.children[parent, path[-1]]) == node
    assert int((tree.children >= 0).sum()) == tree.num_nodes


@given(trees())
def test_each_leaf_has_one_retrieved_path(tree: Tree) -> None:
    paths = _node_paths(tree)
    retrieved = []
    for row in tree.retrieve_indices.tolist():
        nodes = [node for node in row if node >= 0]
        assert row == nodes + [-1] * (tree.depth + 1 - len(nodes))
        leaf = paths[nodes[-1]]
        assert [paths[node] for node in nodes] == [leaf[:end] for end in range(len(leaf) + 1)]
        retrieved.append(leaf)
    leaves = [p for p in paths if not any(q[: len(p)] == p and q != p for q in paths)]
    assert sorted(retrieved) == sorted(leaves)
