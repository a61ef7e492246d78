from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
import torch

from medusa_train.data.conversations import Conversation
from medusa_train.errors import InputError
from medusa_train.evaluate.accuracy import num_accepted, walk, walked_rows
from medusa_train.evaluate.ranks import MISS, Ranks, compute_ranks
from medusa_train.evaluate.tree import (
    is_searched,
    nodes_reached,
    num_accepted_by,
    search_tree,
)
from medusa_train.evaluate.tree_picture import tree_plot
from medusa_train.evaluate.tree_report import read_latency, tree_summary, write_tree
from medusa_train.heads.config import HeadsConfig
from medusa_train.heads.model import MedusaHeads
from medusa_train.tree.latency import LatencyCurve
from medusa_train.tree.topology import Tree
from tests.models_for_tests import make_base, make_model
from tests.reference import tree_reference as reference
from tests.training_for_tests import conversation

VOCAB = 12
STOP = 2


def _ranks(
    *, conversations: int = 12, length: int = 40, num_heads: int = 3, top_k: int = 4, seed: int = 0
) -> Ranks:
    generator = torch.Generator().manual_seed(seed)
    count = conversations * length
    position = torch.arange(length).repeat(conversations)
    num_valid = (length - 1 - position).clamp(max=num_heads)
    drawn = torch.randint(-1, top_k, (count, num_heads), generator=generator)
    ranks = torch.where(torch.rand(count, num_heads, generator=generator) < 0.4, 0, drawn)
    ranks[torch.arange(num_heads)[None] >= num_valid[:, None]] = MISS
    return Ranks(
        ranks=ranks.short(),
        num_valid=num_valid.short(),
        conversation=torch.arange(conversations).repeat_interleave(length).int(),
        position=(position + 7).int(),
        span=torch.zeros(count, dtype=torch.int32),
        metadata={
            "top_k": top_k,
            "text_sampling": {"temperature": 0},
            "heads_fingerprint": "abc",
            "conversation_ids": [f"row {n}" for n in range(conversations)],
        },
    )


