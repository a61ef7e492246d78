"""Conversations and text to token ids with the exact loss mask.

The mask comes from the tokens, not from markers in the template: render the conversation before an
answer with the generation prompt, then with the answer; what the second adds, up to and including
the end-of-turn token, is what the model would have to emit, and nothing else is supervised.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from medusa_train.data.mask import EncodedRow, Turn, common_prefix, first_stop, rows_of_turns
from medusa_train.data.prefixes import PrefixTokenizer
from medusa_train.data.template import PROBES, ChatTemplate, TemplateRefusedError
from medusa_train.json_values import fingerprint


@dataclass(frozen=True, slots=True)
class _Answer:
    """One answer's text, and the rendered texts of its prompt and of both together."""

    content: str
    prompt: str
    full: str
    num_messages: int


class ChatTokenizer:
    """A tokenizer, its chat template with its variables, and the model's stop ids.

    Args:
        tokenizer: the base model's.
        chat_template: the text of a Jinja template that replaces the tokenizer's own.
        chat_template_kwargs: variables for the template, the same for every conversation.
        stop_ids: the ids at which the model's generation stops.

    Attributes:
        vocab_size: the number of the tokenizer's ids; greater ids are no tokens.
        template: the template, which may have no text: then only plain text can be encoded.

    Raises:
        InputError: the template has a syntax error.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_ids: Sequence[int],
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_ids = frozenset(stop_ids)
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.template = ChatTemplate(
            tokenizer, text=chat_template, variables=self.chat_template_kwargs
        )
        self.vocab_size = len(tokenizer)
        self._prefixes = PrefixTokenizer(tokenizer, self._tokenise)

    @property
    def has_template(self) -> bool:
        """Whether chats can be encoded at all."""
        return self.template.text is not None

    @cached_property
    def chat_template_hash(self) -> str | None:
        """A hash of the template's text; None without a template."""
        return None if self.template.text is None else fingerprint(self.template.text)

    @cached_property
    def tokenizer_hash(self) -> str:
        """A hash of everything that decides the ids of a text."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return fingerprint([self.tokenizer.get_vocab(), self.tokenizer.special_tokens_map])
        state = json.loads(backend.to_str())
        # How the last batch was padded is state of the object, not of the tokenizer.
        return fingerprint({k: v for k, v in state.items() if k not in {"padding", "truncation"}})

    @cached_property
    def rewrites_history(self) -> bool:
        """Whether the template renders earlier answers unlike the last one (strips reasoning, say).

        Such conversations become one row per answer. Found once, with a probe; the tokens of every
        conversation are compared all the same.
        """
        turns = []
        for question, answer in (PROBES[:2], PROBES[2:4]):
            reasoned = f"<think>\nso\n</think>\n\n{answer}"
            turns.append({"role": "user", "content": question})
            turns.append({"role": "assistant", "content": reasoned})
        try:
            return len(self.encode_conversation(turns)) > 1
        except TemplateRefusedError:
            return False

    def encode_prompt(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None
    ) -> list[int]:
        """The ids of ``messages`` with the generation prompt, as ``apply_chat_template`` gives.

        Raises:
            TemplateRefusedError: the template raised an error.
            InputError: there is no template.
        """
        prepared = self.template.prepare(messages)
        return self._tokenise([self.template.render(prepared, prompt=True, tools=tools)])[0]

    def render_prompt(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None
    ) -> tuple[list[int], str]:
        """:meth:`encode_prompt`, and the text that the ids are of.

        Raises:
            TemplateRefusedError: the template raised an error.
            InputError: there is no template.
        """
        text = self.template.render(self.template.prepare(messages), prompt=True, tools=tools)
        return self.encode_rendered(text), text

    def encode_rendered(self, text: str) -> list[int]:
        """The ids of a text that the template rendered, or of its beginning."""
        return self._tokenise([text])[0]

    def encode_conversation(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None
    ) -> list[EncodedRow]:
        """The rows of a conversation with the exact mask; what follows its last answer is left out.

        One row, unless the template rewrites earlier turns (or joins tokens across a turn's
        border): then one row per answer, each with the ids that a server would have seen.

        Raises:
            TemplateRefusedError: the template raised an error.
            InputError: there is no template.
        """
        [rows] = self.encode_conversations([(messages, tools)])
        if isinstance(rows, TemplateRefusedError):
            raise rows
        return rows

    def encode_conversations(
        self,
        conversations: Sequence[tuple[Sequence[Mapping[str, Any]], Sequence[Any] | None]],
    ) -> list[list[EncodedRow] | TemplateRefusedError]:
        """:meth:`encode_conversation` for many at once, several times as fast.

        Args:
            conversations: messages and tools of each.

        Returns:
            For each the rows, or the error that its template raised.
        """
        rendered: list[list[_Answer] | TemplateRefusedError] = []
        for messages, tools in conversations:
            try:
                rendered.append(self._rendered(messages, tools))
            except TemplateRefusedError as error:
                rendered.append(error)
        ids = self._ids_of_answers(
            [answers for answers in rendered if not isinstance(answers, TemplateRefusedError)]
        )
        results: list[list[EncodedRow] | TemplateRefusedError] = []
        for answers in rendered:
            if isinstance(answers, TemplateRefusedError):
                results.append(answers)
                continue
            turns = [self._turn(answer, ids[answer.prompt], ids[answer.full]) for answer in answers]
            results.append(rows_of_turns(turns) if turns else [])
        return results

    def encode_text(self, text: str) -> EncodedRow:
        """Plain text: all tokens after the first are supervised, as one span without end of turn.

        The tokenizer's own beginning-of-sequence token goes first, unless the text has it.
        """
        [ids] = self._tokenise([text])
        bos = self._own_bos
        if bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        spans = ((1, len(ids)),) if len(ids) > 1 else ()
        return EncodedRow(tuple(ids), spans, tuple(False for _ in spans))

    def user_header(
        self,
        history: Sequence[Mapping[str, Any]] = (),
        *,
        tools: Sequence[Any] | None = None,
    ) -> list[int]:
        """The ids before the content of the user turn after ``history`` (Magpie's prompt).

        Without history, or after a system turn, it is the conversation's first user turn.

        They are the longest common beginning of several rendered prompts, so that a token which
        would join the header's last space with the content's first word is left to the model.
        """
        return common_prefix(self._probe_prompts(history, tools))

    @cached_property
    def user_end_ids(self) -> list[int]:
        """The ids that follow a user turn's content, the generation prompt included."""
        return common_prefix([ids[::-1] for ids in self._probe_prompts(())])[::-1]

    @property
    def user_end_text(self) -> str:
        """The text directly after a user turn's content; a user turn that a model writes ends here.

        What stands between the content and the generation prompt; where that is only white space,
        the generation prompt's text too.
        """
        return self.template.user_end

    def _tokenise(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        # Special tokens are the template's business: the tokenizer must not add a second BOS.
        encoded = self.tokenizer(
            texts, add_special_tokens=False, padding=False, truncation=False, verbose=False
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    @cached_property
    def _own_bos(self) -> int | None:
        bos = self.tokenizer.bos_token_id
        added = self.tokenizer("")["input_ids"]
        return bos if isinstance(bos, int) and bos in added else None

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
    ) -> list[_Answer]:
        prepared = self.template.prepare(messages)
        # A folded system turn is still one of the caller's messages.
        num_folded = len(messages) - len(prepared)
        return [
            _Answer(
                content=str(message.get("content") or ""),
                prompt=self.template.render(prepared[:index], prompt=True, tools=tools),
                full=self.template.render(prepared[: index + 1], prompt=False, tools=tools),
                num_messages=index + 1 + num_folded,
            )
            for index, message in enumerate(prepared)
            if message["role"] == "assistant"
        ]

    def _ids_of_answers(self, rendered: Sequence[Sequence[_Answer]]) -> dict[str, list[int]]:
        """The ids of every text of the answers, each conversation's longest text first."""
        wholes = [answers[-1].full for answers in rendered if answers]
        ids = dict(zip(wholes, self._tokenise(wholes), strict=True))
        missing: dict[str, None] = {}
        for answers in rendered:
            texts = [text for answer in answers for text in (answer.prompt, answer.full)]
            whole = answers[-1].full if answers else ""
            found = self._prefixes.ids_of(texts, whole=whole, whole_ids=ids.get(whole, ()))
            for text, text_ids in zip(texts, found, strict=True):
                if text in ids:
                    continue
                if text_ids is None:
                    missing[text] = None
                else:
                    ids[text] = text_ids
        ids.update(zip(missing, self._tokenise(list(missing)), strict=True))
        return ids

    def _turn(self, answer: _Answer, prompt_ids: list[int], full_ids: list[int]) -> Turn:
        start = len(prompt_ids)
        text = answer.full[len(answer.prompt) :]
        if not answer.full.startswith(answer.prompt):
            text = _without_overlap(answer.content, answer.prompt) + self.template.answer_end
        retokenised = full_ids[:start] != prompt_ids
        if retokenised:
            full_ids = prompt_ids + self._tokenise([text])[0]
        stop = first_stop(full_ids, start=start, stop_ids=self.stop_ids)
        if stop is not None:
            return Turn(full_ids, start, stop + 1, True, retokenised, answer.num_messages)
        without_end = text.removesuffix(self.template.answer_end)
        if retokenised:
            shorter = prompt_ids + self._tokenise([without_end])[0]
        else:
            shorter = self._tokenise([answer.prompt + without_end])[0]
        # Without an end of turn the template's own text after the answer is not supervised, nor is
        # a token that joins that text with the answer's last character.
        end = max(start, len(common_prefix([full_ids, shorter])))
        return Turn(full_ids, start, end, False, retokenised, answer.num_messages)

    def _probe_prompts(
        self, history: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None
    ) -> list[list[int]]:
        return [
            self.encode_prompt([*history, {"role": "user", "content": probe}], tools=tools)
            for probe in PROBES
        ]


def _without_overlap(content: str, prompt_text: str) -> str:
    """``content`` without a beginning that ends the prompt (an opened reasoning block, say)."""
    for size in range(min(len(content), len(prompt_text)), 0, -1):
        if content[:size].strip() and prompt_text.endswith(content[:size]):
            return content[size:]
    return content
