"""Heads, bases and exports for the tests of formats: ``from tests.exports_for_tests import …``."""

from __future__ import annotations

import atexit
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import torch
from transformers import AutoModelForCausalLM

from medusa_train.export_options import ExportChoices
from medusa_train.exporting import Exported, export_heads
from tests.decoding_for_tests import save_heads_directory
from tests.models_for_tests import save_base

TARGETS = (
    "fasterdecoding", "tgi", "vllm", "tensorrt-llm", "mlc", "nxd", "combined", "transformers",
)  # fmt: skip


@cache
def _root() -> Path:
    """Where they are, until the process ends."""
    directory = mkdtemp(prefix="exports-for-tests-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return Path(directory)


def base_directory(architecture: str = "llama", *, tied: bool = False) -> Path:
    """A base model's directory, made once: do not write there."""
    directory = _root() / f"base-{architecture}-{tied}"
    return directory if directory.exists() else save_base(directory, architecture, tied=tied)


def heads_directory(
    *,
    architecture: str = "llama",
    tied: bool = False,
    num_heads: int = 3,
    num_layers: int = 1,
    layout: str = "full",
    truncated: bool = False,
) -> Path:
    """Heads at random for that base, made once: do not write there."""
    base = base_directory(architecture, tied=tied)
    shape = f"{num_heads}-{num_layers}-{layout}-{truncated}"
    directory = _root() / f"heads-{architecture}-{tied}-{shape}"
    if directory.exists():
        return directory
    return save_heads_directory(
        directory,
        base=base,
        num_heads=num_heads,
        num_layers=num_layers,
        layout=layout,
        token_map=torch.arange(1, 40, 3) if truncated else None,
    )


def export(target: str, heads: Path, output: Path, **choices: object) -> Exported:
    """``export_heads`` with its choices as keywords."""
    return export_heads(target, heads, output, choices=ExportChoices(**choices))  # type: ignore[arg-type]


@cache
def _exported(target: str, heads: Path, min_version: str | None) -> Path:
    output = _root() / f"export-{target}-{heads.name}-{min_version}"
    export(target, heads, output, min_version=min_version)
    return output


def copy_of_export(
    target: str, heads: Path, output: Path, *, min_version: str | None = None
) -> None:
    """An export of a :func:`heads_directory`, written once and copied for each test."""
    shutil.copytree(_exported(target, heads, min_version), output)


def base_lm_head(base: Path) -> torch.Tensor:
    """The base's own output matrix, as transformers loads it."""
    model = AutoModelForCausalLM.from_pretrained(base)
    weight: torch.Tensor = model.get_output_embeddings().weight.detach()
    return weight