@pytest.mark.parametrize(
    "paths",
    [
        [(0,)],
        [(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)],
        [(0,), (1,), (2,), (0, 2), (2, 0), (2, 0, 1), (2, 1)],
        [(n,) for n in range(6)],
    ],
)
@pytest.mark.parametrize("max_new_tokens", [1, 25])
def test_the_report_equals_a_naive_decode_with_the_tree(
    paths: list[tuple[int, ...]], max_new_tokens: int
) -> None:
    """Exactly, on greedy text: the same steps, and the same candidates accepted at each."""
    rows: list[Conversation] = []
    accepted: list[int] = []
    tokens = steps = 0
    model = make_model(vocab_size=VOCAB, dtype=torch.float64, seed=1, std=0.35)
    heads = MedusaHeads(HeadsConfig(3, 1, "full", 32, VOCAB), dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    for n in range(6):
        prompt = [n, (3 * n + 5) % VOCAB, (7 * n + 1) % VOCAB]
        counts = reference.decode(
            model, heads, prompt, tree=set(paths), stop=STOP, max_new_tokens=max_new_tokens
        )
        text = prompt + counts.answer
        rows.append(conversation(text, [(3, len(text))], name=str(n)))
        tokens += len(counts.answer)
        steps += counts.steps
        accepted += counts.accepted
    ranks = compute_ranks(make_base(model), heads, conversations=rows, top_k=6, metadata={})
    leading = num_accepted_by(Tree(tuple(paths)), ranks)
    assert walk(leading, ranks).value == tokens / steps
    assert leading[walked_rows(leading, ranks)].tolist() == accepted
    assert max_new_tokens == 1 or max(accepted) > 0


def test_a_chain_is_the_tree_of_first_choices() -> None:
    ranks = _ranks()
    assert np.array_equal(num_accepted_by(Tree.chain(3), ranks), num_accepted(ranks))
    root = nodes_reached(Tree(()), ranks.ranks)
    assert root.tolist() == [0] * len(ranks.ranks)


def test_nodes_by_hand() -> None:
    tree = Tree(((0,), (1,), (1, 0), (1, 0, 0)))
    ranks = torch.tensor([[0, 0, 0], [1, 0, 0], [1, 2, 0], [MISS, 0, 0], [3, 0, 0], [1, 0, MISS]])
    assert nodes_reached(tree, ranks.short()).tolist() == [1, 4, 2, 0, 0, 3]


def test_tree_json_adds_up() -> None:
    result = search_tree(_ranks(), num_nodes=8, num_bootstrap=50)
    tree = Tree(tuple(tuple(path) for path in result["paths"]))
    assert result["num_nodes"] == tree.num_nodes == 8
    assert result["acceptance_length"] == pytest.approx(1 + sum(result["probabilities"]))
    assert result["method"] == "joint"
    assert (result["objective"], result["latency_ms"]) == ("acceptance", None)
    assert result["notes"] == []
    first, *others = result["comparison"]
    assert first["acceptance_length"] == result["acceptance_length"]
    assert [row["name"] for row in others] == [
        "most frequent paths", "independent heads", "best chain",
    ]  # fmt: skip
    for row in others:
        difference = first["acceptance_length"] - row["acceptance_length"]
        assert row["tree_is_longer_by"] == pytest.approx(difference)
        low, high = row["tree_is_longer_by_ci95"]
        assert low <= difference <= high
    counts = [result[text]["num_conversations"] for text in ("searched", "reported")]
    assert sum(counts) == 12
    assert min(counts) > 0


def test_the_figures_are_of_conversations_that_were_not_searched() -> None:
    ranks = _ranks()
    searched = is_searched(ranks, 0.5)
    result = search_tree(ranks, num_nodes=6, num_bootstrap=20)
    tree = Tree(tuple(tuple(path) for path in result["paths"]))
    others = ranks.of_conversations(~searched)
    assert len(others.metadata["conversation_ids"]) == int((~searched).sum())
    assert result["acceptance_length"] == walk(num_accepted_by(tree, others), others).value
    # What the other conversations say changes the figures, and not the tree.
    changed = ranks.ranks.clone()
    changed[~searched[ranks.conversation.long()]] = MISS
    blank = Ranks(
        changed, ranks.num_valid, ranks.conversation, ranks.position, ranks.span, ranks.metadata
    )
    again = search_tree(blank, num_nodes=6, num_bootstrap=20)
    assert again["paths"] == result["paths"]
    assert again["acceptance_length"] == 1.0


def test_a_conversation_keeps_its_side() -> None:
    few, many = _ranks(conversations=8), _ranks(conversations=30, seed=3)
    assert torch.equal(is_searched(few, 0.5), is_searched(many, 0.5)[:8])
    small, large = (is_searched(many, fraction) for fraction in (0.2, 0.7))
    assert (small <= large).all()
    for fraction in (0.0001, 0.9999):
        sides = is_searched(few, fraction)
        assert 0 < int(sides.sum()) < 8
    alone = _ranks(conversations=1)
    assert is_searched(alone, 0.5).tolist() == [True]
    result = search_tree(alone, num_nodes=3, num_bootstrap=20)
    assert result["reported"]["what"] == "the searched text"
    assert result["ci95"] is None
    assert "they need 2 conversations" in tree_summary(result)


def test_other_text_can_be_reported_on() -> None:
    ranks, other = _ranks(), _ranks(conversations=5, seed=9)
    result = search_tree(ranks, report_on=other, num_nodes=6, num_bootstrap=20)
    tree = Tree(tuple(tuple(path) for path in result["paths"]))
    assert result["searched"]["num_conversations"] == 12
    assert result["reported"]["num_conversations"] == 5
    assert result["acceptance_length"] == walk(num_accepted_by(tree, other), other).value
    other.metadata["heads_fingerprint"] = "def"
    with pytest.raises(InputError, match=r"are of other heads \(def\) than those to search \(abc"):
        search_tree(ranks, report_on=other)


def test_more_nodes_than_are_possible() -> None:
    """Case 16: two heads with two ranks make six nodes."""
    ranks = _ranks(num_heads=2, top_k=2)
    result = search_tree(ranks, num_nodes=63, num_bootstrap=20)
    assert result["num_nodes"] == 6
    assert result["paths"] == [[0], [1], [0, 0], [0, 1], [1, 0], [1, 1]]
    assert result["notes"] == [
        "63 nodes asked for: only 6 are possible with 2 heads and the 2 most likely tokens of each"
    ]
    narrow = search_tree(_ranks(), num_nodes=63, top_k=2, max_depth=2, num_bootstrap=20)
    assert narrow["paths"] == result["paths"]


def test_one_head_and_many_heads() -> None:
    """Case 16."""
    one = search_tree(_ranks(num_heads=1), num_nodes=63, num_bootstrap=20)
    assert one["paths"] == [[0], [1], [2], [3]]
    many = search_tree(_ranks(num_heads=8), num_nodes=63, num_bootstrap=20)
    assert many["num_nodes"] == 63


def test_fewer_paths_in_the_text_than_asked_for() -> None:
    result = search_tree(_ranks(conversations=2, length=4), num_nodes=63, num_bootstrap=20)
    assert result["num_nodes"] < 63
    assert result["notes"] == [
        f"63 nodes asked for: only {result['num_nodes']} paths occur in the searched text"
    ]


def test_limits_of_depths_are_kept() -> None:
    result = search_tree(_ranks(), num_nodes=63, per_depth=(2, 3, 1), num_bootstrap=20)
    depths = [len(path) for path in result["paths"]]
    assert (depths.count(1), depths.count(2), depths.count(3)) == (2, 3, 1)
    assert "only 6 are possible" in result["notes"][0]


def test_a_latency_curve_chooses_the_size() -> None:
    dear = LatencyCurve.of({"1": 10, "2": 30, "3": 60})
    result = search_tree(_ranks(), latency=dear, num_bootstrap=20)
    assert result["num_nodes"] == 1
    assert result["objective"] == "tokens_per_second"
    assert result["latency_ms"] == {"1": 10.0, "2": 30.0, "3": 60.0}
    first = result["comparison"][0]
    assert first["tokens_per_second"] == pytest.approx(1000 * first["acceptance_length"] / 30)
    assert "no step of more than 3 tokens was measured" in result["notes"][0]
    assert "tokens/s" in tree_summary(result)
    cheap = search_tree(_ranks(), latency=LatencyCurve.of({"1": 10, "64": 10}), num_bootstrap=20)
    assert cheap["num_nodes"] > 30


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_depth": 4}, "max depth 4: there are 3 heads"),
        ({"top_k": 5}, "top k 5: the file holds the ranks below 4; measure the heads with --top-k"),
    ],
)
def test_what_the_ranks_do_not_hold_is_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        search_tree(_ranks(), **options)  # type: ignore[arg-type]


