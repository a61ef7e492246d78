"""What the heads propose: the ranks of every report, and tokens alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from medusa_train.base_model.features import hidden_states, output_projection
from medusa_train.decoding.candidates import CandidateHeads, top_rows
from medusa_train.errors import InputError
from medusa_train.losses import ranks_of
from medusa_train.tree.topology import Tree
from tests.decoding_for_tests import FULL_TREE, random_heads
from tests.models_for_tests import make_model


@given(data=st.data(), width=st.integers(1, 9), num_values=st.integers(1, 4))
def test_candidates_are_in_the_order_of_ranks(
    data: st.DataObject, width: int, num_values: int
) -> None:
    values = st.lists(st.integers(0, num_values), min_size=width, max_size=width)
    logits = torch.tensor(data.draw(st.lists(values, min_size=1, max_size=3))).float()
    count = data.draw(st.integers(1, width))
    rows = top_rows(logits, count)
    for rank in range(count):
        assert ranks_of(logits, rows[:, rank]).tolist() == [rank] * len(logits)


@pytest.mark.parametrize("layout", ["full", "shared"])
@pytest.mark.parametrize("is_truncated", [False, True])
def test_nodes_get_their_ranks_token(layout: str, is_truncated: bool) -> None:
    model = make_model(seed=2, dtype=torch.float64)
    token_map = torch.tensor([3, 7, 20, 21, 40]) if is_truncated else None
    heads = random_heads(model, layout=layout, token_map=token_map)
    candidates = CandidateHeads(model, heads, num_tokens=64)
    states = hidden_states(model, torch.tensor([[4, 9, 2], [5, 5, 1]]))[:, -1]
    weight, bias = output_projection(model)
    logits = heads.logits(states, lm_head_weight=weight, lm_head_bias=bias)
    proposed = candidates.propose(states, FULL_TREE)
    for row in range(2):
        for path, token in zip(FULL_TREE.paths, proposed[row].tolist(), strict=True):
            order = logits[len(path) - 1, row].argsort(descending=True, stable=True).tolist()
            wanted = order[path[-1]]
            assert token == (wanted if token_map is None else int(token_map[wanted]))


def test_ids_beyond_the_tokenizer_are_never_proposed() -> None:
    model = make_model(vocab_size=72)
    heads = random_heads(model, layout="full")
    for head in heads:
        head[-1].weight.data[64:] *= 100
    tree = Tree.from_paths([(rank,) for rank in range(64)])
    candidates = CandidateHeads(model, heads, num_tokens=64)
    proposed = candidates.propose(torch.randn(5, 32), tree)
    assert sorted(proposed[0].tolist()) == list(range(64))
    assert int(proposed.max()) < 64


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([(0,), (0, 0), (0, 0, 0)], r"path \[0, 0, 0\]: has depth 3, but there are 2 heads"),
        ([(5,)], r"path \[5\]: has rank 5, but only the 5 most likely"),
    ],
)
def test_a_tree_that_the_heads_cannot_fill(paths: list[tuple[int, ...]], message: str) -> None:
    model = make_model()
    heads = random_heads(model, num_heads=2, token_map=torch.arange(5))
    candidates = CandidateHeads(model, heads, num_tokens=64)
    with pytest.raises(InputError, match=message):
        candidates.check_fits(Tree.from_paths(paths))
