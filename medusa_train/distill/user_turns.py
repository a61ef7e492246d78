"""User turns that the model writes itself.

A chat model that is given only what its template puts before a user turn writes a plausible user
turn (Magpie, Xu et al. 2024, arXiv 2406.08464). It ends at a stop id, or at the text that the
template puts after a user turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from medusa_train.data.chat import ChatTokenizer
from medusa_train.distill import filters
from medusa_train.distill.settings import DistillSettings
from medusa_train.distill.writer import Answer, Stopping
from medusa_train.errors import InputError


class UserTurns:
    """How one template's user turns begin and end."""

    def __init__(self, chat: ChatTokenizer, settings: DistillSettings) -> None:
        self.chat = chat
        self.settings = settings
        self._headers: dict[str, list[int]] = {}

    def header(
        self, history: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None
    ) -> list[int]:
        """The ids that the model is given to write the user turn after ``history``.

        Raises:
            InputError: the template puts nothing before a conversation's first turn.
        """
        if len(history) > 1 or tools:
            return self.chat.user_header(history, tools=tools)
        # The first turn's is the same for all.
        key = str(history[0]["content"]) if history else ""
        if key not in self._headers:
            self._headers[key] = self.chat.user_header(history)
        if not self._headers[key]:
            raise InputError(
                "chat template: puts nothing before a user turn, so there is nothing that the "
                "model could begin one after; give a file of prompts (data.distill.prompts)"
            )
        return self._headers[key]

    def stopping(self, header_length: int) -> Stopping:
        """When a user turn is finished, or too long to be asked.

        Args:
            header_length: tokens before it, which belong to the prompt too; for later turns, which
                have the whole conversation before them, the limit is that of a first turn.
        """
        chat = self.chat
        text = self.end_text
        # A longer turn would be dropped as too long. Where a stop id ends it, the template's other
        # ids after it are not for the model to write.
        num_unwritten = len(chat.user_end_ids) - 1 if text is None else 0
        first_header = len(self.header(self._first_history()))
        limit = self.settings.max_prompt_tokens - min(first_header, header_length) - num_unwritten
        return Stopping(chat.stop_ids, max(1, limit), self._end_of_turn(text), text)

    @property
    def end_text(self) -> str | None:
        """The template's text after a user turn; None where a stop id ends the turn."""
        ids = self.chat.user_end_ids
        if ids and ids[0] in self.chat.stop_ids:
            return None
        return self.chat.user_end_text.strip() or None

    def read(self, answer: Answer) -> tuple[str, str | None]:
        """The text of the user turn that the model wrote, and why it is dropped if it is."""
        tokens = answer.token_ids
        if answer.finish_reason == "length":
            return "", filters.UNFINISHED_PROMPT
        if tokens and tokens[-1] in self.chat.stop_ids:
            tokens = tokens[:-1]
            text = self._decoded(tokens)
            special = set(self.chat.tokenizer.all_special_ids)
        else:
            # The template's own text ends this turn, special tokens and all.
            text = self._decoded(tokens).partition(self.chat.user_end_text.strip())[0]
            special = set()
        text = text.strip()
        if not text:
            return "", filters.EMPTY_PROMPT
        if special & set(tokens):
            return "", filters.SPECIAL_PROMPT
        return text, None

    def _first_history(self) -> list[dict[str, Any]]:
        system = self.settings.system_prompt
        return [] if system is None else [{"role": "system", "content": system}]

    def _end_of_turn(self, text: str | None) -> Callable[[Sequence[int]], bool] | None:
        if text is None:
            return None
        # No token holds less than nothing of the text: its characters bound the tokens to look at.
        window = len(text) + 1
        return lambda tokens: text in self._decoded(tokens[-window:])

    def _decoded(self, tokens: Sequence[int]) -> str:
        text = self.chat.tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text
