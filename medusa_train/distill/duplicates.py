"""Prompts that repeat an earlier one, word for word or nearly.

Near duplicates are found with MinHash signatures (Broder 1997) in a locality-sensitive index, both
of the library rensa, written in Rust. The other candidate was datasketch: on 3,000 prompts of 10 to
90 words it took 190 µs and 6.9 kB per prompt where rensa takes 8 µs and 2.4 kB, and importing it
imports scipy, 80 MB. rensa depends on nothing.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata

EXACT_DUPLICATE = "same prompt as an earlier one"
NEAR_DUPLICATE = "nearly the same prompt as an earlier one"

WORD_NGRAM = 3
CHARACTER_NGRAM = 5

_NUM_PERM = 128
_SEED = 1
# At the threshold itself, the index hands on at least this share of the pairs to the comparison.
_CANDIDATE_RECALL = 0.85

# Scripts that put no space between words (Thai, Lao, Burmese, Khmer, kana, Han): each character
# counts as a word.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_UNSPACED += "\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\s{_UNSPACED}]+")


class PromptFilter:
    """Remembers prompts; says whether a new one repeats an earlier one.

    What it says depends on the prompts and their order alone. A prompt of any length costs 120
    bytes, and 2.5 kB more where near duplicates are looked for at 0.8 (4.2 kB at 0.5 to 0.75).

    Args:
        near_duplicate: the Jaccard similarity of two prompts' shingles, 0 < s <= 1, from which on
            the later one is a near duplicate. It is estimated from signatures of 128 slots, with a
            standard error of about 0.025. None: only exact duplicates are found, and the library
            is not loaded.
    """

    def __init__(self, *, near_duplicate: float | None) -> None:
        self._digests: set[bytes] = set()
        self._index: _NearIndex | None = None
        if near_duplicate is not None:
            if not 0 < near_duplicate <= 1:
                raise ValueError(f"near_duplicate: {near_duplicate} is not within (0, 1]")
            self._index = _NearIndex(near_duplicate)

    def fault(self, text: str) -> str | None:
        """Why a prompt is dropped, :data:`EXACT_DUPLICATE` or :data:`NEAR_DUPLICATE`.

        None: it repeats no prompt that was kept, and from now on it is one of those.

        Args:
            text: the prompt, all of its turns.
        """
        text = normalised(text)
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        if digest in self._digests:
            return EXACT_DUPLICATE
        if self._index is not None and not self._index.add(shingles(text)):
            return NEAR_DUPLICATE
        self._digests.add(digest)
        return None


def normalised(text: str) -> str:
    """What two texts share that count as the same: NFKC, case folded, white space collapsed."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    # Half of a surrogate pair has no UTF-8 form.
    return " ".join(folded.encode(errors="replace").decode().split())


def shingles(text: str) -> list[str]:
    """The overlapping pieces of a normalised text by which texts are compared; never empty.

    They are its word 3-grams, punctuation included; of one with fewer than three words, its
    character 5-grams, or the text itself.
    """
    words = _WORD.findall(text)
    if len(words) >= WORD_NGRAM:
        return [" ".join(words[i : i + WORD_NGRAM]) for i in range(len(words) - WORD_NGRAM + 1)]
    count = max(1, len(text) - CHARACTER_NGRAM + 1)
    return [text[i : i + CHARACTER_NGRAM] for i in range(count)]


def num_bands(threshold: float) -> int:
    """Into how many bands a signature is cut: the fewest that find a pair at the threshold.

    Two signatures are compared when a band of them is equal. With b bands of r slots that has the
    probability 1 − (1 − sʳ)ᵇ at similarity s. Fewer bands cost less memory.
    """
    bands = 1
    while bands < _NUM_PERM:
        found = 1 - (1 - threshold ** (_NUM_PERM // bands)) ** bands
        if found >= _CANDIDATE_RECALL:
            break
        bands *= 2
    return bands


class _NearIndex:
    """Signatures of the prompts that were kept."""

    def __init__(self, threshold: float) -> None:
        from rensa import RMinHash, RMinHashDeduplicator

        self._signature = RMinHash
        self._kept = RMinHashDeduplicator(
            threshold, _NUM_PERM, use_lsh=True, num_bands=num_bands(threshold), seed=_SEED
        )

    def add(self, pieces: list[str]) -> bool:
        """Keep a prompt, unless one with a similar signature was kept: then False."""
        signature = self._signature(_NUM_PERM, _SEED)
        signature.update(pieces)
        return bool(self._kept.add(str(self._kept.len()), signature))
