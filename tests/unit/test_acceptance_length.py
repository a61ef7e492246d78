"""What a report says of a chain or tree is what the decoder does on the same greedy texts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from medusa_train.data.conversations import Conversation
from medusa_train.decoding.generate import Generated, Generator
from medusa_train.evaluate.accuracy import accuracy_report, num_accepted, walk, walked_rows
from medusa_train.evaluate.ranks import Ranks, compute_ranks
from medusa_train.tree.topology import Tree
from tests.decoding_for_tests import CHAIN, FULL_TREE, random_heads
from tests.models_for_tests import make_base, make_model
from tests.training_for_tests import conversation

VOCAB, STOP = 12, 2
WIDE = Tree.from_paths([(0,), (1,), (2,), (3,), (1, 0), (1, 1), (1, 1, 2), (3, 0)])


def accepted_by_tree(ranks: Ranks, tree: Tree) -> np.ndarray:
    """[N] the longest of the tree's paths that the ranks of each row begin with."""
    known = {(), *tree.paths}
    result = []
    for row, num_valid in zip(ranks.ranks.tolist(), ranks.num_valid.tolist(), strict=True):
        depth = 0
        while depth < num_valid and tuple(row[: depth + 1]) in known:
            depth += 1
        result.append(depth)
    return np.array(result)


@pytest.mark.parametrize("max_new_tokens", [1, 25])
@pytest.mark.parametrize("tree", [CHAIN, FULL_TREE, WIDE], ids=["chain", "2x2x2", "wide"])
@pytest.mark.parametrize("is_batch", [False, True], ids=["one-by-one", "batch"])
def test_the_reports_acceptance_length_is_the_decoders(
    tree: Tree, max_new_tokens: int, is_batch: bool
) -> None:
    model = make_model(vocab_size=VOCAB, dtype=torch.float64, seed=1, std=0.35)
    heads = random_heads(model, layout="full", seed=5).double()
    generator = Generator(model, heads, num_tokens=VOCAB)
    prompts = torch.tensor([[n, (3 * n + 5) % VOCAB, (7 * n + 1) % VOCAB] for n in range(VOCAB)])
    rows: list[Conversation] = []
    accepted: list[list[int]] = []
    tokens = steps = 0
    for batch in [prompts] if is_batch else prompts.split(1):
        result = generator.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            tree=tree,
            max_new_tokens=max_new_tokens,
            eos_token_id=STOP,
            pad_token_id=STOP,
            return_dict_in_generate=True,
        )
        assert isinstance(result, Generated)
        tokens += result.statistics.num_tokens
        steps += result.statistics.num_steps
        for text, row in zip(result.sequences.tolist(), result.statistics.accepted, strict=True):
            end = 3 + len(row) + sum(row)
            rows.append(conversation(text[:end], [(3, end)], name=str(len(rows))))
            accepted.append(row)
    ranks = compute_ranks(make_base(model), heads, conversations=rows, top_k=5, metadata={})
    by_row = accepted_by_tree(ranks, tree)
    assert by_row[walked_rows(by_row, ranks)].tolist() == [num for row in accepted for num in row]
    assert walk(by_row, ranks).value == tokens / steps
    if tree is CHAIN:
        assert by_row.tolist() == num_accepted(ranks).tolist()
        report = accuracy_report(ranks, base_model="tiny", num_bootstrap=2)
        assert report["chain"]["acceptance_length"] == tokens / steps
    if max_new_tokens > 1:
        assert tokens / steps > 1.1
