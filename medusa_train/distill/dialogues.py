"""Conversations while they are written: whose turn it is, and which ids the model is given.

The ids of a row are those that the model saw and wrote. A later turn goes on with the row where the
template renders the conversation so far as the model saw it; where it renders it otherwise (it
strips old reasoning, say) the turn begins a row of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa_train.data.chat import ChatTokenizer
from medusa_train.data.conversations import Conversation
from medusa_train.data.template import TemplateRefusedError
from medusa_train.distill.openings import Opening
from medusa_train.distill.writer import Answer, TeacherLogprobs
from medusa_train.errors import InputError
from medusa_train.json_values import fingerprint


@dataclass(frozen=True, slots=True)
class Origin:
    """Who writes and how, as far as rows say it.

    Attributes:
        base_fingerprint: of the base model.
        sampling: how answers are drawn.
        plan: how many turns there are, and who writes the user's.
    """

    base_fingerprint: str
    sampling: Mapping[str, Any]
    plan: Sequence[Any]


@dataclass(slots=True)
class _Row:
    """Ids that the model saw and wrote in one go."""

    ids: list[int]
    spans: list[tuple[int, int]] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    teachers: list[TeacherLogprobs] = field(default_factory=list)
    retokenised: bool = False


class Dialogue:
    """One conversation.

    Args:
        opening: how it begins.
        chat: the template.
        system_prompt: goes before a conversation that has no system turn.

    Attributes:
        messages: the turns so far.
        prompt_ids: what the model is given for the next answer, after :meth:`ask`.
    """

    def __init__(
        self, opening: Opening, *, chat: ChatTokenizer, system_prompt: str | None = None
    ) -> None:
        self.opening = opening
        self.chat = chat
        self.messages = _with_system(opening, system_prompt) if chat.has_template else []
        self.prompt_ids: list[int] = []
        self._later = list(opening.later)
        self._first_ids: list[int] = []
        self._rows: list[_Row] = []
        self._text = ""

    @property
    def has_row(self) -> bool:
        """Whether there is an answer to keep."""
        return bool(self._rows)

    @property
    def is_written(self) -> bool:
        """Whether the model writes how it begins."""
        return self.opening.messages is None and self.opening.text is None

    def ask(self) -> None:
        """Find the ids that the next answer follows.

        Raises:
            TemplateRefusedError: the template refuses the turns.
        """
        if self.messages:
            ids, text = self.chat.render_prompt(self.messages, tools=self.opening.tools)
        elif self.opening.text is not None:
            ids, text = list(self.chat.encode_text(self.opening.text).input_ids), ""
        else:
            ids, text = [beginning_id(self.chat)], ""
        going_on = self._going_on(ids, text) if self._rows else None
        self.prompt_ids = ids if going_on is None else going_on
        self._text = text
        if not self._rows:
            self._first_ids = self.prompt_ids

    def answer(self, answer: Answer) -> None:
        """Take the answer to :attr:`prompt_ids`."""
        start = len(self.prompt_ids)
        is_new = not self._rows or self._rows[-1].ids != self.prompt_ids[: len(self._rows[-1].ids)]
        if is_new:
            self._rows.append(_Row([]))
        row = self._rows[-1]
        row.ids = [*self.prompt_ids, *answer.token_ids]
        row.spans.append((start, len(row.ids)))
        row.reasons.append(answer.finish_reason)
        row.retokenised |= answer.retokenised
        if answer.teacher is not None:
            row.teachers.append(answer.teacher)
        self._text += self._decoded(answer.token_ids, with_special=True)
        if self.messages:
            content = self._content(self._decoded(answer.token_ids, with_special=False))
            self.messages.append({"role": "assistant", "content": content})
            row.messages = list(self.messages)

    def replay(self) -> bool:
        """Take the user's next turn from the opening; whether there is one."""
        if not self._later:
            return False
        self.messages.append(self._later.pop(0))
        return True

    def conversations(self, origin: Origin) -> list[tuple[Conversation, list[TeacherLogprobs]]]:
        """The rows, each with the log-probabilities of its answers."""
        opening = self.opening
        asked = opening.index if self.is_written else self._first_ids
        replayed = [turn["content"] for turn in opening.later]
        identity = [origin.base_fingerprint, opening.source, asked, list(origin.plan), replayed]
        rows = []
        for number, row in enumerate(self._rows):
            parts = [*identity, dict(origin.sampling), *([number] if number else [])]
            conversation = Conversation(
                id=fingerprint(parts),
                source=opening.source,
                messages=tuple(row.messages),
                input_ids=tuple(row.ids),
                assistant_spans=tuple(row.spans),
                finish_reasons=tuple(row.reasons),
                sampling=origin.sampling,
                retokenised=row.retokenised,
            )
            rows.append((conversation, row.teachers))
        return rows

    def _content(self, text: str) -> str:
        """The answer as a turn, with the white space that makes the template render it as it was.

        A template may put a space before the content that the model writes as part of its answer.
        """
        for content in dict.fromkeys((text, text.strip())):
            turns = [*self.messages, {"role": "assistant", "content": content}]
            try:
                rendered = self.chat.template.render(
                    self.chat.template.prepare(turns), prompt=False, tools=self.opening.tools
                )
            except TemplateRefusedError:
                break
            if rendered.startswith(self._text):
                return content
        return text

    def _going_on(self, ids: list[int], text: str) -> list[int] | None:
        """The row's ids and what the template puts behind them; None where it changes them."""
        row = self._rows[-1].ids
        if ids[: len(row)] == row:
            return ids
        if not text.startswith(self._text):
            return None
        # The text is what the model saw and wrote, but it is no longer cut into the same tokens.
        before = self.chat.encode_rendered(self._text)
        if ids[: len(before)] != before:
            return None
        return [*row, *ids[len(before) :]]

    def _decoded(self, tokens: Sequence[int], *, with_special: bool) -> str:
        text = self.chat.tokenizer.decode(
            list(tokens),
            skip_special_tokens=not with_special,
            clean_up_tokenization_spaces=False,
        )
        assert isinstance(text, str)
        return text


def prompt_key(
    messages: Sequence[Mapping[str, Any]],
    *,
    prompt_ids: Sequence[int],
    system_prompt: str | None = None,
) -> str | None:
    """The text that two conversations share which have the same prompt; None: there is no prompt.

    Args:
        messages: the turns; those before the first answer count.
        prompt_ids: what the model was given; counts where there are no turns.
        system_prompt: a system turn that all conversations begin with, which says nothing.
    """
    if not messages:
        return " ".join(map(str, prompt_ids)) if len(prompt_ids) > 1 else None
    parts = []
    for message in messages:
        if message.get("role") == "assistant":
            break
        content = str(message.get("content") or "")
        if message.get("role") != "system" or content != system_prompt:
            parts.append(content)
    return "\n\n".join(parts)


def _with_system(opening: Opening, system_prompt: str | None) -> list[dict[str, Any]]:
    turns = list(opening.messages or ())
    if system_prompt is None or any(turn.get("role") == "system" for turn in turns):
        return turns
    return [{"role": "system", "content": system_prompt}, *turns]


def beginning_id(chat: ChatTokenizer) -> int:
    """The id that a text begins with.

    Raises:
        InputError: the tokenizer has no such id.
    """
    for token in (chat.tokenizer.bos_token_id, chat.tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    raise InputError(
        "the base model's tokenizer has no chat template and no beginning-of-sequence token, so "
        "the model can write nothing by itself; give a file of texts to go on with "
        "(data.distill.prompts)"
    )
