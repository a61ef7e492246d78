"""Which candidates are kept: against the original implementation's decisions and plain Python."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_train.decoding.acceptance import Typical, matching_child, typical_node
from medusa_train.errors import ArgumentError
from tests.reference.acceptance_reference import accepted_on_path

CASES = json.loads((Path(__file__).parents[1] / "golden" / "acceptance.json").read_text())["cases"]


def on_one_path(case: dict[str, Any], place: int) -> tuple[int, float]:
    """Accepted candidates and their log-likelihood; the case's paths share no logits."""
    tokens: list[int] = case["candidates"][place]
    logits = torch.tensor(case["logits"][place], dtype=torch.float64)
    if case["temperature"] == 0:
        node = 0
        for token in logits.argmax(dim=1).tolist():
            children = [node + 1] if node + 1 < len(tokens) else []
            child = matching_child(token, children=children, tokens=tokens)
            if child is None:
                return node, 0.0
            node = child
        return node, 0.0
    probabilities = (logits / case["temperature"]).softmax(dim=1)
    node = typical_node(
        probabilities,
        tokens=torch.tensor(tokens),
        parents=range(-1, len(tokens) - 1),
        typical=Typical(case["epsilon"], case["delta"]),
    )
    accepted = torch.tensor(tokens[1 : node + 1], dtype=torch.long)
    return node, float(probabilities[range(node), accepted].log().sum())


def path_to(node: int, tokens: list[int], parents: list[int]) -> list[int]:
    path = []
    while node >= 0:
        path.insert(0, tokens[node])
        node = parents[node]
    return path


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_decisions_of_the_original_implementation(case: dict[str, Any]) -> None:
    paths = [on_one_path(case, place) for place in range(len(case["candidates"]))]
    assert paths.index(max(paths)) == case["best_candidate"]
    assert max(paths)[0] == case["num_accepted"]


@given(data=st.data(), seed=st.integers(0, 1000))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_the_longest_then_likeliest_typical_path(data: st.DataObject, seed: int) -> None:
    num_nodes = data.draw(st.integers(1, 12))
    parents = [-1] + [data.draw(st.integers(0, node - 1)) for node in range(1, num_nodes)]
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 6, (num_nodes,), generator=generator)
    logits = torch.randn(num_nodes, 6, generator=generator, dtype=torch.float64)
    typical = Typical(0.2, 0.6)
    node = typical_node(logits.softmax(dim=1), tokens=tokens, parents=parents, typical=typical)

    def score(end: int) -> tuple[int, float]:
        path = []
        at = end
        while at >= 0:
            path.insert(0, at)
            at = parents[at]
        return accepted_on_path(
            tokens[path].tolist(),
            logits[path].tolist(),
            temperature=1.0,
            epsilon=typical.epsilon,
            delta=typical.delta,
        )

    best_length, best_likelihood = max(score(end) for end in range(num_nodes))
    depth = len(path_to(node, list(range(num_nodes)), parents)) - 1
    assert depth == best_length
    assert score(node) == pytest.approx((best_length, best_likelihood))


def test_what_typical_sampling_draws_from() -> None:
    probabilities = torch.tensor([[0.6, 0.3, 0.05, 0.05], [0.25, 0.25, 0.25, 0.25]])
    kept = Typical(0.09, 0.3).kept(probabilities)
    assert kept[0].tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert kept[1].tolist() == pytest.approx([0.25] * 4)
    # Nothing exceeds the threshold: the best token is left.
    assert Typical(0.9, 30.0).kept(probabilities)[0].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0.0, 0.3), "typical: epsilon must be a number between 0 and 1, got 0.0"),
        ((1.0, 0.3), "typical: epsilon must be a number between 0 and 1, got 1.0"),
        ((float("nan"), 0.3), "typical: epsilon must be a number between 0 and 1, got nan"),
        (("0.1", 0.3), "typical: epsilon must be a number between 0 and 1, got '0.1'"),
        ((0.1, 0.0), "typical: delta must be a number above 0, got 0.0"),
        ((0.1, float("inf")), "typical: delta must be a number above 0, got inf"),
        ((0.1, None), "typical: delta must be a number above 0, got None"),
    ],
)
def test_thresholds_that_mean_nothing(values: tuple[Any, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Typical(*values)
