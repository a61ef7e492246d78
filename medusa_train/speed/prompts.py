"""The prompts of a speed measurement: a file's, those that the heads' run held out, or a few."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from medusa_train.base_model.load import load_max_length, load_stop_ids, load_tokenizer
from medusa_train.console import log, warn
from medusa_train.data.chat import ChatTokenizer
from medusa_train.data.conversations import Conversation, is_dataset
from medusa_train.data.files import RawRow, iterate_lines, iterate_rows
from medusa_train.data.report import Tally
from medusa_train.data.sources import REFUSED
from medusa_train.data.template import TemplateRefusedError
from medusa_train.data.turns import RowRefusedError, Turns, read_turns
from medusa_train.distill.demo_prompts import demo_prompts_path
from medusa_train.errors import InputError
from medusa_train.heads.config import BaseIdentity
from medusa_train.recipe.load import load_recipe, read_chat_template
from medusa_train.run_dir import RunDir
from medusa_train.stages import Workspace

NO_ROOM = "no room for the answer within the base model's positions"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt.

    Attributes:
        ids: up to where the answer begins.
        category: as its file names it; None where it does not.
        question: what the user says last, or the text to go on from; None where no text is known.
    """

    ids: tuple[int, ...]
    category: str | None
    question: str | None = None


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of one measurement.

    Attributes:
        rows: at least one.
        what: where they are from, in words.
        num_dropped: rows that were left out; each was said.
    """

    rows: Sequence[Prompt]
    what: str
    num_dropped: int


def load_prompts(
    heads: Path,
    identity: BaseIdentity,
    *,
    file: Path | None,
    base_model: str | None,
    chat_template: str | None,
    max_new_tokens: int,
    num_prompts: int | None,
) -> Prompts:
    """Read and encode the first user turns; no weights are loaded.

    Args:
        heads: the heads directory.
        identity: of the base model that the heads name.
        file: prompts in any format that a generation reads; None for what the run of the heads
            held out, or else the prompts that come with the package.
        base_model: hub id or directory; None for the one that the heads name.
        chat_template: path or text; None for the tokenizer's own.
        max_new_tokens: of an answer; a prompt that leaves less room is dropped.
        num_prompts: the first so many; None for all.

    Raises:
        InputError: no such file, no usable prompt, or chats without a template.
    """
    name = base_model or identity.name_or_path
    # Another name may be a copy without the GGUF file.
    gguf_file, revision = (
        (identity.gguf_file, identity.revision) if base_model is None else (None, None)
    )
    tally = Tally()
    held_out = _held_out(heads, base_model) if file is None else None
    if held_out is not None:
        rows = first_prompts(held_out)
        what = "first user turns that the run held out"
    else:
        tokenizer = load_tokenizer(name, gguf_file=gguf_file, revision=revision)
        chat = ChatTokenizer(
            tokenizer,
            stop_ids=load_stop_ids(name, tokenizer=tokenizer, revision=revision),
            chat_template=read_chat_template(chat_template),
        )
        rows = file_prompts(file or demo_prompts_path(), chat, tally)
        what = "prompts that come with the package" if file is None else file.name
    return kept_prompts(
        rows,
        tally,
        what=what,
        where=str(file or what),
        max_length=load_max_length(name, revision=revision),
        max_new_tokens=max_new_tokens,
        num_prompts=num_prompts,
    )


def kept_prompts(
    rows: Iterator[tuple[str, Prompt]],
    tally: Tally,
    *,
    what: str,
    where: str,
    max_length: int | None,
    max_new_tokens: int,
    num_prompts: int | None,
) -> Prompts:
    """The prompts that leave room for an answer; the others are counted and said.

    Args:
        rows: each with where it is from.
        tally: counts them; has what was dropped while they were read.
        what: where they are from, in words.
        where: the same, for messages.
        max_length: positions of the base model; None: no limit.
        max_new_tokens: of an answer.
        num_prompts: the first so many; None for all.

    Raises:
        InputError: none is left.
    """
    kept: list[Prompt] = []
    for place, prompt in rows:
        if max_length is not None and len(prompt.ids) + max_new_tokens > max_length:
            tally.drop(NO_ROOM, place, detail=f"{len(prompt.ids)} tokens")
            continue
        tally.keep()
        kept.append(prompt)
        if len(kept) == num_prompts:
            break
    report = tally.report()
    for line in report.location_lines():
        warn(line)
    if not kept:
        why = report.summary() or "there are no rows"
        raise InputError(f"{where}: no prompt to measure with: {why}")
    log(f"prompts: {len(kept)}, {what}")
    return Prompts(kept, what, report.num_dropped)


def _held_out(heads: Path, base_model: str | None) -> Sequence[Conversation] | None:
    """The conversations that the run of the heads held out; None where there are none."""
    run = RunDir(heads.resolve().parent)
    if not run.recipe.exists():
        return None
    overrides = [f"run_dir={run.root}"]
    if base_model is not None:
        overrides.append(f"base_model.name_or_path={base_model}")
    workspace = Workspace(load_recipe(run.recipe, overrides))
    if not is_dataset(workspace.data_directory):
        return None
    return workspace.data.eval or None


def first_prompts(rows: Sequence[Conversation]) -> Iterator[tuple[str, Prompt]]:
    """What came before the first answer of each conversation, where there is something."""
    for row in rows:
        answers = sum(message["role"] == "assistant" for message in row.messages)
        # A row of a later answer of its conversation has earlier answers in its prompt.
        if row.messages and answers != len(row.assistant_spans):
            continue
        before = takewhile(lambda message: message["role"] != "assistant", row.messages)
        ids = row.input_ids[: row.assistant_spans[0][0]] if row.assistant_spans else ()
        if not ids:
            continue  # plain text is an answer from its first token
        yield f"row {row.id}", Prompt(ids, None, _last_text(before))


def file_prompts(path: Path, chat: ChatTokenizer, tally: Tally) -> Iterator[tuple[str, Prompt]]:
    """The first user turns of a file's rows; what cannot be used is dropped and counted.

    Args:
        path: in any format that a generation reads.
        chat: encodes them.
        tally: counts the rows that are dropped.

    Raises:
        InputError: no such file, or chats without a template.
    """
    is_lines = path.suffix.lower() == ".txt" and path.is_file()
    for raw in iterate_lines(path) if is_lines else iterate_rows(path):
        if raw.error is not None:
            tally.drop(raw.error, raw.location)
            continue
        try:
            turns = read_turns(raw.value, need_answer=False)
            ids = _ids(turns, raw, chat)
        except RowRefusedError as refused:
            tally.drop(refused.reason, raw.location, detail=refused.detail)
            continue
        except TemplateRefusedError as error:
            tally.drop(REFUSED, raw.location, detail=str(error.__cause__ or error))
            continue
        question = _last_text(turns.messages) if turns.text is None else turns.text
        yield raw.location, Prompt(ids, _category(raw), question)


def _ids(turns: Turns, raw: RawRow, chat: ChatTokenizer) -> tuple[int, ...]:
    if chat.has_template:
        asked = () if turns.text is None else ({"role": "user", "content": turns.text},)
        return tuple(chat.encode_prompt([*turns.messages, *asked], tools=turns.tools))
    if turns.text is None:
        raise InputError(
            f"{raw.location}: the row is a chat, and the base model's tokenizer has no chat "
            "template; give one with --chat-template, or plain text to be continued"
        )
    return chat.encode_text(turns.text).input_ids


def _last_text(messages: Iterable[Mapping[str, Any]]) -> str | None:
    """What the last of these messages says."""
    *_, content = [None, *(message.get("content") for message in messages)]
    return content if isinstance(content, str) and content else None


def _category(raw: RawRow) -> str | None:
    category: Any = raw.value.get("category") if isinstance(raw.value, Mapping) else None
    return category if isinstance(category, str) and category else None
