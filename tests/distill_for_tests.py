"""Generation in process, as tests call it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from medusa_train.base_model.load import BaseModel
from medusa_train.data.chat import ChatTokenizer
from medusa_train.distill.in_process_writer import InProcessWriter
from medusa_train.distill.run import Shard, run_distill
from medusa_train.distill.settings import DistillSettings
from medusa_train.distill.writer import Teacher


def make_chat(base: BaseModel, **options: Any) -> ChatTokenizer:
    """The base's tokenizer with its own template."""
    return ChatTokenizer(base.tokenizer, stop_ids=base.stop_ids, **options)


def distill(
    base: BaseModel,
    *,
    settings: DistillSettings,
    output: Path,
    max_rows: int = 4,
    unit_size: int = 8,
    teacher: Teacher | None = None,
    shard: Shard | None = None,
    **template: Any,
) -> dict[str, Any]:
    """Generate with a base model in process, in small batches and blocks."""
    writer = InProcessWriter(
        lambda: base.model,
        dtype=base.model.dtype,
        vocab_size=base.num_tokens,
        max_rows=max_rows,
        unit_size=unit_size,
        teacher=teacher,
    )
    return run_distill(
        writer,
        make_chat(base, **template),
        base_model=base.name_or_path,
        base_fingerprint=base.fingerprint,
        settings=settings,
        output=output,
        shard=shard,
    )
