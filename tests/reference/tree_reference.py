"""Candidate trees in plain loops: what is accepted, the walk, and every tree of a size.

Paths are tuples of ranks; a tree is a set of them without the root.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tests.reference.decode_reference import Counts

Path = tuple[int, ...]


def accepted(tree: set[Path], ranks: Sequence[int]) -> int:
    """Candidates accepted on a row: the true token's path followed while it is in the tree."""
    count = 0
    while count < len(ranks) and tuple(ranks[: count + 1]) in tree:
        count += 1
    return count


def steps(tree: set[Path], rows: Sequence[Sequence[int]], spans: Sequence[tuple[int, int]]) -> int:
    """Steps of a decoder over all answers."""
    total = 0
    for start, end in spans:
        row = start
        while row < end:
            row += accepted(tree, rows[row]) + 1
            total += 1
    return total


def accepted_on_all_rows(tree: set[Path], rows: Sequence[Sequence[int]]) -> int:
    """Candidates accepted if the decoder stood on every row."""
    return sum(accepted(tree, row) for row in rows)


def most_frequent(rows: Sequence[Sequence[int]], num_nodes: int) -> list[Path]:
    """Paths by (count descending, length, ranks)."""
    counts: Counter[Path] = Counter()
    for row in rows:
        for length in range(1, len(row) + 1):
            if row[length - 1] < 0:
                break
            counts[tuple(row[:length])] += 1
    order = sorted(counts, key=lambda path: (-counts[path], len(path), path))
    return order[:num_nodes]


def all_trees(num_nodes: int, *, num_heads: int, num_ranks: int) -> Iterator[frozenset[Path]]:
    """Every tree of exactly ``num_nodes`` nodes, once."""
    trees: set[frozenset[Path]] = {frozenset()}
    for _ in range(num_nodes):
        trees = {
            tree | {(*prefix, rank)}
            for tree in trees
            for prefix in [(), *tree]
            if len(prefix) < num_heads
            for rank in range(num_ranks)
            if (*prefix, rank) not in tree
        }
    yield from trees


def decode(
    model: Any,
    heads: Any,
    prompt: list[int],
    *,
    tree: set[Path],
    stop: int,
    max_new_tokens: int,
) -> Counts:
    """Decode greedily with a tree of candidates, one full forward pass per token."""
    counts = Counts()
    text = list(prompt)
    while True:
        state = model.model(input_ids=torch.tensor([text]), use_cache=False).last_hidden_state
        choices = [_choices(head, state[0, -1]) for head in heads]
        _emit(_wanted(model, text), text, counts)
        counts.steps += 1
        path: Path = ()
        while not _is_over(counts.answer, stop, max_new_tokens):
            wanted = _wanted(model, text)
            children = [p for p in tree if len(p) == len(path) + 1 and p[:-1] == path]
            taken = [p for p in children if choices[len(path)][p[-1]] == wanted]
            if not taken:
                break
            _emit(wanted, text, counts)
            path = taken[0]
        counts.accepted.append(len(path))
        if _is_over(counts.answer, stop, max_new_tokens):
            return counts


def _choices(head: Any, state: torch.Tensor) -> list[int]:
    x = state
    for block in head[:-1]:
        x = x + torch.nn.functional.silu(block.linear.weight @ x + block.linear.bias)
    return torch.argsort(head[-1].weight @ x, descending=True, stable=True).tolist()


def _wanted(model: Any, text: list[int]) -> int:
    return int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax())


def _emit(token: int, text: list[int], counts: Counts) -> None:
    text.append(token)
    counts.answer.append(token)


def _is_over(answer: list[int], stop: int, max_new_tokens: int) -> bool:
    return answer[-1] == stop or len(answer) >= max_new_tokens
