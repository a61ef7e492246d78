"""``medusa-train import``: heads of any engine's form → a heads directory."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_train.base_facts import BaseFacts, check_shape, read_facts, read_lm_head, read_tokenizer
from medusa_train.console import log, warn
from medusa_train.errors import InputError, InputErrors
from medusa_train.export.files import inside, read_config, require_directory
from medusa_train.export.recognise import TOKEN_MAP, Recognised, recognise
from medusa_train.export.source import HeadTensors, as_layout
from medusa_train.heads.checkpoint import load_heads, save_tensors
from medusa_train.heads.config import BaseIdentity, HeadsConfig, Layout
from medusa_train.medusa_model import CHOICES_FILE, read_tree
from medusa_train.run_dir import atomic_directory
from medusa_train.tree.topology import TreeError

_COUNTS = {
    "num_heads": ("medusa_num_heads", "num_medusa_heads"),
    "num_layers": ("medusa_num_layers", "num_medusa_layers"),
}


@dataclass(frozen=True)
class Imported:
    """What was imported.

    Attributes:
        output: the heads directory.
        convention: whose names it had.
        files: that were read.
        config: the shape of the heads.
        base: their base model.
    """

    output: Path
    convention: str
    files: tuple[str, ...]
    config: HeadsConfig
    base: BaseIdentity


def import_heads(
    source: Path,
    output: Path,
    *,
    base_model: str | None = None,
    layout: Layout | None = None,
    file: str | None = None,
    trust_tensors: bool = False,
    trust_remote_code: bool = False,
) -> Imported:
    """What ``medusa-train import`` does.

    Args:
        source: a directory with heads by any engine's names.
        output: a new or empty directory.
        base_model: hub id or directory of the base; None for the one that the config names.
        layout: ``full`` or ``shared``, where nothing is lost; None for what the tensors have.
        file: read this weights file alone.
        trust_tensors: where the config contradicts the tensors, take the tensors.
        trust_remote_code: run code that comes with the base; none of ``source`` is run.

    Raises:
        InputError: no heads, several that differ, no base, or a base of another shape.
        InputErrors: every contradiction, and every tensor that is missing or surplus.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output}: is there already; give another directory or remove it")
    require_directory(source)
    config = read_config(source) if (source / "config.json").exists() else {}
    found = recognise(source, file=file, is_shared=config.get("original_lm_head") is True)
    for note in found.notes:
        log(f"{source}: {note}")
    contradictions = list(_contradictions(config, found))
    where = source / "config.json"
    if contradictions and not trust_tensors:
        raise InputErrors(
            [f"{where}: {text}; --trust-tensors takes the tensors" for text in contradictions]
        )
    for text in contradictions:
        warn(f"{where}: {text}; the tensors are taken")
    found = _with_ascending_map(found)
    name = _base_name(source, config, found, base_model)
    facts = read_facts(BaseIdentity(name, ""), base_model=name, trust_remote_code=trust_remote_code)
    heads = _as_heads(source, config, found, facts, layout)
    _write(source, output, heads, facts)
    return Imported(output, found.convention, found.files, heads.config, heads.base)


def _base_name(
    source: Path, config: Mapping[str, Any], found: Recognised, base_model: str | None
) -> str:
    """The base: as given, as the config names it, or the directory itself (NxD's form)."""
    named = config.get("base_model_name_or_path")
    if found.convention == "nxd" and config and named is None:
        named = str(source)
    name = base_model or (named if isinstance(named, str) else None)
    if name is None:
        raise InputError(f"{source}: names no base model; give it with --base-model")
    return name


def _with_ascending_map(found: Recognised) -> Recognised:
    """The same heads with the tokens of a truncated vocabulary in ascending order."""
    token_map = found.tensors.get(TOKEN_MAP)
    if token_map is None:
        return found
    order = token_map.argsort()
    size = token_map.numel()

    def sorted_rows(tensor: Tensor) -> Tensor:
        return tensor[order] if tensor.shape[0] == size else tensor

    own = re.compile(rf"^\d+\.{found.num_layers}\.|{TOKEN_MAP}$")
    tensors = {n: sorted_rows(t) if own.match(n) else t for n, t in found.tensors.items()}
    lm_head = None if found.lm_head is None else sorted_rows(found.lm_head)
    return replace(found, tensors=tensors, lm_head=lm_head)


