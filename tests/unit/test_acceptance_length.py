"""What a report says of a chain or tree is what the decoder does on the same greedy texts."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from medusa_train.data.conversations import Conversation
from medusa_train.decoding.generate import Generated, Generator
from medusa_train.evaluate.accuracy import accuracy_report, num_accepted, walk, walked_rows
from medusa_train.evaluate.ranks import Ranks, compute_ranks
from medusa_train.evaluate.tree import num_accepted_by, search_tree
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


@functools.cache
def decoder() -> Generator:
    model = make_model(vocab_size=VOCAB, dtype=torch.float64, seed=1, std=0.35)
    heads = random_heads(model, layout="full", seed=5).double()
    return Generator(model, heads, num_tokens=VOCAB)


def decode(
    tree: Tree, *, max_new_tokens: int, is_batch: bool = False
) -> tuple[list[Conversation], list[list[int]]]:
    """Greedy answers to twelve prompts, and num_accepted of each step of each answer."""
    prompts = torch.tensor([[n, (3 * n + 5) % VOCAB, (7 * n + 1) % VOCAB] for n in range(VOCAB)])
    rows: list[Conversation] = []
    accepted: list[list[int]] = []
    for batch in [prompts] if is_batch else prompts.split(1):
        result = decoder().generate(
            batch,
            attention_mask=torch.ones_like(batch),
            tree=tree,
            max_new_tokens=max_new_tokens,
            eos_token_id=STOP,
            pad_token_id=STOP,
            return_dict_in_generate=True,
        )
        assert isinstance(result, Generated)
        statistics = result.statistics
        assert statistics.num_steps == sum(map(len, statistics.accepted))
        assert statistics.num_tokens == statistics.num_steps + sum(map(sum, statistics.accepted))
        for text, row in zip(result.sequences.tolist(), statistics.accepted, strict=True):
            end = 3 + len(row) + sum(row)
            rows.append(conversation(text[:end], [(3, end)], name=str(len(rows))))
            accepted.append(row)
    return rows, accepted


def ranks_of(rows: list[Conversation]) -> Ranks:
    model = decoder().model
    heads = random_heads(model, layout="full", seed=5).double()
    return compute_ranks(make_base(model), heads, conversations=rows, top_k=5, metadata={})


def measured(accepted: list[list[int]]) -> float:
    """Tokens emitted ÷ steps."""
    steps = sum(map(len, accepted))
    return (steps + sum(map(sum, accepted))) / steps


@pytest.mark.parametrize("max_new_tokens", [1, 25])
@pytest.mark.parametrize("tree", [CHAIN, FULL_TREE, WIDE], ids=["chain", "2x2x2", "wide"])
@pytest.mark.parametrize("is_batch", [False, True], ids=["one-by-one", "batch"])
def test_the_reports_acceptance_length_is_the_decoders(
    tree: Tree, max_new_tokens: int, is_batch: bool
) -> None:
    rows, accepted = decode(tree, max_new_tokens=max_new_tokens, is_batch=is_batch)
    ranks = ranks_of(rows)
    by_row = num_accepted_by(tree, ranks)
    assert by_row.tolist() == accepted_by_tree(ranks, tree).tolist()
    for n, row in enumerate(accepted):
        own = ranks.conversation == n
        one = ranks.of_conversations(torch.arange(len(rows)) == n)
        assert by_row[own.numpy()][walked_rows(by_row[own.numpy()], one)].tolist() == row
    assert walk(by_row, ranks).value == measured(accepted)
    if tree is CHAIN:
        assert by_row.tolist() == num_accepted(ranks).tolist()
        report = accuracy_report(ranks, base_model="tiny", num_bootstrap=2)
        assert report["chain"]["acceptance_length"] == measured(accepted)
    if max_new_tokens > 1:
        assert measured(accepted) > 1.1


def test_the_chain_of_the_first_heads_is_the_decoders() -> None:
    rows, _ = decode(CHAIN, max_new_tokens=25)
    chain = accuracy_report(ranks_of(rows), base_model="tiny", num_bootstrap=2)["chain"]
    for row in chain["by_length"]:
        texts, accepted = decode(Tree.chain(row["num_heads"]), max_new_tokens=25)
        assert [text.input_ids for text in texts] == [text.input_ids for text in rows]
        assert row["acceptance_length"] == measured(accepted)
    assert len({row["acceptance_length"] for row in chain["by_length"]}) > 1


@pytest.mark.parametrize("num_nodes", [2, 7, 20])
def test_the_tree_that_is_found_walks_as_its_report_says(num_nodes: int) -> None:
    rows, _ = decode(CHAIN, max_new_tokens=25)
    ranks = ranks_of(rows)
    result = search_tree(ranks, report_on=ranks, num_nodes=num_nodes, num_bootstrap=2)
    tree = Tree.from_paths(result["paths"])
    assert tree.num_nodes == num_nodes
    texts, accepted = decode(tree, max_new_tokens=25)
    assert [row.input_ids for row in texts] == [row.input_ids for row in rows]
    assert result["acceptance_length"] == measured(accepted)
    (chain,) = (row for row in result["comparison"] if row["name"] == "best chain")
    _, accepted = decode(Tree.chain(chain["depth"]), max_new_tokens=25)
    assert chain["acceptance_length"] == measured(accepted)
    assert result["acceptance_length"] >= chain["acceptance_length"] > 1 or num_nodes < 3


def test_what_a_truncated_vocabulary_cannot_say_is_a_miss_for_both() -> None:
    model = decoder().model
    heads = random_heads(model, seed=3, token_map=torch.tensor([1, 4, 5, 9])).double()
    generator = Generator(model, heads, num_tokens=VOCAB)
    prompt = torch.tensor([[3, 8, 6]])
    result = generator.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        tree=WIDE,
        max_new_tokens=60,
        pad_token_id=0,
        return_dict_in_generate=True,
    )
    assert isinstance(result, Generated)
    (row,) = result.statistics.accepted
    text = conversation(result.sequences[0].tolist(), [(3, 63)], name="one")
    ranks = compute_ranks(make_base(model), heads, conversations=[text], top_k=4, metadata={})
    by_row = num_accepted_by(WIDE, ranks)
    assert by_row[walked_rows(by_row, ranks)].tolist() == row
    assert sum(row) > 0
