"""A chat template: messages to text, with the repairs that templates need."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from medusa_train.console import warn
from medusa_train.errors import InputError

# Words that stand for any content when a template is probed. They begin with different letters,
# so that the ids of a user header are the longest prefix that all of them share.
PROBES = ("Hello there", "What is it", "Write a poem", "7 of them", "(so be it")
# A template is a program: what it does with turns that it was not written for can raise all this.
_RENDER_ERRORS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
# What is said to the template with every conversation, or would change what it gives.
_NO_VARIABLES = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "messages",
        "return_assistant_tokens_mask",
        "tokenize",
        "tools",
    }
)


class TemplateRefusedError(InputError):
    """The chat template raised an error on these messages."""


class ChatTemplate:
    """Renders messages with a tokenizer's template, or with one that replaces it.

    Args:
        tokenizer: the base model's; its special tokens are variables of the template.
        text: the text of a Jinja template that replaces the tokenizer's own.
        variables: variables for the template, the same for every conversation.

    Raises:
        InputError: the template has a syntax error, or a variable has a name that is taken.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        text: str | None,
        variables: Mapping[str, Any],
    ) -> None:
        self._tokenizer = tokenizer
        self._variables = dict(variables)
        self._has_said_refusal = False
        if taken := sorted(self._variables.keys() & _NO_VARIABLES):
            raise InputError(
                f"chat_template_kwargs: {taken[0]!r} is not a variable that can be given to a chat "
                "template; remove it"
            )
        self.text = text or _own_template(tokenizer)
        if self.text is not None:
            try:
                self._render([{"role": "user", "content": PROBES[0]}], prompt=True)
            except jinja2.TemplateSyntaxError as error:
                message = f"chat template: line {error.lineno}: {error.message}"
                raise InputError(message) from error
            except _RENDER_ERRORS:
                pass  # a template may refuse a probe; real messages are refused by name

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        prompt: bool,
        tools: Sequence[Any] | None = None,
    ) -> str:
        """The text of ``messages``, with or without the generation prompt.

        Raises:
            TemplateRefusedError: the template raised an error.
            InputError: there is no template.
        """
        if self.text is None:
            raise InputError(
                "the base model's tokenizer has no chat template; give one "
                "(data.chat_template in a recipe, --chat-template on the command line), "
                "or use plain text"
            )
        try:
            return self._render(messages, prompt=prompt, tools=tools)
        except _RENDER_ERRORS as error:
            raise TemplateRefusedError(f"refused by the chat template: {error}") from error

    def prepare(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages as the template wants them.

        Arguments of tool calls become objects, as servers hand them over; a system turn that the
        template refuses goes before the first user turn's text.

        Raises:
            TemplateRefusedError: a later system turn, where the template takes none.
        """
        prepared = [_with_call_objects(message) for message in messages]
        if any(message["role"] == "system" for message in prepared[1:]) and self.folds_system:
            raise TemplateRefusedError("refused: the chat template takes no system turn")
        is_folded = (
            len(prepared) > 1
            and prepared[0]["role"] == "system"
            and prepared[1]["role"] == "user"
            and self.folds_system
        )
        if is_folded:
            system, user, *rest = prepared
            content = f"{system['content']}\n\n{user['content']}"
            prepared = [{**user, "content": content}, *rest]
        return prepared

    @cached_property
    def folds_system(self) -> bool:
        """Whether the template refuses or leaves out a system turn; said once when it does."""
        turns = [
            {"role": "system", "content": PROBES[0]},
            {"role": "user", "content": PROBES[1]},
        ]
        try:
            text = self.render(turns, prompt=True)
        except TemplateRefusedError:
            text = ""
        if PROBES[0] in text:
            return False
        warn("the chat template takes no system turn; it is put before the first user turn's text")
        return True

    def check_user_turn(self) -> None:
        """Raise :class:`InputError` where the template leaves out what a user says.

        Templates of models that see pictures do, which take the parts of a turn alone.
        """
        try:
            text = self.render([{"role": "user", "content": PROBES[0]}], prompt=True)
        except TemplateRefusedError:
            return  # it may want other turns around this one
        if PROBES[0] not in text:
            raise InputError(
                "chat template: leaves out the text of a user turn; give one that renders it "
                "(data.chat_template)"
            )

    def say_refusal(self, error: TemplateRefusedError) -> None:
        """Say, once, why a prompt is refused; reports only count them."""
        if not self._has_said_refusal:
            self._has_said_refusal = True
            warn(f"a prompt is {error}; further ones are counted")

    @cached_property
    def answer_end(self) -> str:
        """The text that the template puts after an answer's content."""
        turns = [
            {"role": "user", "content": PROBES[0]},
            {"role": "assistant", "content": PROBES[1]},
        ]
        return self.render(turns, prompt=False).rpartition(PROBES[1])[2]

    @cached_property
    def user_end(self) -> str:
        """The text that the template puts directly after a user turn's content.

        What stands between the content and the generation prompt; where that is only white space,
        the generation prompt's text too.
        """
        turn = {"role": "user", "content": PROBES[0]}
        without, with_prompt = (
            self.render([turn], prompt=prompt).rpartition(PROBES[0])[2] for prompt in (False, True)
        )
        return without if without.strip() else with_prompt

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        prompt: bool,
        tools: Sequence[Any] | None = None,
    ) -> str:
        text = self._tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=None if tools is None else list(tools),
            chat_template=self.text,
            add_generation_prompt=prompt,
            tokenize=False,
            **self._variables,
        )
        assert isinstance(text, str)
        return text


def _own_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    template: str | dict[str, str] | None = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def _with_call_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    changed = []
    for call in calls:
        function = dict(call.get("function") or {})
        if isinstance(arguments := function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(arguments)
            except (ValueError, RecursionError):
                function["arguments"] = arguments
        changed.append({**call, "function": function} if function else dict(call))
    return {**message, "tool_calls": changed}
