"""``medusa-distill inspect`` and ``convert``: look at data, and bring it in and out."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from medusa_train.cli.app import Json
from medusa_train.cli.data_paths import Form, check_output, form_of, read_facts
from medusa_train.errors import InputError, InputErrors

if TYPE_CHECKING:
    from medusa_train.data.chat import ChatTokenizer
    from medusa_train.data.conversations import Conversation
    from medusa_train.data.convert import Form as PlainForm
    from medusa_train.data.report import Report


BaseModelOption = Annotated[
    str | None,
    typer.Option(
        "--base-model",
        help="Hub id or directory whose tokenizer is used. Default: the one that made the data.",
    ),
]
GgufOption = Annotated[
    str | None, typer.Option("--gguf-file", help="Name of the GGUF file in the base model.")
]
TemplateOption = Annotated[
    str | None, typer.Option("--chat-template", help="Jinja template or its path.")
]
KwargsOption = Annotated[
    str, typer.Option("--chat-template-kwargs", help="Variables of the template, as JSON.")
]
MaxLengthOption = Annotated[
    int | None, typer.Option("--max-length", min=1, help="Cut rows to this many tokens.")
]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="Refuse files with rows to repair or to drop.")
]


def inspect(
    data: Annotated[
        Path, typer.Argument(help="A data set directory, or a file that others wrote.")
    ],
    base_model: BaseModelOption = None,
    gguf_file: GgufOption = None,
    chat_template: TemplateOption = None,
    chat_template_kwargs: KwargsOption = "{}",
    max_length: MaxLengthOption = None,
    strict: StrictOption = False,
    num_samples: Annotated[
        int, typer.Option("--num-samples", min=0, help="Rows to show decoded.")
    ] = 2,
    report_directory: Annotated[
        Path | None,
        typer.Option("--report", metavar="DIR", help="Write inspect.html and its pictures here."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what is in data: rows and their fate, what is supervised, and the mask itself."""
    from medusa_train.cli.data_view import print_counts, print_fates, print_origin, print_samples
    from medusa_train.data.inspect import check_mask, decoded_segments, end_of_turn, inspect_rows
    from medusa_train.data.sources import load_conversations_file

    facts = read_facts(data)
    name = base_model or facts.get("base_model")
    chat = _chat(
        name,
        gguf_file=gguf_file or facts.get("gguf_file"),
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs,
        data=data,
    )
    if facts:
        rows, report = _dataset(data, chat, facts=facts, max_length=max_length, strict=strict)
    else:
        rows, report = load_conversations_file(
            data, chat, strict=strict, max_length=max_length, allow_empty=True
        )
    inspection = inspect_rows(rows, chat)
    end = end_of_turn(inspection, chat)
    samples = [(f"{r.source} {r.id}", decoded_segments(r, chat)) for r in rows[:num_samples]]
    if report_directory is not None:
        from medusa_train.data.inspect_page import write_inspection

        write_inspection(
            report_directory,
            name=data.name or str(data),
            report=report,
            inspection=inspection,
            end_of_turn=end,
            manifest=facts,
            samples=samples,
            facts={"data": str(data), "tokenizer of": str(name)},
        )
    if as_json:
        value = {"data": str(data), "rows": report.as_json(), "manifest": facts or None}
        typer.echo(json.dumps({**value, **inspection.as_json()}, ensure_ascii=False))
    else:
        if facts:
            print_origin(facts)
        print_fates(report)
        print_counts(inspection, end_of_turn=end)
        print_samples(samples)
    check_mask(inspection, rows, where=str(data), why=report.summary())


def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A data set directory, or a file.")],
    out: Annotated[
        Path,
        typer.Argument(help="A data set directory to make, or a .jsonl, .json or .parquet file."),
    ],
    to: Annotated[
        Form | None, typer.Option(help="What to write. Default: what the name OUT says.")
    ] = None,
    base_model: BaseModelOption = None,
    gguf_file: GgufOption = None,
    chat_template: TemplateOption = None,
    chat_template_kwargs: KwargsOption = "{}",
    max_length: MaxLengthOption = None,
    strict: StrictOption = False,
    as_json: Json = False,
) -> None:
    """Turn ShareGPT, messages, Alpaca, text or Parquet files into a data set, or into each other.

    A data set becomes a file of any of these forms again. Nothing that exists is replaced.
    """
    form = form_of(out, to)
    facts = read_facts(source)
    check_output(out, source)
    options: dict[str, Any] = {
        "gguf_file": gguf_file or facts.get("gguf_file"),
        "chat_template": chat_template,
        "chat_template_kwargs": chat_template_kwargs,
        "data": source,
    }
    name = base_model or facts.get("base_model")
    report: Report | None
    if form is Form.DATASET:
        if facts:
            raise InputError(f"{source}: is a data set already; copy the directory")
        chat = _chat(name, **options)
        count, report = _to_dataset(
            source,
            out,
            chat,
            name=name or "",
            gguf_file=gguf_file,
            max_length=max_length,
            strict=strict,
        )
    else:
        if max_length is not None:
            raise InputError("--max-length: only a data set has token ids to cut")
        plain = cast("PlainForm", form.value)
        if facts:
            count, report = _dataset_to_file(source, out, form=plain, name=name, options=options)
        else:
            count, report = _file_to_file(source, out, form=plain, strict=strict)
    if as_json:
        rows = None if report is None else report.as_json()
        value = {"in": str(source), "out": str(out), "form": form.value, "num_rows": count}
        typer.echo(json.dumps({**value, "rows": rows}, ensure_ascii=False))
        return
    if report is not None:
        from medusa_train.cli.data_view import print_fates

        print_fates(report)
    typer.echo(f"{out}: {count} {'row' if count == 1 else 'rows'} ({form.value})")


