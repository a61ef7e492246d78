"""Prompts that repeat an earlier one, compared with the true similarity of every pair."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_train.distill.duplicates import (
    EXACT_DUPLICATE,
    NEAR_DUPLICATE,
    PromptFilter,
    normalised,
    num_bands,
    shingles,
)

WORDS = [f"{a}{b}{c}" for a in "bdfgklmnprst" for b in ("a", "ei", "o", "u") for c in "lmnrst"]
INSTRUCTION = (
    "You are given the review of a customer. Read it with care, decide whether the writer would "
    "buy the product again, and answer with one word only, yes or no, without any explanation. "
    "Ignore spelling mistakes and sarcasm that you cannot be sure of, and take a review that says "
    "nothing about the product itself for a no. The review is: "
)


def jaccard(a: str, b: str) -> float:
    """The definition: shared shingles ÷ all shingles."""
    first, second = set(shingles(normalised(a))), set(shingles(normalised(b)))
    return len(first & second) / len(first | second)


def faults(texts: list[str], near: float | None = 0.8) -> list[str | None]:
    prompts = PromptFilter(near_duplicate=near)
    return [prompts.fault(text) for text in texts]


def sentence(rng: random.Random, count: int) -> list[str]:
    return [rng.choice(WORDS) for _ in range(count)]


@pytest.mark.parametrize("near", [None, 0.8])
@pytest.mark.parametrize(
    "copy",
    ["name a  colour,\nplease ", "NAME A COLOUR, PLEASE", "Ｎａｍｅ a colour, please"],
)
def test_case_and_white_space_make_no_difference(copy: str, near: float | None) -> None:
    assert faults(["Name a colour, please", copy], near) == [None, EXACT_DUPLICATE]


def test_one_word_of_forty_changed_is_near() -> None:
    rng = random.Random(0)
    for place in range(40):
        words = sentence(rng, 40)
        changed = [*words[:place], "another", *words[place + 1 :]]
        texts = [" ".join(words), " ".join(changed)]
        assert jaccard(*texts) >= 35 / 41
        assert faults(texts) == [None, NEAR_DUPLICATE]
        assert faults(texts, None) == [None, None]


def test_a_long_instruction_with_other_payloads_follows_the_threshold() -> None:
    texts = [INSTRUCTION + payload for payload in ("It broke at once.", "My cat loves this toy.")]
    assert 0.85 < jaccard(*texts) < 0.9
    assert faults(texts, 0.8) == [None, NEAR_DUPLICATE]
    assert faults(texts, 0.95) == [None, None]


def test_short_questions_with_another_subject_are_other_prompts() -> None:
    countries = ["France", "Spain", "Peru", "Chad"]
    texts = [f"What is the capital of {country}?" for country in countries]
    texts += ["Hello", "Hi", "Goodbye", "2 + 2", "2 + 3", ""]
    assert faults(texts) == [None] * len(texts)


def test_texts_below_three_words_are_compared_by_characters() -> None:
    assert faults(["Congratulations everybody", "Congratulations everybody!"])[1] == NEAR_DUPLICATE


@pytest.mark.parametrize(
    ("text", "changed", "other"),
    [
        (
            "请用简单的语言解释为什么天空在白天看起来是蓝色的,而在日落的时候却变成红色。",
            "请用简单的语言解释为什么天空在白天看起来是蓝色的,而在日落的时候却变成红色?",
            "请给我写一首关于秋天和月亮的短诗,不要超过八行,语气要温柔,最好带一点幽默。",
        ),
        (
            "日本の四季について、小学生にもわかるように、それぞれの特徴を短く説明してください。",
            "日本の四季について、中学生にもわかるように、それぞれの特徴を短く説明してください。",
            "来週の火曜日に友人と行く京都旅行の計画を、予算を考えながら一緒に立ててください。",
        ),
        (
            "ช่วยอธิบายวิธีทำต้มยำกุ้งแบบง่ายที่บ้านให้หน่อย",
            "ช่วยอธิบายวิธีทำต้มยำกุ้งแบบง่ายที่บ้านให้ที",
            "เมืองหลวงของประเทศไทยคือเมืองอะไรและมีประชากรเท่าไร",
        ),
    ],
)
def test_scripts_without_spaces(text: str, changed: str, other: str) -> None:
    assert faults([text, other, changed], 0.8) == [None, None, NEAR_DUPLICATE]
    assert faults([text, changed], None) == [None, None]


def test_only_prompts_that_were_kept_are_compared_with() -> None:
    """Else a chain of small changes would drop texts that have little in common."""
    rng = random.Random(3)
    words = sentence(rng, 60)
    chain = [" ".join(words)]
    for place in range(5, 60, 10):
        words[place] = "another" + str(place)
        chain.append(" ".join(words))
    found = faults(chain)
    assert found[:2] == [None, NEAR_DUPLICATE]
    kept = [text for text, fault in zip(chain, found, strict=True) if fault is None]
    assert len(kept) > 1
    assert faults([*chain, chain[1]])[-1] == NEAR_DUPLICATE


def mixture(seed: int, count: int) -> list[str]:
    """Prompts of which about half are copies of earlier ones with some words changed."""
    rng = random.Random(seed)
    texts = [sentence(rng, rng.randint(12, 80))]
    while len(texts) < count:
        words = (
            list(rng.choice(texts)) if rng.random() < 0.5 else sentence(rng, rng.randint(12, 80))
        )
        for _ in range(rng.randint(0, 4)):
            words[rng.randrange(len(words))] = rng.choice(WORDS)
        texts.append(words)
    return [" ".join(words) for words in texts]


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9])
def test_precision_and_recall_against_every_pair(threshold: float) -> None:
    """Within three standard errors of the threshold, the estimate may fall on either side."""
    texts = mixture(seed=1, count=400)
    kept: list[str] = []
    wrong = missed = 0
    for text, fault in zip(texts, faults(texts, threshold), strict=True):
        best = max((jaccard(text, other) for other in kept), default=0.0)
        if fault is None:
            kept.append(text)
            missed += best >= threshold + 0.08
        else:
            wrong += best < threshold - 0.08
    assert (wrong, missed) == (0, 0)
    assert 50 < len(kept) < 350


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=80), others=st.lists(st.text(max_size=40), max_size=4))
def test_equal_shingles_are_always_found(text: str, others: list[str]) -> None:
    """A text said twice has another digest and the same shingles once it is long enough."""
    prompts = PromptFilter(near_duplicate=1.0)
    for other in others:
        prompts.fault(other)
    long = " ".join([text, "x y z"] * 3)
    longer = " ".join([text, "x y z"] * 4)
    assert jaccard(long, longer) == 1.0
    assert prompts.fault(long) in (None, NEAR_DUPLICATE, EXACT_DUPLICATE)
    assert prompts.fault(longer) is not None
    assert prompts.fault(long) is not None


@given(st.lists(st.text("ab c\u4e00", max_size=12), max_size=12))
def test_exact_duplicates_are_those_of_a_set_of_texts(texts: list[str]) -> None:
    seen: set[str] = set()
    for text, fault in zip(texts, faults(texts, None), strict=True):
        assert fault == (EXACT_DUPLICATE if normalised(text) in seen else None)
        seen.add(normalised(text))


def test_another_process_says_the_same() -> None:
    code = (
        "from tests.unit.test_duplicates import faults, mixture\n"
        "print([fault and len(fault) for fault in faults(mixture(2, 150))])"
    )
    here = str([fault and len(fault) for fault in faults(mixture(2, 150))])
    for seed in ("0", "1"):
        run = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            check=True,
            cwd=Path(__file__).parents[2],
            env={"PYTHONHASHSEED": seed},
            text=True,
        )
        assert run.stdout.strip() == here


def test_broken_unicode_and_wrong_thresholds() -> None:
    assert faults(["a\ud800b c d e", "a\ud800b c d e"]) == [None, EXACT_DUPLICATE]
    for threshold in (0.0, 1.2, -1):
        with pytest.raises(ValueError, match="is not within"):
            PromptFilter(near_duplicate=threshold)


def test_bands_follow_the_threshold() -> None:
    assert [num_bands(threshold) for threshold in (0.5, 0.8, 0.95, 1.0)] == [32, 16, 8, 1]
    assert num_bands(0.01) == 128
