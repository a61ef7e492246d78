"""``medusa-train verify``: a directory read as an engine does, beside the heads and the base."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from medusa_train.base_facts import BaseFacts, check_shape, read_facts, read_lm_head
from medusa_train.errors import InputError
from medusa_train.export.files import read_config, require_directory
from medusa_train.export.loaders.view import Request
from medusa_train.export.source import HeadTensors, folded, read_heads
from medusa_train.export.verify import Target, Verification, verify
from medusa_train.export_options import parse_version
from medusa_train.heads.config import BaseIdentity


def verify_directory(
    target: Target,
    directory: Path,
    *,
    heads: Path | None = None,
    base_model: str | None = None,
    num_heads: int | None = None,
    num_speculative_tokens: int | None = None,
    min_version: str | None = None,
    trust_remote_code: bool = False,
) -> Verification:
    """What ``medusa-train verify`` does.

    Args:
        target: the engine.
        directory: what it would read.
        heads: a heads directory to compare with.
        base_model: hub id or directory of the base; None for the one that the heads name, where
            it is a directory that is there.
        num_heads: compare with the first so many heads.
        num_speculative_tokens: length of the chain that will be asked for.
        min_version: of vLLM.
        trust_remote_code: run code that comes with the base; none of ``directory`` is run.

    Raises:
        InputError: the directory is not there or not safe to read; the heads cannot be read.
    """
    require_directory(directory)
    if num_heads is not None and heads is None:
        raise InputError("--num-heads: is for comparing; give --heads HEADS with it")
    source = None if heads is None else read_heads(heads, num_heads=num_heads)
    facts = _facts(source, base_model, trust_remote_code=trust_remote_code)
    if source is not None and heads is not None:
        source = _as_exported(source, directory, target, facts, where=heads)
    request = Request(
        directory,
        str(directory),
        num_speculative_tokens=num_speculative_tokens,
        version=None if min_version is None else parse_version(min_version),
        base_config=None if facts is None else facts.config,
    )
    return verify(target, request, heads=source)


def _facts(
    source: HeadTensors | None, base_model: str | None, *, trust_remote_code: bool
) -> BaseFacts | None:
    """The base, where it is named and at hand; nothing is fetched that was not asked for."""
    if base_model is not None:
        identity = BaseIdentity(base_model, "")
        return read_facts(identity, base_model=base_model, trust_remote_code=trust_remote_code)
    # A base that was trained with its heads is another than the one by that name.
    if source is not None and source.base.trained is None and _is_here(source):
        return read_facts(source.base, trust_remote_code=trust_remote_code)
    return None


def _is_here(source: HeadTensors) -> bool:
    return Path(source.base.name_or_path).is_dir()


def _as_exported(
    source: HeadTensors, directory: Path, target: Target, facts: BaseFacts | None, *, where: Path
) -> HeadTensors:
    """The heads as an export writes them: with the base's logit scale, and its ``lm_head``."""
    scale = 1.0
    if (directory / "config.json").exists():
        claimed = read_config(directory).get("folded_logit_scale", 1.0)
        scale = float(claimed) if isinstance(claimed, int | float) else 1.0
    if facts is not None:
        check_shape(facts, source.config, where=where)
        if target != "transformers":
            source = replace(source, lm_head=read_lm_head(facts))
            scale = facts.logit_rule.scale
    return folded(source, scale=scale, soft_cap=None)