def _to_dataset(
    source: Path,
    out: Path,
    chat: ChatTokenizer,
    *,
    name: str,
    gguf_file: str | None,
    max_length: int | None,
    strict: bool,
) -> tuple[int, Report]:
    from medusa_train.base_model.fingerprint import base_fingerprint
    from medusa_train.data.conversations import write_dataset
    from medusa_train.data.convert import import_manifest
    from medusa_train.data.sources import load_conversations_file
    from medusa_train.run_dir import atomic_directory

    rows, report = load_conversations_file(source, chat, strict=strict, max_length=max_length)
    manifest = {
        "base_model": name,
        "gguf_file": gguf_file,
        "base_fingerprint": base_fingerprint(name, gguf_file=gguf_file),
        "source": source.name,
        **import_manifest(rows, report, chat),
    }
    with atomic_directory(out) as temporary:
        count = write_dataset(temporary, rows, manifest=manifest)
    return count, report


def _dataset_to_file(
    source: Path, out: Path, *, form: PlainForm, name: str | None, options: dict[str, Any]
) -> tuple[int, None]:
    from medusa_train.data.conversations import read_conversations
    from medusa_train.data.convert import dataset_rows, write_plain

    rows = read_conversations(source)
    needs_tokenizer = any(not row.messages for row in rows)
    chat = _chat(name, **options) if needs_tokenizer else None
    count = write_plain(out, dataset_rows(rows, chat), form=form, source=source)
    return count, None


def _file_to_file(source: Path, out: Path, *, form: PlainForm, strict: bool) -> tuple[int, Report]:
    from medusa_train.data.convert import file_rows, write_plain
    from medusa_train.data.report import Tally

    tally = Tally()
    if strict:
        for _ in file_rows(source, tally):
            pass
        tally.refuse_changes()
        tally = Tally()
    rows = file_rows(source, tally)
    count = write_plain(out, rows, form=form, source=source, why=lambda: tally.report().summary())
    return count, tally.report()


def _dataset(
    data: Path,
    chat: ChatTokenizer,
    *,
    facts: Mapping[str, Any],
    max_length: int | None,
    strict: bool,
) -> tuple[list[Conversation], Report]:
    from medusa_train.console import warn
    from medusa_train.data.conversations import (
        CONVERSATIONS_FILE,
        check_token_ids,
        read_conversations,
    )
    from medusa_train.data.sources import truncate_rows

    if facts.get("tokenizer_hash") not in {None, chat.tokenizer_hash}:
        warn(f"{data}: made with another tokenizer; what is decoded may not be what was written")
    all_rows = read_conversations(data)
    check_token_ids(all_rows, vocab_size=chat.vocab_size, path=data / CONVERSATIONS_FILE)
    rows, report = truncate_rows(all_rows, max_length=max_length or sys.maxsize, directory=data)
    if strict and report.num_dropped:
        raise InputErrors(report.location_lines())
    return rows, report


def _chat(
    name: str | None,
    *,
    gguf_file: str | None,
    chat_template: str | None,
    chat_template_kwargs: str,
    data: Path,
) -> ChatTokenizer:
    if name is None:
        raise InputError(f"{data}: give the base model whose tokenizer is used with --base-model")
    try:
        variables = json.loads(chat_template_kwargs)
    except (ValueError, RecursionError):
        variables = None
    if not isinstance(variables, dict):
        raise InputError(
            f"--chat-template-kwargs: must be a JSON object, got {chat_template_kwargs!r}"
        )
    from medusa_train.base_model.load import load_stop_ids, load_tokenizer
    from medusa_train.data.chat import ChatTokenizer
    from medusa_train.recipe.load import read_chat_template

    tokenizer = load_tokenizer(name, gguf_file=gguf_file)
    return ChatTokenizer(
        tokenizer,
        stop_ids=load_stop_ids(name, tokenizer=tokenizer),
        chat_template=read_chat_template(chat_template),
        chat_template_kwargs=variables,
    )