def _as_heads(
    source: Path,
    config: Mapping[str, Any],
    found: Recognised,
    facts: BaseFacts,
    layout: Layout | None,
) -> HeadTensors:
    scale = config.get("folded_logit_scale", 1.0)
    tensors = dict(found.tensors)
    if isinstance(scale, float) and scale > 0.0 and scale != 1.0:
        end = f".{found.num_layers}.weight"
        tensors |= {n: _unscaled(t, scale) for n, t in tensors.items() if n.endswith(end)}
    token_map = tensors.get(TOKEN_MAP)
    own = tensors.get(f"0.{found.num_layers}.weight")
    shape = HeadsConfig(
        num_heads=found.num_heads,
        num_layers=found.num_layers,
        layout="full" if found.is_full else "shared",
        hidden_size=found.hidden_size,
        vocab_size=facts.vocab_size if own is None or token_map is not None else own.shape[0],
        truncated_vocab_size=None if token_map is None else token_map.numel(),
        lm_head_bias=f"0.{found.num_layers}.bias" in tensors
        or (own is None and facts.lm_head_bias),
    )
    check_shape(facts, shape, where=source)
    identity = BaseIdentity(facts.name_or_path, facts.fingerprint(), revision=facts.revision)
    heads = HeadTensors(shape, identity, tensors)
    if found.lm_head is None and layout in {None, shape.layout}:
        return heads
    base_lm_head = read_lm_head(facts)
    if found.lm_head is not None:
        lm_head = found.lm_head if scale == 1.0 else _unscaled(found.lm_head, float(scale))
        if layout != "full":
            _check_lm_head(source, lm_head, base_lm_head, token_map)
        elif token_map is None or lm_head.shape[0] == facts.vocab_size:
            return as_layout(heads, "full", lm_head=lm_head)
        else:
            return _with_rows(heads, lm_head)
    return heads if layout is None else as_layout(heads, layout, lm_head=base_lm_head)


def _check_lm_head(
    source: Path, lm_head: Tensor, base_lm_head: Tensor, token_map: Tensor | None
) -> None:
    """Refuse a copy of ``lm_head`` that is none: shared heads would lose it."""
    wanted = base_lm_head.to(lm_head.dtype)
    if token_map is not None and lm_head.shape[0] == token_map.numel():
        wanted = wanted[token_map.long()]
    if not torch.equal(wanted, lm_head):
        raise InputError(
            f"{source}: its lm_head is not the base's, so it would be lost in the layout shared; "
            "give --layout full, which keeps it in each head, or the base that it was copied from"
        )


def _with_rows(heads: HeadTensors, rows: Tensor) -> HeadTensors:
    """Full heads with a truncated matrix as it is in the file."""
    config = replace(heads.config, layout="full")
    names = [f"{head}.{config.num_layers}.weight" for head in range(config.num_heads)]
    tensors = {**heads.tensors, **{name: rows.clone() for name in names}}
    return replace(heads, config=config, tensors=tensors)


def _write(source: Path, output: Path, heads: HeadTensors, facts: BaseFacts) -> None:
    choices = inside(source, CHOICES_FILE)
    if choices.exists():
        try:
            read_tree(choices).check_fits(num_heads=heads.config.num_heads)
        except TreeError as error:
            raise InputError(f"{choices}: {error}; give a tree that the heads can fill") from error
    tokenizer = read_tokenizer(facts)
    with atomic_directory(output) as temporary:
        tensors = {name: tensor.contiguous() for name, tensor in heads.tensors.items()}
        save_tensors(tensors, temporary, config=heads.config, base=heads.base)
        tokenizer.save_pretrained(temporary)
        if choices.exists():
            shutil.copyfile(choices, temporary / CHOICES_FILE)
        load_heads(temporary, hidden_size=facts.hidden_size, vocab_size=facts.vocab_size)


def _contradictions(config: Mapping[str, Any], found: Recognised) -> Iterator[str]:
    """Where the config and the tensors say different things."""
    actual = {"num_heads": found.num_heads, "num_layers": found.num_layers}
    names = {key: list(keys) for key, keys in _COUNTS.items()}
    if found.convention == "vllm":
        names["num_heads"].append("num_heads")
        names["num_layers"].append("num_hidden_layers")
    for key, keys in names.items():
        for name in keys:
            if name in config and config[name] != actual[key]:
                what = "heads" if key == "num_heads" else "layers"
                yield f"{name} is {config[name]!r}, but the tensors have {actual[key]} {what}"
    size = config.get("hidden_size")
    if size is not None and size != found.hidden_size:
        yield f"hidden_size is {size!r}, but the tensors have {found.hidden_size}"
    yield from _row_contradictions(config, found)
    has_bias = any(bool(t.any()) for n, t in found.tensors.items() if n.endswith("linear.bias"))
    if config.get("medusa_fc_bias") is False and has_bias:
        yield "medusa_fc_bias is false, but the tensors have biases"
    if config.get("original_lm_head") is True and found.is_full:
        yield "original_lm_head is true, but each head has a matrix of its own"


def _row_contradictions(config: Mapping[str, Any], found: Recognised) -> Iterator[str]:
    own = found.tensors.get(f"0.{found.num_layers}.weight")
    rows = own if own is not None else found.lm_head
    token_map = found.tensors.get(TOKEN_MAP)
    size = config.get("vocab_size")
    if rows is not None and token_map is None and size is not None and size != rows.shape[0]:
        yield f"vocab_size is {size!r}, but the tensors have {rows.shape[0]} rows"
    truncated = config.get("truncated_vocab_size")
    if token_map is not None and truncated is not None and truncated != token_map.numel():
        yield (
            f"truncated_vocab_size is {truncated!r}, but the token map has {token_map.numel()} ids"
        )


def _unscaled(tensor: Tensor, scale: float) -> Tensor:
    return (tensor.double() / scale).to(tensor.dtype)
