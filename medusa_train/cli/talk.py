"""The terminal's side of ``medusa-eval generate`` and ``chat``."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from typing import Any

import typer

from medusa_train.errors import InputError

EXIT = "/exit"
HELP = "/help"
COMMANDS = {
    EXIT: "leave; the end of the input does too (Ctrl-D)",
    HELP: "list the commands",
}
_NO_COMMAND = "Ctrl-C ends an answer; a line that begins with a space goes to the model as it is"


def generate(
    model: Any, prompt: str, *, options: Any, raw: bool, chat_template: str | None, as_json: bool
) -> None:
    """Stream one answer to stdout and say on stderr what it took."""
    from medusa_train.answers import prompt_ids, write_answer

    if not _is_text(prompt):
        raise InputError("PROMPT: is not valid UTF-8; convert it first")
    if raw:
        ids = model.tokenizer(prompt)["input_ids"]
    else:
        messages = [{"role": "user", "content": prompt}]
        ids = prompt_ids(model, messages, chat_template=chat_template)
    answer = write_answer(
        model, ids, options=options, streamer=None if as_json else _streamer(model)
    )
    if as_json:
        typer.echo(json.dumps(answer.facts()))
    else:
        typer.echo(answer.summary(), err=True)


def chat(
    model: Any, *, options: Any, chat_template: str | None, system: str | None, as_json: bool
) -> None:
    """Answer line after line until ``/exit`` or the end of the input; Ctrl-C ends an answer.

    A line that begins with a slash and a word is a command and no message.
    """
    from medusa_train.answers import prompt_ids, write_answer
    from medusa_train.interrupts import interruptible

    if system is not None and not _is_text(system):
        raise InputError("--system: is not valid UTF-8; convert it first")
    messages = [] if system is None else [{"role": "system", "content": system}]
    # A base model without a template is refused before anything is typed.
    prompt_ids(model, [*messages, {"role": "user", "content": "?"}], chat_template=chat_template)
    typer.echo(f"{EXIT} leaves, {HELP} lists the commands; Ctrl-C ends an answer", err=True)
    while (line := _read_line()) is not None:
        if not line.strip():
            continue
        if not _is_text(line):
            typer.echo("that line is not valid UTF-8", err=True)
            continue
        if _is_command(line):
            typer.echo(_about_commands(line.split()[0]), err=True)
            continue
        messages.append({"role": "user", "content": line.strip()})
        with interruptible("ending the answer") as interrupt:
            answer = write_answer(
                model,
                prompt_ids(model, messages, chat_template=chat_template),
                options=options,
                streamer=None if as_json else _streamer(model),
                is_interrupted=partial(getattr, interrupt, "is_asked"),
            )
        messages.append({"role": "assistant", "content": answer.text})
        if as_json:
            typer.echo(json.dumps(answer.facts()))
        else:
            typer.echo(answer.summary(), err=True)


def _is_command(line: str) -> bool:
    """Whether it begins as a command does; a path such as /etc/hosts does not."""
    return re.match(r"/[A-Za-z]+(\s|$)", line) is not None


def _about_commands(name: str) -> str:
    if name != HELP:
        return f"{name}: unknown command; {HELP} lists the commands"
    return "\n".join([*(f"{name}  {text}" for name, text in COMMANDS.items()), _NO_COMMAND])


def _is_text(text: str) -> bool:
    """Whether it has no bytes that Python could not read as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _streamer(model: Any) -> Any:
    from transformers import TextStreamer

    return TextStreamer(model.tokenizer, skip_prompt=True, skip_special_tokens=True)


def _read_line() -> str | None:
    """The user's next line; None at the end. Ctrl-C drops what was typed."""
    while True:
        try:
            if sys.stdin.isatty() and sys.stdout.isatty():
                line = input("> ")
            else:
                line = sys.stdin.readline()
                if not line:
                    return None
        except EOFError:
            return None
        except KeyboardInterrupt:
            typer.echo(err=True)
            continue
        return None if line.rstrip() == EXIT else line
