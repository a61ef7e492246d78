from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from medusa_train.data.conversations import Conversation
from medusa_train.errors import InputError
from medusa_train.evaluate.accuracy import (
    Ratio,
    accuracy_report,
    bootstrap_weights,
    num_accepted,
    walk,
    walked_rows,
)
from medusa_train.evaluate.heads_accuracy import text_sampling
from medusa_train.evaluate.ranks import MISS, Ranks, compute_ranks, read_ranks, write_ranks
from medusa_train.heads.config import HeadsConfig
from medusa_train.heads.model import MedusaHeads
from tests.models_for_tests import make_base, make_model
from tests.reference import decode_reference as reference
from tests.training_for_tests import conversation

VOCAB = 12
STOP = 2


def _heads(num_heads: int, seed: int) -> MedusaHeads:
    """Heads that are right now and then: the base's own lm_head, disturbed a little."""
    heads = MedusaHeads(HeadsConfig(num_heads, 1, "full", 32, VOCAB), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return heads


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("max_new_tokens", [1, 2, 25])
def test_report_equals_a_naive_decode(seed: int, max_new_tokens: int) -> None:
    """Exactly, on greedy text: answers that end early, by length, and on the first token."""
    model = make_model(vocab_size=VOCAB, dtype=torch.float64, seed=seed, std=0.35)
    base = make_base(model)
    num_heads = 3
    heads = _heads(num_heads, seed)
    rows: list[Conversation] = []
    tokens = steps = 0
    accepted: list[int] = []
    hits = torch.zeros(num_heads, 5, dtype=torch.int64)
    pairs = torch.zeros(num_heads, 5, dtype=torch.int64)
    for n in range(VOCAB):
        prompt = [n, (3 * n + 5) % VOCAB, (7 * n + 1) % VOCAB]
        counts = reference.decode(model, heads, prompt, stop=STOP, max_new_tokens=max_new_tokens)
        text = prompt + counts.answer
        rows.append(conversation(text, [(3, len(text))], name=str(n)))
        tokens += len(counts.answer)
        steps += counts.steps
        accepted += counts.accepted
        table = reference.top_k_hits(model, heads, text, start=3, end=len(text), top_k=5)
        for k, row in enumerate(table):
            for top, (hit, pair) in enumerate(row):
                hits[k, top] += hit
                pairs[k, top] += pair
    ranks = compute_ranks(base, heads, conversations=rows, top_k=5, metadata={})
    report = accuracy_report(ranks, base_model="tiny", num_bootstrap=20)
    assert report["chain"]["acceptance_length"] == tokens / steps
    leading = num_accepted(ranks)
    assert leading[walked_rows(leading, ranks)].tolist() == accepted
    for k, head in enumerate(report["heads"]):
        if not pairs[k, 0]:
            assert head["top_k_accuracy"] == [None] * 5
            continue
        assert head["positions"] == pairs[k, 0]
        assert head["top_k_accuracy"] == (hits[k].double() / pairs[k].double()).tolist()


def test_the_texts_of_that_test_end_in_every_way() -> None:
    """The law above is worth little unless answers stop early, at once, and by length."""
    ends = set()
    for seed in range(6):
        model = make_model(vocab_size=VOCAB, dtype=torch.float64, seed=seed, std=0.35)
        heads = _heads(3, seed)
        for n in range(VOCAB):
            prompt = [n, (3 * n + 5) % VOCAB, (7 * n + 1) % VOCAB]
            counts = reference.decode(model, heads, prompt, stop=STOP, max_new_tokens=25)
            stopped = counts.answer[-1] == STOP
            ends.add("first" if len(counts.answer) == 1 else "early" if stopped else "length")
            ends.update({"accepted"} if sum(counts.accepted) else set())
    assert ends == {"first", "early", "length", "accepted"}


def _ranks(rows: list[list[int]], *, spans: list[int], num_valid: list[int]) -> Ranks:
    count = len(rows)
    return Ranks(
        ranks=torch.tensor(rows, dtype=torch.int16),
        num_valid=torch.tensor(num_valid, dtype=torch.int16),
        conversation=torch.zeros(count, dtype=torch.int32),
        position=torch.tensor([4 + i for i in range(count)], dtype=torch.int32),
        span=torch.tensor(spans, dtype=torch.int32),
        metadata={"top_k": 3, "text_sampling": {"temperature": 0}},
    )


def test_walk_by_hand() -> None:
    # Rows of one span of 5 tokens: accepted 2, -, -, 0, then the last token alone.
    ranks = _ranks(
        [[0, 0], [0, 0], [1, 0], [2, MISS], [MISS, MISS]],
        spans=[0] * 5,
        num_valid=[2, 2, 2, 1, 0],
    )
    accepted = num_accepted(ranks)
    assert accepted.tolist() == [2, 2, 0, 0, 0]
    assert walked_rows(accepted, ranks).tolist() == [0, 3, 4]
    assert walk(accepted, ranks).value == 5 / 3


def test_a_step_never_reaches_into_the_next_span() -> None:
    """Two answers that touch: the rows are consecutive, and the walk starts anew all the same."""
    ranks = _ranks(
        [[0, 0], [0, MISS], [MISS, MISS], [0, MISS], [MISS, MISS]],
        spans=[0, 0, 0, 1, 1],
        num_valid=[2, 1, 0, 1, 0],
    )
    accepted = num_accepted(ranks)
    assert walked_rows(accepted, ranks).tolist() == [0, 3]
    assert walk(accepted, ranks).value == 5 / 2


def test_conditional_accuracy_by_hand() -> None:
    ranks = _ranks(
        [[0, 0], [0, 1], [1, 0], [0, MISS], [MISS, MISS]],
        spans=[0] * 5,
        num_valid=[2, 2, 2, 1, 0],
    )
    first, second = accuracy_report(ranks, base_model="x", num_bootstrap=10)["heads"]
    assert first["top_k_accuracy"] == [3 / 4, 1.0, 1.0]
    assert first["conditional_top1"] == 3 / 4
    assert second["positions"] == 3
    assert second["top_k_accuracy"] == [2 / 3, 1.0, 1.0]
    assert second["conditional_top1"] == 1 / 2


def test_a_head_without_pairs_has_no_figures() -> None:
    ranks = _ranks([[0, MISS], [MISS, MISS]], spans=[0, 0], num_valid=[1, 0])
    head = accuracy_report(ranks, base_model="x", num_bootstrap=10)["heads"][1]
    assert head["top_k_accuracy"] == [None] * 3
    assert head["top1_ci95"] is None
    assert head["conditional_top1"] is None


def test_bootstrap_resamples_conversations() -> None:
    weights = bootstrap_weights(5, num_bootstrap=400, seed=1)
    assert weights.sum(axis=1).tolist() == [5.0] * 400
    assert np.array_equal(weights, bootstrap_weights(5, num_bootstrap=400, seed=1))
    ratio = Ratio(np.array([1.0, 0, 3, 2, 4]), np.array([4.0, 4, 4, 4, 4]))
    low, high = ratio.interval(weights) or (0.0, 0.0)
    assert low < ratio.value < high
    # One conversation says nothing about others.
    single = bootstrap_weights(1, num_bootstrap=9, seed=0)
    assert Ratio(np.ones(1), np.ones(1)).interval(single) is None
    # All conversations alike: no doubt about the ratio.
    assert Ratio(np.ones(5), np.full(5, 2.0)).interval(weights) == [0.5, 0.5]
    assert Ratio(np.zeros(5), np.zeros(5)).value is None
    assert Ratio(np.zeros(5), np.zeros(5)).interval(weights) is None


def test_bootstrap_interval_equals_plain_resampling() -> None:
    generator = np.random.default_rng(0)
    above, below = generator.integers(0, 9, 30).astype(float), np.full(30, 10.0)
    weights = bootstrap_weights(30, num_bootstrap=500, seed=7)
    ratios = []
    for draw in weights:
        top = sum(w * a for w, a in zip(draw, above, strict=True))
        bottom = sum(w * b for w, b in zip(draw, below, strict=True))
        ratios.append(top / bottom)
    ratios.sort()
    expected = [float(np.percentile(ratios, q)) for q in (2.5, 97.5)]
    assert Ratio(above, below).interval(weights) == pytest.approx(expected)


def test_ranks_survive_the_file(tmp_path: Path) -> None:
    ranks = _ranks([[0, MISS], [MISS, MISS]], spans=[0, 0], num_valid=[1, 0])
    write_ranks(tmp_path / "ranks.safetensors", ranks)
    loaded = read_ranks(tmp_path / "ranks.safetensors")
    for name in ("ranks", "num_valid", "conversation", "position", "span"):
        ours: Any = getattr(ranks, name)
        assert torch.equal(ours, getattr(loaded, name))
        assert ours.dtype == getattr(loaded, name).dtype
    assert loaded.metadata == ranks.metadata


def test_wrong_files_of_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_ranks(tmp_path / "absent.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"x" * 40)
    with pytest.raises(InputError, match="not a file of ranks"):
        read_ranks(tmp_path / "bad.safetensors")


def test_text_sampling_names_one_setting_or_all() -> None:
    from dataclasses import replace

    row = conversation([1, 2, 3], [(1, 3)])
    warm, cold = (
        replace(row, sampling={"temperature": 1}),
        replace(row, sampling={"temperature": 0}),
    )
    assert text_sampling([row, row]) is None
    assert text_sampling([warm, warm]) == {"temperature": 1}
    both = text_sampling([warm, cold, warm])
    assert sorted(entry["temperature"] for entry in both) == [0, 1]
