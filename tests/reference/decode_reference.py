"""A naive decoder with heads, one full forward pass per token, that counts what it does.

It knows nothing of ranks, spans or valid pairs: it decodes greedily with a chain of top-1
candidates, checks each against the base model, and counts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Counts:
    """What the decoder did on one prompt."""

    answer: list[int] = field(default_factory=list)
    steps: int = 0
    accepted: list[int] = field(default_factory=list)


def _logits(model: Any, ids: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]


def _candidates(model: Any, heads: Any, ids: list[int]) -> list[int]:
    """Each head's first choice at the last position of ``ids``."""
    state = model.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0, -1]
    chosen = []
    for head in heads:
        x = state
        for block in head[:-1]:
            x = x + torch.nn.functional.silu(block.linear.weight @ x + block.linear.bias)
        chosen.append(int((head[-1].weight @ x).argmax()))
    return chosen


def decode(model: Any, heads: Any, prompt: list[int], *, stop: int, max_new_tokens: int) -> Counts:
    """Decode greedily with a top-1 chain, step by step."""
    counts = Counts()
    text = list(prompt)
    while True:
        candidates = _candidates(model, heads, text)
        root = int(_logits(model, text).argmax())
        counts.steps += 1
        text.append(root)
        counts.answer.append(root)
        accepted = 0
        while not _is_over(counts.answer, stop, max_new_tokens) and accepted < len(candidates):
            wanted = int(_logits(model, text).argmax())
            if candidates[accepted] != wanted:
                break
            text.append(wanted)
            counts.answer.append(wanted)
            accepted += 1
        counts.accepted.append(accepted)
        if _is_over(counts.answer, stop, max_new_tokens):
            return counts


def _is_over(answer: list[int], stop: int, max_new_tokens: int) -> bool:
    return answer[-1] == stop or len(answer) >= max_new_tokens


def top_k_hits(
    model: Any, heads: Any, text: list[int], *, start: int, end: int, top_k: int
) -> list[list[tuple[int, int]]]:
    """Per head and n: (hits, pairs) over one answer ``text[start:end]``, position by position."""
    table = [[(0, 0)] * top_k for _ in heads]
    for t in range(start - 1, end - 1):
        prefix = torch.tensor([text[: t + 1]])
        state = model.model(input_ids=prefix, use_cache=False).last_hidden_state[0, -1]
        for n, head in enumerate(heads, start=1):
            target = t + 1 + n
            if target > end - 1:
                continue
            x = state
            for block in head[:-1]:
                x = x + torch.nn.functional.silu(block.linear.weight @ x + block.linear.bias)
            order = torch.argsort(head[-1].weight @ x, descending=True, stable=True).tolist()
            place = order.index(text[target])
            for top in range(1, top_k + 1):
                hits, pairs = table[n - 1][top - 1]
                table[n - 1][top - 1] = (hits + (place < top), pairs + 1)
    return table
