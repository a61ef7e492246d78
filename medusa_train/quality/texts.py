"""The text of a measurement, and the prompts that both models answer; no weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from medusa_train.base_model.load import load_max_length, load_stop_ids, load_tokenizer
from medusa_train.data.chat import ChatTokenizer
from medusa_train.data.conversations import Conversation
from medusa_train.data.given import given_conversations
from medusa_train.data.report import Tally
from medusa_train.errors import InputError
from medusa_train.quality.options import QualityOptions
from medusa_train.quality.subject import Subject
from medusa_train.speed.prompts import Prompt, file_prompts, first_prompts, kept_prompts


@dataclass(frozen=True, slots=True)
class Texts:
    """What is measured on.

    Attributes:
        rows: the conversations; None: the original's greedy answers to the prompts.
        prompts: at least one where ``rows`` is None.
        what: the text, in words.
    """

    rows: Sequence[Conversation] | None
    prompts: Sequence[Prompt]
    what: str


def load_texts(subject: Subject, options: QualityOptions) -> Texts:
    """Read the conversations or the prompts that ``options`` name, or what the run held out.

    Raises:
        InputError: both are named, neither is there, or there is nothing to measure on.
    """
    if options.data is not None and options.prompts is not None:
        raise InputError("--data and --prompts: give one of them, not both")
    name, revision = subject.loading["name_or_path"], subject.loading["revision"]
    max_length = load_max_length(name, revision=revision)
    if options.prompts is not None:
        tally = Tally()
        rows = file_prompts(options.prompts, _chat(subject), tally)
        kept = _kept(rows, tally, options, max_length=max_length, where=str(options.prompts))
        return Texts(None, kept, f"greedy answers of the original to {options.prompts.name}")
    conversations = _conversations(subject, options, max_length=max_length)
    where = str(options.data or (subject.workspace and subject.workspace.data_directory))
    if not any(row.num_supervised for row in conversations):
        raise InputError(f"{where}: no conversation with an answer to measure on")
    what = "held out by the run" if options.data is None else str(options.data)
    return Texts(conversations, _asked(conversations, options, max_length), what)


def _conversations(
    subject: Subject, options: QualityOptions, *, max_length: int | None
) -> Sequence[Conversation]:
    if options.data is not None:
        chat = _chat(subject)
        return given_conversations(
            options.data,
            chat=lambda: chat,
            num_tokens=len(chat.tokenizer),
            max_length=max_length,
        )
    if subject.workspace is None:
        raise InputError(
            "there is no run that has held out conversations; give some with --data, or prompts "
            "with --prompts"
        )
    return subject.workspace.data.eval


def _asked(
    rows: Sequence[Conversation], options: QualityOptions, max_length: int | None
) -> Sequence[Prompt]:
    """First user turns of the conversations that leave room for an answer, if there are any."""
    room = None if max_length is None else max_length - options.max_new_tokens
    prompts = [p for _, p in first_prompts(rows) if room is None or len(p.ids) <= room]
    return prompts[: options.num_answers]


def _kept(
    rows: Iterator[tuple[str, Prompt]],
    tally: Tally,
    options: QualityOptions,
    *,
    max_length: int | None,
    where: str,
) -> Sequence[Prompt]:
    return kept_prompts(
        rows,
        tally,
        what=where,
        where=where,
        max_length=max_length,
        max_new_tokens=options.max_new_tokens,
        num_prompts=options.num_prompts,
    ).rows


def _chat(subject: Subject) -> ChatTokenizer:
    names = ("gguf_file", "revision", "trust_remote_code")
    options: dict[str, Any] = {name: subject.loading[name] for name in names}
    name = subject.loading["name_or_path"]
    tokenizer = load_tokenizer(name, **options)
    return ChatTokenizer(
        tokenizer,
        stop_ids=load_stop_ids(name, tokenizer=tokenizer, revision=options["revision"]),
        chat_template=subject.chat_template,
        chat_template_kwargs=subject.chat_template_kwargs,
    )
