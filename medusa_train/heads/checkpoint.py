"""The heads directory: ``medusa_lm_head.safetensors``, ``config.json``, ``heads_spec.json``.

Loaded strictly: a missing tensor, a surplus one or a wrong shape is an error, as is a base model
with another fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from medusa_train.errors import InputError, InputErrors
from medusa_train.heads.config import (
    BaseIdentity,
    HeadsConfig,
    format_a_config,
    from_spec,
    to_spec,
)
from medusa_train.heads.model import MedusaHeads

WEIGHTS_FILE = "medusa_lm_head.safetensors"
CONFIG_FILE = "config.json"
SPEC_FILE = "heads_spec.json"
TOKEN_MAP = "token_map"  # noqa: S105 — the name of a tensor


def save_heads(heads: MedusaHeads, directory: Path, *, base: BaseIdentity) -> None:
    """Write the three files of a heads directory; each is complete or absent.

    The spec goes last: a directory with a spec is whole.
    """
    tensors = {
        name: tensor.detach().cpu().contiguous() for name, tensor in heads.state_dict().items()
    }
    save_tensors(tensors, directory, config=heads.config, base=base)


def save_tensors(
    tensors: dict[str, Tensor], directory: Path, *, config: HeadsConfig, base: BaseIdentity
) -> None:
    """Write a heads directory from the heads' state: whole tensors on the CPU, by their names."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / SPEC_FILE).unlink(missing_ok=True)
    temporary = directory / f".{WEIGHTS_FILE}.tmp"
    save_file(tensors, temporary, metadata={"format": "pt"})
    os.replace(temporary, directory / WEIGHTS_FILE)
    _write_json(directory / CONFIG_FILE, format_a_config(config, base))
    _write_json(directory / SPEC_FILE, to_spec(config, base))


def read_spec(directory: Path) -> tuple[HeadsConfig, BaseIdentity]:
    """The shape of the heads in ``directory`` and the base they belong to, without the weights.

    Raises:
        InputError: it is no heads directory, or its spec is wrong.
    """
    path = directory / SPEC_FILE
    if not directory.is_dir():
        raise InputError(f"{directory}: no such heads directory")
    try:
        spec: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(
            f"{directory}: no {SPEC_FILE} in it; give the directory that a run wrote, RUN/heads"
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid JSON: {error}") from error
    return from_spec(spec, where=str(path))


def load_heads(
    directory: Path,
    *,
    base_fingerprint: str | None = None,
    hidden_size: int | None = None,
    vocab_size: int | None = None,
    device: torch.device | str = "cpu",
) -> tuple[MedusaHeads, BaseIdentity]:
    """Load heads, strictly; in the dtype of the file.

    Args:
        directory: a heads directory.
        base_fingerprint: refuse heads of a base with another fingerprint.
        hidden_size: refuse heads of another D.
        vocab_size: refuse heads of another V (rows of the base's ``lm_head``).
        device: where to put them.

    Raises:
        InputErrors: every tensor that is missing, surplus or of a wrong shape, or not finite.
        InputError: the heads belong to another base, or a file cannot be read.
    """
    config, base = read_spec(directory)
    _check_base(
        directory,
        config,
        base,
        base_fingerprint=base_fingerprint,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
    )
    tensors = _read_tensors(directory / WEIGHTS_FILE)
    heads = _empty_heads(config, tensors, where=directory / WEIGHTS_FILE)
    expected = heads.state_dict()
    errors = [
        f"{WEIGHTS_FILE}: missing tensor {name!r}" for name in expected.keys() - tensors.keys()
    ]
    errors += [
        f"{WEIGHTS_FILE}: surplus tensor {name!r}" for name in tensors.keys() - expected.keys()
    ]
    for name in expected.keys() & tensors.keys():
        got, want = list(tensors[name].shape), list(expected[name].shape)
        if got != want:
            errors.append(f"{WEIGHTS_FILE}: {name}: shape {got}, but {SPEC_FILE} says {want}")
        elif tensors[name].is_floating_point() and not tensors[name].isfinite().all():
            errors.append(f"{WEIGHTS_FILE}: {name}: holds values that are not finite")
    if errors:
        raise InputErrors([f"{directory}: {error}" for error in sorted(errors)])
    heads.load_state_dict(tensors, assign=True)
    return heads.to(device), base


def heads_fingerprint(directory: Path) -> str:
    """A short hash of weights, config and spec; other files do not change it."""
    digest = hashlib.sha256()
    for name in (WEIGHTS_FILE, CONFIG_FILE, SPEC_FILE):
        with (directory / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def _empty_heads(config: HeadsConfig, tensors: dict[str, Tensor], *, where: Path) -> MedusaHeads:
    token_map = tensors.get(TOKEN_MAP) if config.truncated_vocab_size is not None else None
    if config.truncated_vocab_size is not None and token_map is None:
        raise InputError(f"{where}: missing tensor {TOKEN_MAP!r}")
    try:
        heads = MedusaHeads(config, token_map=token_map)
    except ValueError as error:
        raise InputError(f"{where}: {error}") from error
    for parameter in heads.parameters():
        parameter.requires_grad_(False)
    return heads


def _check_base(
    directory: Path,
    config: HeadsConfig,
    base: BaseIdentity,
    *,
    base_fingerprint: str | None,
    hidden_size: int | None,
    vocab_size: int | None,
) -> None:
    name = base.name_or_path
    if hidden_size is not None and hidden_size != config.hidden_size:
        raise InputError(
            f"{directory}: heads for hidden size {config.hidden_size} ({name}), but the base model "
            f"has {hidden_size}; give the base that they were trained on (--base-model)"
        )
    if vocab_size is not None and vocab_size != config.vocab_size:
        raise InputError(
            f"{directory}: heads for {config.vocab_size} rows of lm_head ({name}), but the base "
            f"model has {vocab_size}; give the base that they were trained on (--base-model)"
        )
    if base_fingerprint is None or base_fingerprint == base.fingerprint:
        return
    if base.trained is not None and base_fingerprint == base.trained.original_fingerprint:
        raise InputError(
            f"{directory}: heads of a base model that was trained with them, and this is {name} as "
            "it was before; write the trained one with medusa-train merge, and give that "
            "(--base-model)"
        )
    raise InputError(
        f"{directory}: heads of the base model {name} with fingerprint {base.fingerprint}, but "
        f"this base model has {base_fingerprint}; give the base that they were trained on "
        "(--base-model)"
    )


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not a readable safetensors file: {error}") from error


def _write_json(path: Path, value: Any) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)
