"""Draws from tiny seeded models against the exact distribution of their texts.

Shared by the tests and ``scripts/check_lossless.py``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import product

import torch
from transformers import PreTrainedModel

from medusa_train.decoding.generate import Generated, Generator
from medusa_train.tree.topology import Tree
from tests.decoding_for_tests import random_heads
from tests.models_for_tests import make_model

VOCAB, LENGTH = 8, 4
BATCH = 2_000
TOP_P = 0.9
PROMPT = [3, 1, 4]
CHAIN = Tree.chain(3)
# Wide at the root, so that whole branches are accepted and others are not.
TREE = Tree.from_paths(
    [(a,) for a in range(4)] + [(a, b) for a, b in product(range(3), range(2))] + [(0, 0, 0)]
)


def exact_distribution(
    model: PreTrainedModel, *, temperature: float, top_p: float
) -> dict[tuple[int, ...], float]:
    """The probability of every text of four tokens, by the base alone."""
    texts = torch.tensor([[*PROMPT, *text] for text in product(range(VOCAB), repeat=LENGTH - 1)])
    logits = model(texts).logits[:, len(PROMPT) - 1 :]
    tables = (logits.double() / temperature).softmax(dim=-1).tolist()
    result = {}
    for prefix, rows in zip(product(range(VOCAB), repeat=LENGTH - 1), tables, strict=True):
        kept = [nucleus(row, top_p) for row in rows]
        for last in range(VOCAB):
            text = (*prefix, last)
            p = math.prod(row[token] for row, token in zip(kept, text, strict=True))
            if p:
                result[text] = p
    return result


def nucleus(row: Sequence[float], top_p: float) -> list[float]:
    """The most probable tokens up to the one with which their mass reaches top_p."""
    kept, mass = [0.0] * len(row), 0.0
    for token in sorted(range(len(row)), key=lambda token: -row[token]):
        if mass >= top_p:
            break
        kept[token] = row[token]
        mass += row[token]
    return [p / mass for p in kept]


def chi_square(
    counts: Counter[tuple[int, ...]], wanted: dict[tuple[int, ...], float]
) -> tuple[float, int]:
    """The statistic and its cells; those that expect fewer than 5 are pooled."""
    total = sum(counts.values())
    assert set(counts) <= set(wanted), "a text that the base cannot write"
    statistic, cells, pooled, pooled_count = 0.0, 0, 0.0, 0
    for text, p in wanted.items():
        expected = p * total
        if expected < 5:
            pooled, pooled_count = pooled + expected, pooled_count + counts[text]
            continue
        statistic, cells = statistic + (counts[text] - expected) ** 2 / expected, cells + 1
    if pooled >= 5:
        statistic, cells = statistic + (pooled_count - pooled) ** 2 / pooled, cells + 1
    return statistic, cells


def chi_square_p(counts: Counter[tuple[int, ...]], wanted: dict[tuple[int, ...], float]) -> float:
    """The probability of a chi-square as great or greater."""
    statistic, cells = chi_square(counts, wanted)
    half = torch.tensor((cells - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, torch.tensor(statistic / 2, dtype=torch.float64)))


def drawn_texts(
    tree: Tree, *, temperature: float, num_draws: int, seed: int = 0
) -> tuple[Counter[tuple[int, ...]], int, dict[tuple[int, ...], float]]:
    """Texts of four tokens sampled with random heads.

    Returns:
        How often each text was drawn, how many candidates were accepted in all, and the exact
        distribution.
    """
    model = make_model("llama", vocab_size=VOCAB, seed=3, num_hidden_layers=1, std=0.35)
    generator = Generator(model, random_heads(model, seed=1), num_tokens=VOCAB)
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    torch.manual_seed(seed)
    for _ in range(num_draws // BATCH):
        result = generator.generate(
            torch.tensor([PROMPT] * BATCH),
            tree=tree,
            do_sample=True,
            max_new_tokens=LENGTH,
            pad_token_id=0,
            attention_mask=torch.ones(BATCH, len(PROMPT), dtype=torch.long),
            return_dict_in_generate=True,
            temperature=temperature,
            top_p=TOP_P,
            top_k=0,
        )
        assert isinstance(result, Generated)
        counts.update(map(tuple, result.sequences[:, len(PROMPT) :].tolist()))
        accepted += sum(map(sum, result.statistics.accepted))
    return counts, accepted, exact_distribution(model, temperature=temperature, top_p=TOP_P)
