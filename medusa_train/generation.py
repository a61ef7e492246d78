"""From a recipe's generation to a data set: who writes, and with which settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel

from medusa_train.base_model.fingerprint import base_fingerprint
from medusa_train.base_model.load import (
    BaseModel,
    load_base_model,
    load_dtype,
    load_max_length,
    load_stop_ids,
    load_tokenizer,
)
from medusa_train.console import log
from medusa_train.data.chat import ChatTokenizer
from medusa_train.distill.in_process_writer import InProcessWriter
from medusa_train.distill.run import Shard, run_distill
from medusa_train.distill.server import ServerWriter
from medusa_train.distill.settings import DistillSettings, PromptSource
from medusa_train.distill.writer import Teacher
from medusa_train.recipe.load import LoadedDistillConfig
from medusa_train.recipe.schema import BaseModelSection, DistillSection
from medusa_train.run_dir import check_writable

# Keys of a recipe's data.distill that are the writer's and not the generation's.
_WRITERS_KEYS = frozenset(
    {"batch_size", "block_size", "teacher_top_n", "teacher_samples", "server"}
)


def make_chat(base: BaseModel, template: str | None, kwargs: Mapping[str, Any]) -> ChatTokenizer:
    """The base's tokenizer with a chat template; None is its own."""
    return ChatTokenizer(
        base.tokenizer,
        stop_ids=base.stop_ids,
        chat_template=template,
        chat_template_kwargs=kwargs,
    )


def generate_dataset(
    loaded: LoadedDistillConfig, *, output: Path, shard: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Generate a data set apart from any run: what ``medusa-distill generate`` does.

    Args:
        loaded: what to generate.
        output: directory of the data set.
        shard: (i, n): do part i of n.

    Returns:
        The data set's manifest; of a shard, what it is part of.
    """
    config = loaded.config
    check_writable(output)
    return generate(
        config.base_model,
        config.data.distill,
        load=lambda: load_section(config.base_model),
        template=loaded.chat_template(),
        kwargs=config.data.chat_template_kwargs,
        output=output,
        shard=None if shard is None else Shard(*shard),
    )


def generate(
    base_model: BaseModelSection,
    section: DistillSection,
    *,
    load: Callable[[], BaseModel],
    template: str | None,
    kwargs: Mapping[str, Any],
    output: Path,
    shard: Shard | None = None,
) -> dict[str, Any]:
    """Generate in process, or with servers.

    Args:
        base_model: the recipe's section.
        section: what to generate.
        load: gives the base model; called when there is something to write with it, so that what is
            wrong with prompts, the output or a shard is said before.
        template: text of the chat template; None is the tokenizer's own.
        kwargs: further variables of the template.
        output: directory of the data set.
        shard: do a part.

    Returns:
        The data set's manifest; of a shard, what it is part of.
    """
    shared: dict[str, Any] = {"settings": _settings(section), "output": output, "shard": shard}
    if section.server is None:
        writer, chat = _in_process(base_model, section, load=load, template=template, kwargs=kwargs)
        return run_distill(
            writer,
            chat,
            base_model=base_model.name_or_path,
            base_fingerprint=_fingerprint(base_model),
            **shared,
        )
    chat = _chat_without_weights(base_model, template, kwargs)
    name = base_model.name_or_path
    options = section.server.model_dump(exclude={"max_failed"})
    max_length = load_max_length(name, revision=base_model.revision)
    with ServerWriter(
        chat=chat, teacher=_teacher(section), max_length=max_length, **options
    ) as servers:
        return run_distill(
            servers,
            chat,
            base_model=name,
            base_fingerprint=_fingerprint(base_model),
            max_failed=section.server.max_failed,
            **shared,
        )


def _in_process(
    section: BaseModelSection,
    distill: DistillSection,
    *,
    load: Callable[[], BaseModel],
    template: str | None,
    kwargs: Mapping[str, Any],
) -> tuple[InProcessWriter, ChatTokenizer]:
    dtype = None
    if section.gguf_file is None:
        dtype = load_dtype(section.name_or_path, dtype=section.dtype, revision=section.revision)
    if dtype is None:
        # Only the weights say of which type they are.
        base = load()
        chat, dtype = make_chat(base, template, kwargs), base.model.dtype
    else:
        chat = _chat_without_weights(section, template, kwargs)

    def load_model() -> PreTrainedModel:
        base = load()
        assert frozenset(base.stop_ids) == chat.stop_ids, "the files say where answers end"
        assert base.model.dtype == dtype, "the config says of which type the weights are"
        return base.model

    writer = InProcessWriter(
        load_model,
        dtype=dtype,
        vocab_size=len(chat.tokenizer),
        max_rows=distill.batch_size,
        unit_size=distill.block_size,
        teacher=_teacher(distill),
    )
    return writer, chat


def _chat_without_weights(
    section: BaseModelSection, template: str | None, kwargs: Mapping[str, Any]
) -> ChatTokenizer:
    name, revision = section.name_or_path, section.revision
    tokenizer = load_tokenizer(
        name,
        gguf_file=section.gguf_file,
        revision=revision,
        trust_remote_code=section.trust_remote_code,
    )
    return ChatTokenizer(
        tokenizer,
        stop_ids=load_stop_ids(name, tokenizer=tokenizer, revision=revision),
        chat_template=template,
        chat_template_kwargs=kwargs,
    )


def _fingerprint(section: BaseModelSection) -> str:
    return base_fingerprint(
        section.name_or_path, gguf_file=section.gguf_file, revision=section.revision
    )


def load_section(
    section: BaseModelSection, *, zero3: Mapping[str, Any] | None = None, runs_alone: bool = True
) -> BaseModel:
    """The base model that a recipe names, loaded and checked; with ``zero3``, sharded."""
    log(f"loading {section.name_or_path}")
    return load_base_model(**section.model_dump(), zero3=zero3, runs_alone=runs_alone)


def _settings(section: DistillSection) -> DistillSettings:
    """The recipe's section without what the writer alone needs."""
    sources = tuple(PromptSource(**source.model_dump()) for source in section.sources)
    if not sources:
        kind: Literal["model", "file"] = "model" if section.prompts is None else "file"
        sources = (PromptSource(kind, section.prompts),)
    values = section.model_dump(exclude={"prompts", *_WRITERS_KEYS})
    languages = tuple(section.languages)
    return DistillSettings(**{**values, "sources": sources, "languages": languages})


def _teacher(section: DistillSection) -> Teacher | None:
    if section.teacher_top_n is not None:
        return Teacher("top", section.teacher_top_n)
    return None if section.teacher_samples is None else Teacher("samples", section.teacher_samples)
