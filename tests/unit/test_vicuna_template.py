"""The Vicuna template gives the strings of the Vicuna v1.1 conversation format."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE = Path(__file__).parents[2] / "recipes" / "templates" / "vicuna.jinja"
SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)


def render(*turns: tuple[str, str], prompt: bool = False) -> str:
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    # The environment that transformers renders chat templates in.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        messages=[{"role": role, "content": content} for role, content in turns],
        add_generation_prompt=prompt,
        bos_token="<s>",
        eos_token="</s>",
    )


def test_a_conversation():
    turns = [("user", "Hi!"), ("assistant", "Hello."), ("user", "Why?"), ("assistant", "Because.")]
    text = render(*turns)
    assert text == (
        f"<s>{SYSTEM} USER: Hi! ASSISTANT: Hello.</s>USER: Why? ASSISTANT: Because.</s>"
    )
    assert text.startswith(render(*turns[:1], prompt=True))
    assert text.startswith(render(*turns[:3], prompt=True))


def test_a_prompt_and_a_system_message():
    assert render(("user", "Hi!"), prompt=True) == f"<s>{SYSTEM} USER: Hi! ASSISTANT:"
    turns = [("system", "Be brief."), ("user", "Hi!")]
    assert render(*turns, prompt=True) == "<s>Be brief. USER: Hi! ASSISTANT:"


def test_what_the_format_cannot_say():
    with pytest.raises(jinja2.TemplateError, match="unknown role tool"):
        render(("user", "a"), ("tool", "b"))
    with pytest.raises(jinja2.TemplateError, match="can only be the first"):
        render(("user", "a"), ("system", "b"))
