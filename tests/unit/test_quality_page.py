from __future__ import annotations

import re
from html import unescape
from typing import Any

import numpy as np
import pytest

from medusa_train.evaluate.quality import Drift, quality_figures, verdict
from medusa_train.evaluate.quality_page import html_page


def _report(original: str, changed: str) -> dict[str, Any]:
    figures = quality_figures(
        Drift(
            conversation=np.zeros(3, dtype=np.int64),
            place=np.arange(1, 4),
            kl=np.full(3, 0.1),
            original_nll=np.ones(3),
            changed_nll=np.ones(3),
            agrees=np.ones(3, dtype=bool),
        ),
        num_bootstrap=5,
        seed=0,
    )
    row = {
        "question": "Why?", "category": None, "original": original, "changed": changed,
        "original_tokens": 5, "changed_tokens": 5, "original_finish": "stop",
        "changed_finish": "stop", "first_difference": 0,
    }  # fmt: skip
    answers = {"num_prompts": 1, "num_identical": 0, "shared_beginning": 0.0, "max_new_tokens": 9}
    return {
        "base_model": "a <base>",
        "base_fingerprint": "0" * 16,
        "changed_model": "b",
        "changed_fingerprint": "1" * 16,
        "changed_is": "model",
        "dtype": "float32",
        "device": "cpu",
        "text": "text",
        **figures,
        "verdict": verdict(figures, min_agreement=0.98, max_perplexity_ratio=1.02),
        "answers": {**answers, "rows": [row]},
        "judge": None,
        "lm_eval": None,
    }


@pytest.mark.parametrize(
    ("original", "changed", "marked"),
    [
        ("the sea is wide", "the sea was wide", ["is", "was"]),
        ("the sea", "the season", ["sea", "season"]),
        ("the sea", "the sea is", ["(ends here)", "is"]),
        ("the sea is\nwide", "the sea", ["is", "(ends here)"]),
        ("blue", "green", ["blue", "green"]),
        ("", "green", ["(ends here)", "green"]),
        ("a < b", "a > b", ["<", ">"]),
        ("a b ", "a b", ["(ends here)", "(ends here)"]),  # they differ in what is not shown
    ],
)
def test_the_first_different_word_is_marked(original: str, changed: str, marked: list[str]) -> None:
    page = html_page(_report(original, changed), plots=[])
    assert [unescape(text) for text in re.findall(r"<mark>(.*?)</mark>", page)] == marked
    texts = re.findall(r'<p class="text">(.*?)</p>', page, re.S)
    shown = [unescape(re.sub(r"<.*?>", "", text)).removesuffix(" (ends here)") for text in texts]
    assert shown == [original, changed]
    assert "<base>" not in page
