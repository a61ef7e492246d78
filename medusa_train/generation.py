"""From a recipe's generation to a data set: who writes, and with which settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from medusa_train.base_model.fingerprint import base_fingerprint
from medusa_train.base_model.load import (
    BaseModel,
    load_base_model,
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
        base=None,
        template=loaded.chat_template(),
        kwargs=config.data.chat_template_kwargs,
        output=output,
        shard=None if shard is None else Shard(*shard),
    )


def generate(
    base_model: BaseModelSection,
    section: DistillSection,
    *,
    base: BaseModel | None,
    template: str | None,
    kwargs: Mapping[str, Any],
    output: Path,
    shard: Shard | None = None,
) -> dict[str, Any]:
    """Generate in process with ``base`` (loaded if it is None), or with servers, without it."""
    shared: dict[str, Any] = {"settings": _settings(section), "output": output, "shard": shard}
    if section.server is None:
        base = load_section(base_model) if base is None else base
        writer = InProcessWriter(
            base.model,
            vocab_size=base.num_tokens,
            max_rows=section.batch_size,
            unit_size=section.block_size,
            teacher=_teacher(section),
        )
        return run_distill(
            writer,
            make_chat(base, template, kwargs),
            base_model=base.name_or_path,
            base_fingerprint=base.fingerprint,
            **shared,
        )
    place = {"gguf_file": base_model.gguf_file, "revision": base_model.revision}
    name = base_model.name_or_path
    tokenizer = load_tokenizer(name, trust_remote_code=base_model.trust_remote_code, **place)
    chat = ChatTokenizer(
        tokenizer,
        stop_ids=load_stop_ids(name, tokenizer=tokenizer, revision=base_model.revision),
        chat_template=template,
        chat_template_kwargs=kwargs,
    )
    options = section.server.model_dump(exclude={"max_failed"})
    max_length = load_max_length(name, revision=base_model.revision)
    with ServerWriter(
        chat=chat, teacher=_teacher(section), max_length=max_length, **options
    ) as servers:
        return run_distill(
            servers,
            chat,
            base_model=name,
            base_fingerprint=base_fingerprint(name, **place),
            max_failed=section.server.max_failed,
            **shared,
        )


def load_section(section: BaseModelSection, *, zero3: Mapping[str, Any] | None = None) -> BaseModel:
    """The base model that a recipe names, loaded and checked; with ``zero3``, sharded."""
    log(f"loading {section.name_or_path}")
    return load_base_model(**section.model_dump(), zero3=zero3)


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
