"""Whether trees that follow the heads' own confidence at each step beat one tree for all steps.

    python scripts/try_dynamic_trees.py HEADS DATA [--base-model B] [--num-nodes 16] [--json]

DATA is a data set of the base's greedy answers. Its conversations are parted in two halves; what is
fitted on one (the static tree, the heads' temperatures, the threshold) is measured on the other, so
that all conversations count. Compared under the walk that a decoder takes:

- static: the best tree for the number of nodes, as ``medusa-eval tree`` finds it.
- dynamic: at each position the most probable paths, best first, as many as the static tree has.
  A path's probability is the product of its tokens' probabilities by the heads, each head with the
  temperature that fits best, times the share of tokens that its vocabulary has.
- dynamic, conditional: the same, but each head's temperature and share are those of positions where
  the heads before it were nearly right: heads are right together more often than independent ones.
- threshold: all paths more probable than a threshold, at most four times the nodes; the threshold
  gives the static tree's number of nodes on average over the steps.
"""

from __future__ import annotations

import argparse
import heapq
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medusa_train.base_model.features import output_projection
from medusa_train.base_model.load import BaseModel
from medusa_train.data.conversations import Conversation, read_conversations
from medusa_train.data.examples import valid_pairs
from medusa_train.evaluate.accuracy import Ratio, bootstrap_weights, walk, walked_rows
from medusa_train.evaluate.ranks import Ranks, compute_ranks
from medusa_train.evaluate.tables import interval, number, plain_table
from medusa_train.evaluate.tree import is_searched, num_accepted_by, search_tree
from medusa_train.heads.checkpoint import load_heads
from medusa_train.heads.model import MedusaHeads, num_candidate_rows
from medusa_train.hidden_states.online import states_of_rows
from medusa_train.losses import IGNORE
from medusa_train.trained_base import load_trained_base
from medusa_train.tree.topology import Tree

TOP_K = 10
TEMPERATURES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)
MOST_NODES = 4
"""Nodes of a tree by threshold, as a multiple of the static tree's."""


@dataclass(frozen=True, slots=True)
class Scores:
    """What the heads say at each of N rows.

    Attributes:
        top: [N, K, R] the greatest logits, descending.
        normalisers: [N, K, T] log of the sum of exponentials at each of :data:`TEMPERATURES`.
        true: [N, K] the true token's logit; nan where there is no such token or no logit for it.
    """

    top: Tensor
    normalisers: Tensor
    true: Tensor


