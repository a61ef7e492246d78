"""Token ids of a text's beginnings from those of the whole text, where that is exact.

A tokenizer cuts a text at its added tokens before anything else, and tokenises the pieces by
themselves. So a beginning has the whole text's ids up to the last added token in it, and only the
short rest behind that token is tokenised again. A conversation then costs one tokenisation, not
one for each of its prompts. Where this does not hold (no added token, one that takes the space
around it, another count in the ids than in the text) there is no answer, and the caller tokenises.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

# A longer rest is not worth a call of its own; the caller tokenises many at once.
_MAX_REST = 40

Tokenise = Callable[[list[str]], list[list[int]]]


class PrefixTokenizer:
    """Finds the ids of beginnings.

    Args:
        tokenizer: names its added tokens.
        tokenise: texts to ids, without special tokens of its own.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tokenise: Tokenise) -> None:
        added = tokenizer.added_tokens_decoder.items() if tokenizer.is_fast else ()
        self._ids = {
            token.content: token_id
            for token_id, token in added
            if not (token.lstrip or token.rstrip or token.normalized or token.single_word)
        }
        self._known = frozenset(self._ids.values())
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._tokenise = tokenise
        self._rest_ids = lru_cache(maxsize=4096)(self._tokenised_rest)

    def ids_of(
        self, prefixes: Sequence[str], *, whole: str, whole_ids: Sequence[int]
    ) -> list[list[int] | None]:
        """The ids of each prefix of ``whole``; None where they have to be tokenised.

        Args:
            prefixes: texts; one that is no beginning of ``whole`` gives None.
            whole: a text.
            whole_ids: its ids.
        """
        matches = list(self._pattern.finditer(whole))
        positions = [i for i, token in enumerate(whole_ids) if token in self._known]
        if [whole_ids[i] for i in positions] != [self._ids[match[0]] for match in matches]:
            return [None] * len(prefixes)
        ends = [match.end() for match in matches]
        results: list[list[int] | None] = []
        for prefix in prefixes:
            count = bisect_right(ends, len(prefix)) if whole.startswith(prefix) else 0
            rest = prefix[ends[count - 1] :] if count else prefix
            if not count or len(rest) > _MAX_REST:
                results.append(None)
                continue
            rest_ids = self._rest_ids(matches[count - 1][0], rest)
            results.append([*whole_ids[: positions[count - 1] + 1], *rest_ids])
        return results

    def _tokenised_rest(self, token: str, rest: str) -> tuple[int, ...]:
        """The ids of ``rest`` behind the added token ``token``."""
        [ids] = self._tokenise([token + rest])
        return tuple(ids[1:])
