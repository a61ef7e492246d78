"""Sampling with heads has the base's own distribution."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from medusa_train.tree.topology import Tree
from tests.lossless_for_tests import (
    CHAIN,
    TREE,
    VOCAB,
    chi_square_p,
    drawn_texts,
    exact_distribution,
)
from tests.models_for_tests import make_model

NUM_DRAWS = 20_000


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("tree", [CHAIN, TREE], ids=["chain", "tree"])
def test_the_first_four_tokens_have_the_bases_distribution(tree: Tree, temperature: float) -> None:
    counts, accepted, wanted = drawn_texts(tree, temperature=temperature, num_draws=NUM_DRAWS)
    assert sum(counts.values()) == NUM_DRAWS
    assert accepted > NUM_DRAWS // 20, "hardly a candidate was accepted, so this shows little"
    assert sum(wanted.values()) == pytest.approx(1)
    assert chi_square_p(counts, wanted) > 0.001


def test_the_test_sees_a_wrong_distribution() -> None:
    model = make_model("llama", vocab_size=VOCAB, seed=3, num_hidden_layers=1, std=0.35)
    wanted = exact_distribution(model, temperature=1.0, top_p=0.9)
    other = exact_distribution(model, temperature=0.95, top_p=0.9)
    torch.manual_seed(0)
    texts = list(wanted)
    for probabilities, is_right in [(other, False), (wanted, True)]:
        weights = torch.tensor([probabilities.get(text, 0.0) for text in texts])
        drawn = torch.multinomial(weights, NUM_DRAWS, replacement=True).tolist()
        counts = Counter(texts[i] for i in drawn)
        assert (chi_square_p(counts, wanted) > 0.001) == is_right