def score(base: BaseModel, heads: MedusaHeads, rows: list[Conversation]) -> Scores:
    """Run base and heads over the conversations, in the order of :func:`compute_ranks`."""
    weight, bias = output_projection(base.model)
    num_heads, size = heads.config.num_heads, num_candidate_rows(heads, base.num_tokens)
    heads = heads.float()
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    for row in rows:
        pairs = valid_pairs(row.input_ids, row.assistant_spans, num_heads=num_heads)
        (states,) = states_of_rows(base.model, [row.input_ids], positions=[pairs.positions])
        labels = heads.labels_to_rows(pairs.labels, ignore=IGNORE)
        top, normalisers, true = [], [], []
        for head in range(num_heads):
            own, shift = heads.output_weight(head, lm_head_weight=weight, lm_head_bias=bias)
            logits = torch.nn.functional.linear(
                heads.trunk(states.float(), head=head),
                own[:size].float(),
                None if shift is None else shift[:size].float(),
            )
            top.append(logits.topk(TOP_K, dim=1).values)
            scaled = [(logits / value).logsumexp(dim=1) for value in TEMPERATURES]
            normalisers.append(torch.stack(scaled, dim=1))
            label = labels[:, head]
            found = logits.gather(1, label.clamp(0, size - 1)[:, None]).squeeze(1)
            true.append(torch.where((label >= 0) & (label < size), found, torch.nan))
        parts.append((torch.stack(top, 1), torch.stack(normalisers, 1), torch.stack(true, 1)))
    return Scores(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def calibrated(scores: Scores, ranks: Ranks, fitted: Tensor, *, conditional: bool) -> Tensor:
    """[N, K, R] probabilities of the candidates; all constants are those of the rows ``fitted``."""
    valid, temperatures = ranks.valid, torch.tensor(TEMPERATURES)
    probabilities = torch.empty_like(scores.top)
    for head in range(scores.top.shape[1]):
        used = fitted & valid[:, head]
        if conditional:
            used &= (ranks.ranks[:, :head] >= 0).all(dim=1)
        known = used & ~scores.true[:, head].isnan()
        logs = scores.true[known, head, None] / temperatures - scores.normalisers[known, head]
        best = int(logs.mean(dim=0).argmax())
        logs = scores.top[:, head] / TEMPERATURES[best] - scores.normalisers[:, head, best, None]
        probabilities[:, head] = logs.exp() * (known.sum() / used.sum())
    return probabilities


def reached(
    table: list[list[float]], true: list[int], *, num_nodes: int, threshold: float = 0.0
) -> tuple[int, int]:
    """Accepted candidates and nodes of the tree of the most probable paths.

    Args:
        table: [K][R] probabilities, descending in each row.
        true: [K] ranks of the true tokens, negative for misses.
        num_nodes: most nodes.
        threshold: paths below it are left out.
    """
    accepted, nodes = 0, 0
    waiting = [(-table[0][0], (0,))]
    while waiting and nodes < num_nodes:
        value, path = heapq.heappop(waiting)
        if -value < threshold:
            break
        nodes += 1
        depth, rank = len(path), path[-1]
        if list(path) == true[:depth]:
            accepted = depth
        if rank + 1 < len(table[depth - 1]):
            share = table[depth - 1][rank + 1] / table[depth - 1][rank]
            heapq.heappush(waiting, (value * share, (*path[:-1], rank + 1)))
        if depth < len(table):
            heapq.heappush(waiting, (value * table[depth][0], (*path, 0)))
    return accepted, nodes


def dynamic(
    tables: list[Any], ranks: Ranks, *, num_nodes: int, threshold: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """[N] accepted candidates, and [N] nodes, at each row."""
    found = [
        reached(table, true, num_nodes=num_nodes, threshold=threshold)
        for table, true in zip(tables, ranks.ranks.tolist(), strict=True)
    ]
    accepted, nodes = np.array(found, dtype=np.int64).T
    return accepted, nodes


def fitted_threshold(tables: list[Any], ranks: Ranks, *, num_nodes: int) -> float:
    """The threshold whose trees have ``num_nodes`` on average over the steps of a decoder."""
    low, high = 1e-5, 1.0
    for _ in range(14):
        middle = float(np.sqrt(low * high))
        accepted, nodes = dynamic(tables, ranks, num_nodes=MOST_NODES * num_nodes, threshold=middle)
        if nodes[walked_rows(accepted, ranks)].mean() > num_nodes:
            low = middle
        else:
            high = middle
    return high


def compare(scores: Scores, ranks: Ranks, *, num_nodes: int, num_bootstrap: int) -> dict[str, Any]:
    """The figures of every kind of tree; each half is measured with what the other one fits."""
    names = ("static", "dynamic", "dynamic, conditional", "threshold")
    accepted = {name: np.zeros(len(ranks.ranks), dtype=np.int64) for name in names}
    nodes = {name: np.full(len(ranks.ranks), num_nodes) for name in names}
    side = is_searched(ranks, 0.5)
    for fold in (side, ~side):
        fitted = fold[ranks.conversation.long()]
        ours, theirs = fitted.numpy(), ~fitted.numpy()
        half, other = ranks.of_conversations(fold), ranks.of_conversations(~fold)
        found = search_tree(half, report_on=half, num_nodes=num_nodes, num_bootstrap=1)
        accepted["static"][theirs] = num_accepted_by(Tree.from_paths(found["paths"]), other)
        for name, conditional in (("dynamic", False), ("dynamic, conditional", True)):
            tables = calibrated(scores, ranks, fitted, conditional=conditional)
            accepted[name][theirs], _ = dynamic(tables[theirs].tolist(), other, num_nodes=num_nodes)
        # With the probabilities of the last turn.
        threshold = fitted_threshold(tables[ours].tolist(), half, num_nodes=num_nodes)
        accepted["threshold"][theirs], nodes["threshold"][theirs] = dynamic(
            tables[theirs].tolist(),
            other,
            num_nodes=MOST_NODES * num_nodes,
            threshold=threshold,
        )
    weights = bootstrap_weights(len(side), num_bootstrap=num_bootstrap, seed=0)
    static = walk(accepted["static"], ranks)
    rows = []
    for name in names:
        ratio = walk(accepted[name], ranks)
        steps = walked_rows(accepted[name], ranks)
        rows.append(_row(name, ratio, static, weights, float(nodes[name][steps].mean())))
    return {"num_conversations": len(side), "num_positions": len(ranks.ranks), "rows": rows}


def _row(
    name: str, ratio: Ratio, static: Ratio, weights: np.ndarray, num_nodes: float
) -> dict[str, Any]:
    ours, theirs = ratio.resampled(weights), static.resampled(weights)
    assert ours is not None
    assert theirs is not None
    assert ratio.value is not None
    assert static.value is not None
    return {
        "trees": name,
        "mean_nodes": num_nodes,
        "acceptance_length": ratio.value,
        "ci95": ratio.interval(weights),
        "longer_by": ratio.value - static.value,
        "longer_by_ci95": np.percentile(ours - theirs, [2.5, 97.5]).tolist(),
    }


def main() -> None:
    """Measure, and print a row for each kind of tree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("heads", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--base-model", help="default: the one that the heads name")
    parser.add_argument("--num-nodes", type=int, default=16)
    parser.add_argument("--num-bootstrap", type=int, default=1_000)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    base = load_trained_base(options.heads, options.base_model)
    heads, _ = load_heads(options.heads, base_fingerprint=base.fingerprint)
    rows = read_conversations(options.data)
    with torch.no_grad():
        metadata = {"conversation_ids": [row.id for row in rows]}
        ranks = compute_ranks(base, heads, conversations=rows, top_k=TOP_K, metadata=metadata)
        scores = score(base, heads, list(rows))
    result = compare(
        scores, ranks, num_nodes=options.num_nodes, num_bootstrap=options.num_bootstrap
    )
    if options.json:
        print(json.dumps(result))
        return
    table = [["", "nodes", "tokens per step", "95 %", "longer than static by", "95 %"]]
    for row in result["rows"]:
        low, high = row["longer_by_ci95"]
        table.append(
            [
                row["trees"], number(row["mean_nodes"], digits=1), number(row["acceptance_length"]),
                interval(row["ci95"]), number(row["longer_by"]), f"{low:.3f} to {high:.3f}",
            ]
        )  # fmt: skip
    print(plain_table(table))


if __name__ == "__main__":
    main()
