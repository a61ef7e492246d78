"""vLLM: its own names for every version up to 0.32, FasterDecoding's from 0.25."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_train.errors import InputError
from medusa_train.export.format_a import provenance, write_format_a, write_safetensors
from medusa_train.export.refusals import chain_warning, refuse, refuse_bias
from medusa_train.export.source import HeadTensors, ServeOptions, Written
from medusa_train.heads.checkpoint import CONFIG_FILE, TOKEN_MAP
from medusa_train.run_dir import write_json

ENGINE = "vLLM"
WEIGHTS_FILE = "model.safetensors"
FORMAT_A_FROM = (0, 25)
REMOVED_IN = (0, 33)
OTHER_METHODS = ("eagle-", "eagle3", "dflash", "dspark")
"""What a directory's path must not contain: the engine would take it for another kind of draft."""


def check(heads: HeadTensors, options: ServeOptions) -> None:
    """Raise InputError for what the engine cannot load."""
    refuse_bias(heads, ENGINE)
    config = heads.config
    if options.min_version is not None and options.min_version >= REMOVED_IN:
        raise InputError(
            f"--min-version: vLLM 0.33 removed Medusa; got {_text(options.min_version)}, give one "
            "up to 0.32"
        )
    if config.layout == "full" and config.truncated_vocab_size is not None:
        raise refuse(
            ENGINE,
            "they have a truncated vocabulary and matrices of their own, but token_map works with "
            "the shared lm_head alone",
            "train with heads.layout: shared, or with heads.vocab_size: null",
        )
    for part in OTHER_METHODS:
        if part in str(options.directory).lower():
            raise InputError(
                f"{options.directory}: vLLM takes a directory with {part!r} in its path for "
                "another kind of draft; choose another one"
            )


def uses_format_a(heads: HeadTensors, options: ServeOptions) -> bool:
    """Whether FasterDecoding's names are enough, so that other engines read the directory too."""
    if options.min_version is None or options.min_version < FORMAT_A_FROM:
        return False
    config = heads.config
    if config.truncated_vocab_size is not None:
        return False
    return config.layout == "full" or (config.num_layers == 1 and config.num_heads > 1)


def write(heads: HeadTensors, directory: Path, options: ServeOptions) -> Written:
    """Write format B, or format A where every version that is asked for reads it."""
    shared = heads.config.layout == "shared"
    if uses_format_a(heads, options):
        more: dict[str, Tensor] = {}
        if shared:
            assert heads.lm_head is not None
            more["0.1.weight"] = heads.lm_head
        flag = {"original_lm_head": True} if shared else {}
        write_format_a(heads, directory, more_tensors=more, more_config=flag)
        versions = ">=0.25,<0.33"
    else:
        write_safetensors(directory / WEIGHTS_FILE, format_b_tensors(heads))
        write_json(directory / CONFIG_FILE, format_b_config(heads))
        versions = "<0.33"
    speculative = {
        "method": "medusa",
        "model": str(options.directory),
        "num_speculative_tokens": options.num_speculative_tokens,
    }
    start = f"""\
```
pip install "vllm{versions}"
vllm serve {heads.base.name_or_path} --speculative-config '{json.dumps(speculative)}'
```
"""
    removed = "vLLM 0.33 removed Medusa; 0.32 is the last version that loads this"
    return Written(start, (chain_warning(ENGINE), removed))


def format_b_tensors(heads: HeadTensors) -> dict[str, Tensor]:
    """The tensors by vLLM's names."""
    config, tensors = heads.config, heads.tensors
    renamed: dict[str, Tensor] = {}
    for head in range(config.num_heads):
        for layer in range(config.num_layers):
            for part in ("weight", "bias"):
                old = tensors[f"{head}.{layer}.linear.{part}"]
                renamed[f"blocks.{head}.layers.{layer}.{part}"] = old
        if config.layout == "full":
            renamed[f"lm_heads.{head}.weight"] = tensors[f"{head}.{config.num_layers}.weight"]
    if config.layout == "shared":
        assert heads.lm_head is not None
        lm_head = heads.lm_head
        if TOKEN_MAP in tensors:
            renamed[TOKEN_MAP] = tensors[TOKEN_MAP].to(torch.int64)
            lm_head = lm_head[tensors[TOKEN_MAP]]
        renamed["lm_head.weight"] = lm_head
    return {name: tensor.contiguous() for name, tensor in renamed.items()}


def format_b_config(heads: HeadTensors) -> dict[str, Any]:
    """``config.json``: every value that the engine would otherwise guess."""
    config = heads.config
    return {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": config.layout == "shared",
        "truncated_vocab_size": config.num_logits,
        "logit_scale": 1.0,
        "base_model_name_or_path": heads.base.name_or_path,
        **provenance(heads),
    }


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
