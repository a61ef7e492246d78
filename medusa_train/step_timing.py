"""How long a decoding step takes, by its number of tokens.

What is timed is decoding itself: the heads propose, the base verifies the tree in one pass, the
walk follows what it says, and the cache keeps what was accepted. Sizes take turns, so that a slow
moment of the machine falls on all of them; a size's time is the median over its turns.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
import torch

from medusa_train.console import progress, warn
from medusa_train.decoding.generate import Generated
from medusa_train.heads.model import num_candidate_rows
from medusa_train.medusa_model import GREEDY, MedusaModel
from medusa_train.tree.latency import LatencyCurve
from medusa_train.tree.search import Limits, marginal_tree
from medusa_train.tree.topology import Tree

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Tokens of a step, the root included, that are measured; and the largest that is asked for."""

CACHE_LENGTH = 256
"""Tokens before the first step, or half of the model's positions where it has fewer than twice."""

NUM_TOKENS = 9
"""Tokens that are written in a turn: eight steps without an accepted candidate."""

NUM_TURNS = 5

MAX_SPREAD = 0.25
"""Between the quartiles of a size's times, as a share of their median; more is said."""


def measure_steps(
    model: MedusaModel, *, num_nodes: int, num_turns: int = NUM_TURNS
) -> LatencyCurve:
    """Time the steps of trees of up to ``num_nodes`` nodes, batch 1, greedy.

    The trees have the shape that independent heads would give them, each head's token of rank r
    right half of the time ÷ (r + 1): what a step costs depends on how many heads its tree uses.
    """
    trees = _trees(model, num_nodes=num_nodes)
    generator = torch.Generator().manual_seed(0)
    # Which ids are read costs nothing; whether candidates are accepted costs little.
    prompt = torch.randint(model.base.num_tokens, (1, cache_length(model)), generator=generator)
    prompt = prompt.to(model.device)
    times: list[list[float]] = [[] for _ in trees]
    with progress("latency", (num_turns + 1) * len(trees)) as reporter:
        # In the first turn memory is laid out and code compiled.
        for turn in range(num_turns + 1):
            for tree, measured in zip(trees, times, strict=True):
                milliseconds = _step_milliseconds(model, prompt, tree)
                if turn:
                    measured.append(milliseconds)
                reporter.update(1)
    _check_spread(times)
    medians = map(statistics.median, times)
    return LatencyCurve.of({tree.size: time for tree, time in zip(trees, medians, strict=True)})


def _check_spread(times: Sequence[Sequence[float]]) -> None:
    """Say so where the times of one size differ much."""
    spreads = []
    for measured in times:
        low, middle, high = np.percentile(measured, [25, 50, 75])
        spreads.append((high - low) / middle)
    if max(spreads) > MAX_SPREAD:
        warn(
            f"latency of a step: the times of one size differ by {max(spreads):.0%}; other work is "
            "on this machine: measure again when it is idle"
        )


def _step_milliseconds(model: MedusaModel, prompt: torch.Tensor, tree: Tree) -> float:
    """The mean of the steps of a short text; prefill is left out."""
    result = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        tree=tree,
        max_new_tokens=NUM_TOKENS,
        **GREEDY,
        # No token ends the text.
        eos_token_id=model.heads.config.vocab_size,
        pad_token_id=0,
        return_dict_in_generate=True,
    )
    assert isinstance(result, Generated)
    return 1000 * result.statistics.decode_seconds / result.statistics.num_passes


def _trees(model: MedusaModel, *, num_nodes: int) -> list[Tree]:
    """The root alone, and a tree for each size up to the greatest that the heads can fill."""
    rows = num_candidate_rows(model.heads, model.base.num_tokens)
    shares = [0.5 / (rank + 1) for rank in range(min(rows, max(10, num_nodes)))]
    table: Sequence[Sequence[float]] = [shares] * model.heads.config.num_heads
    most = len(marginal_tree(table, Limits(num_nodes)))
    sizes = [*(size for size in SIZES if size <= most), most + 1]
    return [Tree.from_paths(marginal_tree(table, Limits(size - 1))) for size in sizes]


def cache_length(model: MedusaModel) -> int:
    """Tokens that are cached before the first step."""
    config = model.base.model.config.get_text_config(decoder=True)
    limit = getattr(config, "max_position_embeddings", None)
    return min(CACHE_LENGTH, limit // 2) if isinstance(limit, int) else CACHE_LENGTH
