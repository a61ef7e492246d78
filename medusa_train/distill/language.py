"""Texts in another language than those asked for.

py3langid (naive Bayes over byte n-grams, 140 languages, numpy only) tells languages apart; it is
the optional part ``language`` of this package. Where it cannot know, a text counts as right: short
texts, code, formulas and numbers.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import Any

from medusa_train.errors import InputError

# A text is wrong where one other language has at least this probability …
MIN_OTHER = 0.5
# … and those asked for have less than this one together. Names and lists of words, which could be
# anything, spread over many languages.
MAX_WANTED = 0.05
# Texts with fewer letters are never wrong. Chinese, Japanese and Korean say as much in fewer.
MIN_LETTERS = 24
MIN_IDEOGRAPHS = 8
# Beyond this, more text changes nothing.
_MAX_CHARACTERS = 4000

_NO_LANGUAGE = "zxx"
_ALIASES = {"nb": "no", "iw": "he", "in": "id", "fil": "tl"}
# Who asks for a language means these too, or could not blame the detector for taking one for the
# other.
_COVERS = {
    "ar": ("ary", "arz"),
    "bs": ("hr", "sr"),
    "en": ("pcm",),
    "hr": ("bs", "sr"),
    "id": ("ms",),
    "ku": ("sdh",),
    "ms": ("id",),
    "no": ("nn",),
    "sr": ("bs", "hr"),
    "uz": ("uzs",),
    "zh": ("wuu", "yue"),
}
_NOT_PROSE = re.compile(
    r"```.*?(?:```|\Z)|~~~.*?(?:~~~|\Z)|`[^`\n]*`|\$\$.*?\$\$|<[^<>\n]*>|https?://\S+|\S+@\S+",
    re.DOTALL,
)
_SYMBOLS = re.compile(r"[{}()\[\];=<>|\\&^%$#@_~*/+]")
_CODE_LINE = re.compile(
    r"\s*(?:def|class|import|from|return|elif|else:|for|while|if|var|let|const|func|fn|public|"
    r"private|static|void|int|#include|select|insert|update|delete|create|sudo|pip|git|cd)\b"
    r".*[:;{}()=*.]\s*$",
    re.IGNORECASE,
)
_SYMBOL_SHARE = 0.08
_IDEOGRAPH = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af]")


class LanguageFilter:
    """Tells texts that are in none of some languages.

    Args:
        languages: ISO 639-1 codes, at least one.

    Raises:
        InputError: a code is not known, or the package py3langid is not installed.
    """

    def __init__(self, languages: Sequence[str]) -> None:
        self._identifier = _load_identifier()
        known = [label for label in self._identifier.labels if label != _NO_LANGUAGE]
        codes = [_known_code(code, known) for code in languages]
        if not codes:
            raise ValueError("LanguageFilter needs at least one language")
        self._wanted = frozenset(also for code in codes for also in (code, *_COVERS.get(code, ())))

    def is_wrong(self, text: str) -> bool:
        """Whether a text is almost certainly in none of the languages."""
        prose = prose_of(text)
        if not _is_long_enough(prose):
            return False
        ranked = self._identifier.rank(prose)
        best, probability = ranked[0]
        if best == _NO_LANGUAGE or probability < MIN_OTHER:
            return False
        return bool(sum(share for code, share in ranked if code in self._wanted) < MAX_WANTED)


def prose_of(text: str) -> str:
    """A text without code, formulas, markup and addresses, on one line.

    Code outside of code blocks is told line by line: by its first word and last character, or by
    its share of symbols.
    """
    lines = _NOT_PROSE.sub(" ", text).splitlines()
    prose = " ".join(line.strip() for line in lines if line.strip() and not _is_code(line))
    return prose[:_MAX_CHARACTERS]


@cache
def _load_identifier() -> Any:
    """The detector; it takes a second and 80 MB, and never changes."""
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError as error:
        raise InputError(
            "languages: telling languages apart needs the package py3langid; "
            "pip install 'medusa-train[language]'"
        ) from error
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def _is_code(line: str) -> bool:
    symbols = len(_SYMBOLS.findall(line))
    return symbols > _SYMBOL_SHARE * len(line.strip()) or bool(symbols and _CODE_LINE.match(line))


def _is_long_enough(prose: str) -> bool:
    ideographs = len(_IDEOGRAPH.findall(prose))
    if ideographs >= MIN_IDEOGRAPHS:
        return True
    # Vowel signs (marks) are letters of Indian scripts.
    letters = sum(unicodedata.category(character)[0] in "LM" for character in prose)
    return letters >= MIN_LETTERS


def _known_code(code: str, known: Sequence[str]) -> str:
    """A language's code as the package writes it."""
    given = code.strip().casefold()
    given = _ALIASES.get(given, given)
    if given in known:
        return given
    near = [label for label in known if label[:2] == given[:2]]
    near += difflib.get_close_matches(given, known, n=4, cutoff=0.5)
    advice = f"did you mean {' or '.join(map(repr, dict.fromkeys(near)))}?" if near else "use"
    raise InputError(
        f"languages: {code!r} is not a language that can be told; {advice} "
        "(ISO 639-1 codes such as en, de, es, zh)"
    )
