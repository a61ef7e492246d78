"""Which prompts and answers are kept; every other one has a reason that is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from medusa_train.data.chat import ChatTokenizer
from medusa_train.distill.language import LanguageFilter
from medusa_train.distill.settings import DistillSettings
from medusa_train.distill.writer import Answer

UNFINISHED_PROMPT = "prompt without an end"
EMPTY_PROMPT = "empty prompt"
SPECIAL_PROMPT = "prompt with a special token"
LONG_PROMPT = "prompt too long"
REFUSED_PROMPT = "prompt refused by the chat template"
FOREIGN_PROMPT = "prompt in another language"
EMPTY_ANSWER = "empty answer"
SHORT_ANSWER = "answer too short"
CUT_ANSWER = "answer cut"
LOOPING_ANSWER = "looping answer"
FOREIGN_ANSWER = "answer in another language"
DUPLICATE_ROW = "same tokens as an earlier row"

# A looping answer is stopped within this many tokens, since nothing that follows could save it.
LOOP_CHECK_TOKENS = 16


class AnswerFilter:
    """Looks at prompts and answers by themselves, without the others.

    Raises:
        InputError: a language that is not known, or the package that tells them is not installed.
    """

    def __init__(self, settings: DistillSettings, *, chat: ChatTokenizer) -> None:
        self.settings = settings
        self.chat = chat
        self._language = LanguageFilter(settings.languages) if settings.languages else None

    def prompt_fault(self, messages: Sequence[Mapping[str, Any]]) -> str | None:
        """Why a prompt is dropped, or None."""
        if self._language is None:
            return None
        asked = "\n".join(str(turn["content"]) for turn in messages if turn["role"] == "user")
        return FOREIGN_PROMPT if self._language.is_wrong(asked) else None

    def answer_fault(self, answer: Answer) -> str | None:
        """Why an answer is dropped, or None."""
        settings, tokens = self.settings, answer.token_ids
        words = tokens[:-1] if tokens and tokens[-1] in self.chat.stop_ids else tokens
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
        if self._language is not None:
            text = self.chat.tokenizer.decode(list(words), skip_special_tokens=True)
            if self._language.is_wrong(str(text)):
                return FOREIGN_ANSWER
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
