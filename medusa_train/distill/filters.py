"""Which prompts and answers are kept; every other one has a reason that is counted."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from medusa_train.distill.settings import DistillSettings
from medusa_train.distill.writer import Answer

UNFINISHED_PROMPT = "prompt without an end"
EMPTY_PROMPT = "empty prompt"
SPECIAL_PROMPT = "prompt with a special token"
LONG_PROMPT = "prompt too long"
DUPLICATE_PROMPT = "same prompt as an earlier one"
REFUSED_PROMPT = "prompt refused by the chat template"
EMPTY_ANSWER = "empty answer"
SHORT_ANSWER = "answer too short"
CUT_ANSWER = "answer cut"
LOOPING_ANSWER = "looping answer"

# A looping answer is stopped within this many tokens, since nothing that follows could save it.
LOOP_CHECK_TOKENS = 16


def answer_fault(
    answer: Answer, *, settings: DistillSettings, stop_ids: frozenset[int]
) -> str | None:
    """Why an answer is dropped, or None."""
    tokens = answer.token_ids
    words = tokens[:-1] if tokens and tokens[-1] in stop_ids else tokens
    if not words:
        return EMPTY_ANSWER
    if len(words) < settings.min_answer_tokens:
        return SHORT_ANSWER
    if settings.drop_cut and answer.finish_reason == "length":
        return CUT_ANSWER
    if settings.loop_ngram and is_looping(
        words, ngram=settings.loop_ngram, repeats=settings.loop_repeats
    ):
        return LOOPING_ANSWER
    return None


def is_looping(tokens: Sequence[int], *, ngram: int, repeats: int) -> bool:
    """Whether one n-gram of ``ngram`` tokens occurs more than ``repeats`` times."""
    grams = (tuple(tokens[i : i + ngram]) for i in range(len(tokens) - ngram + 1))
    counts = Counter(grams)
    return max(counts.values(), default=0) > repeats


def loop_watch(settings: DistillSettings) -> Callable[[Sequence[int]], bool] | None:
    """What tells the engine to stop an answer that will be dropped as looping; None: keep all."""
    if not settings.loop_ngram:
        return None
    return lambda tokens: (
        len(tokens) % LOOP_CHECK_TOKENS == 0
        and is_looping(tokens, ngram=settings.loop_ngram, repeats=settings.loop_repeats)
    )


def prompt_key(messages: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """What two prompts share that count as the same: their text, normalised, turn by turn."""
    return tuple(
        " ".join(unicodedata.normalize("NFKC", str(message.get("content"))).casefold().split())
        for message in messages
    )
