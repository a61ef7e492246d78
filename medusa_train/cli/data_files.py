"""``medusa-distill inspect`` and ``convert``: look at data, and bring it in and out."""

from __future__ import annotations

import enum
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from medusa_train.cli.app import Json
from medusa_train.errors import InputError, InputErrors

if TYPE_CHECKING:
    from medusa_train.data.chat import ChatTokenizer
    from medusa_train.data.conversations import Conversation
    from medusa_train.data.convert import Form as PlainForm
    from medusa_train.data.report import Report


class Form(enum.StrEnum):
    """What ``convert`` writes."""

    DATASET = "dataset"
    SHAREGPT = "sharegpt"
    MESSAGES = "messages"
    TEXT = "text"
    PARQUET = "parquet"


_FORM_OF_SUFFIX = {
    "": Form.DATASET,
    ".json": Form.MESSAGES,
    ".jsonl": Form.MESSAGES,
    ".parquet": Form.PARQUET,
}

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
    as_json: Json = False,
) -> None:
    """Say what is in data: rows and their fate, what is supervised, and the mask itself."""
    from medusa_train.cli.data_view import print_counts, print_fates, print_origin, print_samples
    from medusa_train.data.conversations import is_dataset
    from medusa_train.data.inspect import check_mask, inspect_rows
    from medusa_train.data.sources import load_conversations_file

    facts = _facts(data)
    chat = _chat(
        base_model or facts.get("base_model"),
        gguf_file=gguf_file,
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs,
        data=data,
    )
    if is_dataset(data):
        rows, report = _dataset(data, max_length=max_length, strict=strict)
    else:
        rows, report = load_conversations_file(
            data, chat, strict=strict, max_length=max_length, allow_empty=True
        )
    inspection = inspect_rows(rows, chat)
    if as_json:
        value = {"data": str(data), "rows": report.as_json(), "manifest": facts or None}
        typer.echo(json.dumps({**value, **inspection.as_json()}, ensure_ascii=False))
    else:
        if facts:
            print_origin(facts)
        print_fates(report)
        print_counts(inspection, chat)
        print_samples(rows[:num_samples], chat)
    check_mask(inspection, rows, where=str(data))


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
) -> None:
    """Turn ShareGPT, messages, text or Parquet files into a data set, or into each other."""
    form = to or _FORM_OF_SUFFIX.get(out.suffix.lower())
    if form is None:
        raise InputError(f"{out}: unknown kind of file {out.suffix!r}; say what it is with --to")
    if out.exists():
        raise InputError(f"{out}: is already there; remove it, or give another name")
    facts = _facts(source)
    name = base_model or facts.get("base_model")
    options: dict[str, Any] = {
        "gguf_file": gguf_file,
        "chat_template": chat_template,
        "chat_template_kwargs": chat_template_kwargs,
        "data": source,
    }
    report: Report | None
    if form is Form.DATASET:
        if facts:
            raise InputError(f"{source}: is a data set already; copy the directory")
        report = _to_dataset(
            source,
            out,
            _chat(name, **options),
            name=name or "",
            gguf_file=gguf_file,
            max_length=max_length,
            strict=strict,
        )
    else:
        if max_length is not None:
            raise InputError("--max-length: only a data set has token ids to cut")
        report = _to_file(source, out, form=form, name=name, options=options, strict=strict)
    if report is not None:
        from medusa_train.cli.data_view import print_fates

        print_fates(report)


def _to_dataset(
    source: Path,
    out: Path,
    chat: ChatTokenizer,
    *,
    name: str,
    gguf_file: str | None,
    max_length: int | None,
    strict: bool,
) -> Report:
    from medusa_train.base_model.fingerprint import base_fingerprint
    from medusa_train.data.conversations import write_dataset
    from medusa_train.data.convert import import_manifest
    from medusa_train.data.sources import load_conversations_file
    from medusa_train.run_dir import atomic_directory

    rows, report = load_conversations_file(source, chat, strict=strict, max_length=max_length)
    manifest = {
        "base_model": name,
        "base_fingerprint": base_fingerprint(name, gguf_file=gguf_file),
        "source": source.name,
        **import_manifest(rows, report, chat),
    }
    with atomic_directory(out) as temporary:
        write_dataset(temporary, rows, manifest=manifest)
    return report


def _to_file(
    source: Path,
    out: Path,
    *,
    form: Form,
    name: str | None,
    options: dict[str, Any],
    strict: bool,
) -> Report | None:
    from medusa_train.data.conversations import is_dataset, read_conversations
    from medusa_train.data.convert import dataset_rows, file_rows, write_plain
    from medusa_train.data.report import Tally

    if is_dataset(source):
        rows = read_conversations(source)
        needs_tokenizer = any(not row.messages for row in rows)
        chat = _chat(name, **options) if needs_tokenizer else None
        write_plain(out, dataset_rows(rows, chat), form=cast("PlainForm", form.value))
        return None
    tally = Tally()
    if strict:
        for _ in file_rows(source, tally):
            pass
        tally.refuse_changes()
        tally = Tally()
    write_plain(out, file_rows(source, tally), form=cast("PlainForm", form.value))
    return tally.report()


def _facts(data: Path) -> dict[str, Any]:
    from medusa_train.data.conversations import is_dataset, read_manifest

    return read_manifest(data) if is_dataset(data) else {}


def _dataset(
    data: Path, *, max_length: int | None, strict: bool
) -> tuple[list[Conversation], Report]:
    from medusa_train.data.conversations import read_conversations
    from medusa_train.data.sources import truncate_rows

    rows, report = truncate_rows(
        read_conversations(data), max_length=max_length or sys.maxsize, directory=data
    )
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
    except json.JSONDecodeError:
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
