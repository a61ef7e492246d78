"""The best candidate tree for some heads, from their ranks: ``tree.json`` (docs/formats.md).

The tree is searched on some conversations and reported on others, and every figure of the report is
the walk that a decoder takes, with its interval over conversations.

Shapes: N source positions, C conversations, K heads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from medusa_train.errors import InputError
from medusa_train.evaluate.accuracy import Array, Ratio, bootstrap_weights, spans_of, walk
from medusa_train.evaluate.ranks import Ranks
from medusa_train.metrics import walked_rows
from medusa_train.tree.latency import LatencyCurve
from medusa_train.tree.rank_paths import RankPaths
from medusa_train.tree.search import (
    Limits,
    best_chain,
    best_tree,
    count_sorted,
    fastest_tree,
    marginal_tree,
    num_possible,
)
from medusa_train.tree.topology import Tree

TREE_VERSION = 1

Text = Literal["conversations that were not searched", "another text", "the searched text"]


@dataclass(frozen=True, slots=True)
class _Texts:
    searched: Ranks
    reported: Ranks
    what: Text


def search_tree(
    ranks: Ranks,
    *,
    report_on: Ranks | None = None,
    num_nodes: int = 63,
    max_depth: int | None = None,
    per_depth: Sequence[int] = (),
    top_k: int | None = None,
    search_fraction: float = 0.5,
    latency: LatencyCurve | None = None,
    num_bootstrap: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """Find the best tree and say how far it walks.

    Args:
        ranks: of the heads on some text.
        report_on: the same heads' ranks on other text; then all of ``ranks`` is searched.
        num_nodes: most nodes of the tree, without the root.
        max_depth: most heads that it uses; None for all.
        per_depth: most nodes at depths 1, 2, …
        top_k: candidates of each head; None for all ranks that are known.
        search_fraction: share of the conversations that is searched; the others are reported on.
        latency: of a step on a device; then the size with the most tokens per second is chosen.
        num_bootstrap: resamples for the intervals.
        seed: of the resampling.

    Returns:
        ``tree.json`` as an object.

    Raises:
        InputError: ranks or heads that are not there; ranks of other heads; no text.
    """
    check_search(ranks, report_on, max_depth=max_depth, top_k=top_k)
    top_k = ranks.top_k if top_k is None else top_k
    texts = _texts(ranks, report_on, search_fraction)
    paths = RankPaths.of(
        texts.searched.ranks.numpy(), spans=spans_of(texts.searched), top_k=top_k,
        max_depth=max_depth,
    )  # fmt: skip
    limits = Limits(num_nodes, tuple(per_depth))
    chosen = best_tree(paths, limits) if latency is None else fastest_tree(paths, limits, latency)
    tree = paths.tree(chosen)
    same_size = Limits(tree.num_nodes, tuple(per_depth))
    accuracy = _marginal_accuracy(texts.searched)[: paths.num_heads, :top_k]
    others = {
        "most frequent paths": paths.tree(count_sorted(paths, same_size)),
        "independent heads": Tree(marginal_tree(accuracy, same_size)),
        "best chain": best_chain(paths, latency=latency),
    }
    compared = _Compared(texts.reported, num_bootstrap=num_bootstrap, seed=seed, latency=latency)
    rows = [compared.row("tree", tree, tree)]
    rows += [compared.row(name, other, tree) for name, other in others.items()]
    possible = num_possible(
        num_heads=paths.num_heads, top_k=top_k, limits=Limits(10**9, tuple(per_depth))
    )
    return {
        "schema_version": TREE_VERSION,
        "paths": [list(path) for path in tree.paths],
        "num_nodes": tree.num_nodes,
        "acceptance_length": rows[0]["acceptance_length"],
        "ci95": rows[0]["ci95"],
        "method": "joint",
        "objective": "acceptance" if latency is None else "tokens_per_second",
        "latency_ms": None if latency is None else latency.as_json(),
        "probabilities": compared.probabilities(tree),
        "num_heads": ranks.num_heads,
        "top_k": top_k,
        "heads_fingerprint": ranks.metadata.get("heads_fingerprint"),
        "searched": _counts(texts.searched),
        "reported": {**_counts(texts.reported), "what": texts.what},
        "comparison": rows,
        "notes": _notes(
            tree, asked=num_nodes, possible=possible, paths=paths, top_k=top_k, latency=latency
        ),
    }


def check_search(
    ranks: Ranks, other: Ranks | None, *, max_depth: int | None = None, top_k: int | None = None
) -> None:
    """Refuse what :func:`search_tree` cannot search; ``other`` is the text to report on.

    Raises:
        InputError: ranks or heads that are not there; ranks of other heads; no text.
    """
    if max_depth is not None and max_depth > ranks.num_heads:
        raise InputError(f"max depth {max_depth}: there are {ranks.num_heads} heads")
    top_k = ranks.top_k if top_k is None else top_k
    for text in [ranks] if other is None else [ranks, other]:
        if top_k > text.top_k:
            raise InputError(
                f"top k {top_k}: the file holds the ranks below {text.top_k}; measure the heads "
                f"with --top-k {top_k}"
            )
        if not len(text.ranks):
            raise InputError("no position in the file of ranks, so there is nothing to search")
    if other is None:
        return
    ours, theirs = (text.metadata.get("heads_fingerprint") for text in (ranks, other))
    if ours != theirs or ranks.num_heads != other.num_heads:
        raise InputError(
            f"the ranks to report on are of other heads ({theirs}) than those to search ({ours})"
        )


def _texts(ranks: Ranks, report_on: Ranks | None, fraction: float) -> _Texts:
    if report_on is not None:
        return _Texts(ranks, report_on, "another text")
    searched = is_searched(ranks, fraction)
    if searched.all():
        return _Texts(ranks, ranks, "the searched text")
    return _Texts(
        ranks.of_conversations(searched),
        ranks.of_conversations(~searched),
        "conversations that were not searched",
    )


def is_searched(ranks: Ranks, fraction: float) -> Tensor:
    """[C] bool: the conversations whose hash falls below ``fraction``.

    The hash is that of the conversation's id, so other heads, another order and more conversations
    change nothing for it. With two conversations or more, at least one is on each side.
    """
    number = int(ranks.conversation.max()) + 1
    ids = ranks.metadata.get("conversation_ids") or range(number)
    digests = [hashlib.sha256(f"tree:{name}".encode()).digest() for name in ids]
    values = torch.tensor([int.from_bytes(d[:6]) / 2**48 for d in digests[:number]])
    searched = values < fraction
    # A conversation without an answer has no rows, and is on no side.
    there = torch.bincount(ranks.conversation.long(), minlength=number) > 0
    if int(there.sum()) == 1:
        return torch.ones(number, dtype=torch.bool)
    if not (searched & there).any():
        searched[torch.where(there, values, 2.0).argmin()] = True
    if not (~searched & there).any():
        searched[torch.where(there, values, -1.0).argmax()] = False
    return searched


def nodes_reached(tree: Tree, ranks: Tensor) -> Tensor:
    """[N] int64: the last node that is accepted on each row of ``ranks`` [N, K]; 0 is the root."""
    node = torch.zeros(len(ranks), dtype=torch.int64)
    goes_on = torch.ones(len(ranks), dtype=torch.bool)
    for head in range(min(tree.depth, ranks.shape[1])):
        rank = ranks[:, head].long()
        goes_on &= (rank >= 0) & (rank < tree.num_ranks)
        child = tree.children[node, torch.where(goes_on, rank, 0)]
        goes_on &= child >= 0
        node = torch.where(goes_on, child, node)
    return node


def num_accepted_by(tree: Tree, ranks: Ranks) -> npt.NDArray[np.int64]:
    """[N] candidates that the tree gets accepted when a decoder stands on the position."""
    accepted: npt.NDArray[np.int64] = tree.depths[nodes_reached(tree, ranks.ranks)].numpy()
    return accepted


class _Compared:
    """Trees on one text, all with the same resamples of its conversations."""

    def __init__(
        self, ranks: Ranks, *, num_bootstrap: int, seed: int, latency: LatencyCurve | None
    ) -> None:
        self.ranks = ranks
        self.latency = latency
        number = int(ranks.conversation.max()) + 1
        self.weights = bootstrap_weights(number, num_bootstrap=num_bootstrap, seed=seed)

    def walk(self, tree: Tree) -> Ratio:
        return walk(num_accepted_by(tree, self.ranks), self.ranks)

    def row(self, name: str, tree: Tree, best: Tree) -> dict[str, Any]:
        """The figures of one tree, and by how much ``best`` walks further."""
        ratio, other = self.walk(tree), self.walk(best)
        value, of_best = ratio.value, other.value
        assert value is not None
        assert of_best is not None
        row = {
            "name": name,
            "num_nodes": tree.num_nodes,
            "depth": tree.depth,
            "acceptance_length": value,
            "ci95": ratio.interval(self.weights),
            "tree_is_longer_by": of_best - value,
            "tree_is_longer_by_ci95": _interval_of_difference(other, ratio, self.weights),
        }
        if self.latency is not None and tree.size <= self.latency.largest:
            row["tokens_per_second"] = 1000 * value / self.latency.milliseconds(tree.size)
        return row

    def probabilities(self, tree: Tree) -> list[float]:
        """The share of steps that accept each node, in the order of the paths."""
        last = nodes_reached(tree, self.ranks.ranks)
        rows = walked_rows(tree.depths[last].tolist(), spans_of(self.ranks))
        ends = torch.bincount(last[rows], minlength=tree.size).double()
        shares: list[float] = (ends @ tree.mask.double() / len(rows)).tolist()
        return shares[1:]


def _interval_of_difference(first: Ratio, second: Ratio, weights: Array) -> list[float] | None:
    """The 95 % interval of the difference of two ratios over the same resamples."""
    ours, theirs = first.resampled(weights), second.resampled(weights)
    if ours is None or theirs is None:
        return None
    low, high = np.percentile(ours - theirs, [2.5, 97.5])
    return [float(low), float(high)]


def _marginal_accuracy(ranks: Ranks) -> Array:
    """[K, top_k] share of each head's valid pairs whose true token has the rank."""
    pairs = ranks.valid.sum(dim=0).clamp(min=1)
    hits = [(ranks.ranks == rank).sum(dim=0) for rank in range(ranks.top_k)]
    shares: Array = (torch.stack(hits, dim=1) / pairs[:, None]).double().numpy()
    return shares


def _counts(ranks: Ranks) -> dict[str, Any]:
    return {
        "num_conversations": len(ranks.conversation.unique()),
        "num_positions": len(ranks.ranks),
        "text_sampling": ranks.metadata.get("text_sampling"),
    }


def _notes(
    tree: Tree,
    *,
    asked: int,
    possible: int,
    paths: RankPaths,
    top_k: int,
    latency: LatencyCurve | None,
) -> list[str]:
    """What the user has to know about the tree's size."""
    notes = []
    if possible < asked:
        notes.append(
            f"{asked} nodes asked for: only {possible} are possible with {paths.num_heads} heads "
            f"and the {top_k} most likely tokens of each"
        )
    if latency is not None:
        if latency.largest - 1 < min(asked, possible):
            notes.append(
                f"no step of more than {latency.largest} tokens was measured, so trees of more "
                f"than {latency.largest - 1} nodes were not tried"
            )
    elif tree.num_nodes < min(asked, possible):
        notes.append(
            f"{min(asked, possible)} nodes asked for: only {tree.num_nodes} paths occur in the "
            "searched text"
        )
    return notes
