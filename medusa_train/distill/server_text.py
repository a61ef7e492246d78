"""Between token ids and the texts that some servers speak, and how an answer's ids end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from medusa_train.console import warn
from medusa_train.data.chat import ChatTokenizer
from medusa_train.data.mask import first_stop
from medusa_train.data.template import TemplateRefusedError
from medusa_train.distill.server_api import FinishReason, Reply
from medusa_train.distill.server_http import MALFORMED_ANSWER, AttemptError
from medusa_train.distill.writer import Answer, Stopping, TeacherLogprobs


class AnswerReader:
    """Makes answers of replies.

    Args:
        chat: tokenizer, template and stop ids of the model that the servers serve.
    """

    def __init__(self, chat: ChatTokenizer) -> None:
        self._chat = chat
        self._special_ids = frozenset(chat.tokenizer.all_special_ids)
        # Nothing says that a tokenizer may be used by several threads.
        self._lock = threading.Lock()
        self._has_warned = False

    def prompt_text(self, prompt_ids: Sequence[int]) -> str:
        """A prompt as text, special tokens and all, but for a BOS that the server adds itself."""
        text = self._decode(prompt_ids)
        bos = self._own_bos
        return text if bos is None else text.removeprefix(bos)

    def warn_if_read_otherwise(self, prompt_ids: Sequence[int], text: str, *, url: str) -> None:
        """Say, once, that a server which is sent text sees other ids than the rows hold."""
        if self._has_warned or self._encode(text, add_special_tokens=True) == list(prompt_ids):
            return
        with self._lock:
            is_first, self._has_warned = not self._has_warned, True
        if is_first:
            warn(
                f"{url}: is sent text, which it reads as other token ids than the prompt's (a "
                "beginning-of-sequence token of its own, say); use a server that takes token ids"
            )

    def answer(
        self, reply: Reply, *, prompt_ids: Sequence[int], stopping: Stopping, exact_ids: bool
    ) -> Answer:
        """The answer in a reply; where it holds no ids, they are made from its text.

        Args:
            reply: what the server said.
            prompt_ids: of the prompt.
            stopping: what was asked for.
            exact_ids: whether an answer without ids is none.

        Raises:
            AttemptError: ids are missing, more than were asked for or no tokens of the base model,
                or log-probabilities are of none of its tokens, or not of the end of turn.
        """
        if reply.token_ids is None:
            if exact_ids:
                raise AttemptError(MALFORMED_ANSWER, "no token ids", blame="answer")
            ids = self._retokenised(reply, prompt_ids, stopping)
            return _ended(ids, reply.finish_reason, stopping, retokenised=True)
        ids = reply.token_ids
        self._check(reply, ids, stopping)
        end = self._missing_end(reply, ids, stopping)
        if end is not None:
            if reply.teacher is not None:
                detail = "no log-probabilities of the token that ended the answer"
                raise AttemptError(MALFORMED_ANSWER, detail, blame="answer")
            ids = (*ids, end)
        return _ended(ids, reply.finish_reason, stopping, teacher=reply.teacher)

    def _check(self, reply: Reply, ids: tuple[int, ...], stopping: Stopping) -> None:
        """Raise where ids cannot be an answer of the base model to this request."""
        detail = None
        known = reply.teacher.token_ids if reply.teacher is not None else np.zeros((0, 1))
        if len(ids) > stopping.max_new_tokens:
            detail = f"{len(ids)} token ids where {stopping.max_new_tokens} at most were asked for"
        elif ids and max(ids) >= self._chat.vocab_size:
            detail = (
                f"token id {max(ids)} is not in the base model's vocabulary of "
                f"{self._chat.vocab_size}; is it the base model that is served?"
            )
        elif known.size and not 0 <= known.min() <= known.max() < self._chat.vocab_size:
            detail = (
                "log-probabilities of token ids that are not in the base model's vocabulary of "
                f"{self._chat.vocab_size}; is it the base model that is served?"
            )
        if detail is not None:
            raise AttemptError(MALFORMED_ANSWER, detail, blame="answer")

    def _missing_end(self, reply: Reply, ids: tuple[int, ...], stopping: Stopping) -> int | None:
        """The id that ended the answer where the server left it out."""
        if reply.finish_reason != "stop" or any(token in stopping.stop_ids for token in ids):
            return None
        if isinstance(reply.stop_reason, int):
            return reply.stop_reason if reply.stop_reason in stopping.stop_ids else None
        if isinstance(reply.stop_reason, str) or self._ends_in_text(self._decode(ids), stopping):
            return None
        # The server's own end, which is not among ours, is what the model wrote.
        if ids and ids[-1] in self._special_ids:
            return None
        return self._template_end(stopping)

    def _retokenised(
        self, reply: Reply, prompt_ids: Sequence[int], stopping: Stopping
    ) -> tuple[int, ...]:
        """Ids of a text: as they would follow the prompt, or else of the text alone."""
        text = reply.text
        if (
            reply.finish_reason == "stop"
            and not self._ends_in_text(text, stopping)
            and self._template_end(stopping) is not None
        ):
            text += self._answer_end
        start = len(prompt_ids)
        ids = self._encode(self._decode(prompt_ids) + text)
        answer = ids[start:] if ids[:start] == list(prompt_ids) else self._encode(text)
        stop = first_stop(answer, start=0, stop_ids=stopping.stop_ids)
        if stop is None:
            return tuple(answer)
        # An end that the model was not granted is no label.
        return tuple(answer[: stop + 1] if reply.finish_reason == "stop" else answer[:stop])

    def _ends_in_text(self, text: str, stopping: Stopping) -> bool:
        return stopping.stop_text is not None and stopping.stop_text in text

    def _template_end(self, stopping: Stopping) -> int | None:
        """The stop id that the template puts after an answer."""
        ids = self._end_ids
        stop = first_stop(ids, start=0, stop_ids=stopping.stop_ids)
        return None if stop is None else ids[stop]

    @cached_property
    def _answer_end(self) -> str:
        try:
            return self._chat.template.answer_end if self._chat.has_template else ""
        except TemplateRefusedError:
            return ""

    @cached_property
    def _end_ids(self) -> list[int]:
        return self._encode(self._answer_end)

    @cached_property
    def _own_bos(self) -> str | None:
        """The BOS that the tokenizer, and so a server, puts before a text by itself."""
        tokenizer = self._chat.tokenizer
        bos = tokenizer.bos_token
        with self._lock:
            added = tokenizer("")["input_ids"]
        return bos if isinstance(bos, str) and tokenizer.bos_token_id in added else None

    def _encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        with self._lock:
            encoded = self._chat.tokenizer(
                text, add_special_tokens=add_special_tokens, verbose=False
            )
        ids: list[int] = encoded["input_ids"]
        return ids

    def _decode(self, ids: Sequence[int]) -> str:
        with self._lock:
            text = self._chat.tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        assert isinstance(text, str)
        return text


def _ended(
    ids: tuple[int, ...],
    reason: FinishReason,
    stopping: Stopping,
    *,
    retokenised: bool = False,
    teacher: TeacherLogprobs | None = None,
) -> Answer:
    """The answer up to its first stop id, which ends it whatever the server thought of it."""
    stop = first_stop(ids, start=0, stop_ids=stopping.stop_ids)
    if stop is None:
        return Answer(ids, reason, retokenised, teacher)
    if teacher is not None:
        teacher = TeacherLogprobs(teacher.token_ids[: stop + 1], teacher.logprobs[: stop + 1])
    return Answer(ids[: stop + 1], "stop", retokenised, teacher)