def test_a_search_is_repeatable() -> None:
    first, second = (search_tree(_ranks(), num_nodes=20, num_bootstrap=30) for _ in range(2))
    assert first == second


def test_files_of_a_tree(tmp_path: Path) -> None:
    result = search_tree(_ranks(), num_nodes=9, num_bootstrap=30)
    write_tree(result, directory=tmp_path / "report", choices=tmp_path / "heads")
    assert json.loads((tmp_path / "report" / "tree.json").read_text()) == result
    choices = json.loads((tmp_path / "heads" / "medusa_choices.json").read_text())
    assert choices == sorted(choices, key=lambda path: (len(path), path)) == result["paths"]
    assert (tmp_path / "report" / "tree.png").read_bytes().startswith(b"\x89PNG")
    svg = ET.parse(tmp_path / "report" / "tree.svg").getroot()  # noqa: S314
    assert svg.tag == "{http://www.w3.org/2000/svg}svg"
    assert "var(" not in (tmp_path / "report" / "tree.svg").read_text()
    plot = tree_plot(result)
    assert plot is not None
    assert plot.png == (tmp_path / "report" / "tree.png").read_bytes()


def test_heads_that_are_never_right_have_no_tree(tmp_path: Path) -> None:
    ranks = _ranks()
    write_tree(search_tree(ranks, num_nodes=2, num_bootstrap=20), directory=tmp_path)
    ranks.ranks.fill_(MISS)
    result = search_tree(ranks, num_bootstrap=20)
    assert (result["paths"], result["acceptance_length"]) == ([], 1.0)
    write_tree(result, directory=tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"tree.json", "medusa_choices.json"}


@pytest.mark.parametrize("size", [1, 9, 150])
def test_every_node_is_in_the_picture(size: int) -> None:
    paths = [[first, second] for first in range(12) for second in range(12)]
    tree = Tree.from_paths([[n] for n in range(12)] + paths)
    shown = tree.paths[:size]
    reported = {"num_conversations": 3, "num_positions": 40}
    result = {"paths": shown, "probabilities": [0.5 / (n + 1) for n in range(size)]}
    plot = tree_plot({**result, "reported": reported})
    assert plot is not None
    assert plot.title == f"The tree of {size} node{'' if size == 1 else 's'}"
    # A line to each node, and a circle for each node and the root.
    assert plot.svg.count('id="tree-line2d_') >= 2 * size + 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "must be a JSON object like"),
        ("{", "not valid JSON"),
        ('{"a": 1}', "'a' is no number of tokens; a curve has the milliseconds"),
        ('{"latency_ms": {"8": "x"}}', "'x' is no time in milliseconds"),
    ],
)
def test_wrong_latency_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "curve.json").write_text(text)
    with pytest.raises(InputError, match=message):
        read_latency(tmp_path / "curve.json")


def test_latency_files(tmp_path: Path) -> None:
    times: dict[str, Any] = {"1": 2.0, "8": 3.0}
    for content in (times, {"latency_ms": times, "device": "a CPU"}):
        (tmp_path / "curve.json").write_text(json.dumps(content))
        assert read_latency(tmp_path / "curve.json") == LatencyCurve.of(times)
