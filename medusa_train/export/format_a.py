"""The files with FasterDecoding's names, which several engines read (format A)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from medusa_train.export.source import HeadTensors, ServeOptions
from medusa_train.heads.checkpoint import CONFIG_FILE, WEIGHTS_FILE
from medusa_train.heads.config import format_a_config
from medusa_train.run_dir import atomic_path, write_json, write_text

PICKLE_FILE = "medusa_lm_head.pt"
CHOICES_FILE = "medusa_choices.json"


def write_format_a(
    heads: HeadTensors,
    directory: Path,
    *,
    with_pickle: bool = False,
    more_tensors: Mapping[str, Tensor] | None = None,
    more_config: Mapping[str, Any] | None = None,
) -> None:
    """Write ``medusa_lm_head.safetensors`` and ``config.json``.

    Args:
        heads: full or shared, with the whole vocabulary.
        directory: where to.
        with_pickle: write the same tensors as ``medusa_lm_head.pt`` too.
        more_tensors: further ones.
        more_config: further keys.
    """
    tensors = {**heads.tensors, **(more_tensors or {})}
    write_safetensors(directory / WEIGHTS_FILE, tensors)
    if with_pickle:
        write_pickle(directory / PICKLE_FILE, tensors)
    config = format_a_config(heads.config, heads.base)
    write_json(directory / CONFIG_FILE, {**config, **provenance(heads), **(more_config or {})})


def provenance(heads: HeadTensors) -> dict[str, Any]:
    """Where the heads come from: keys that no engine reads."""
    found: dict[str, Any] = {"base_model_fingerprint": heads.base.fingerprint}
    if heads.logit_scale != 1.0:
        found["folded_logit_scale"] = heads.logit_scale
    return found


def write_choices(directory: Path, options: ServeOptions) -> None:
    """Write the tree as engines read it: paths by length, then by ranks."""
    paths = ", ".join(str(list(path)) for path in options.tree.paths)
    write_text(directory / CHOICES_FILE, f"[{paths}]\n")


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors under a temporary name and rename the file."""
    with atomic_path(path) as temporary:
        save_file(dict(tensors), temporary, metadata={"format": "pt"})


def write_pickle(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """The same as a file of ``torch.save``, which ``weights_only`` loading reads."""
    with atomic_path(path) as temporary:
        torch.save(dict(tensors), temporary)
