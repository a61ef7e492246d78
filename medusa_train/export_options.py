"""What a user may choose of an export, and what of it goes with which engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from medusa_train.errors import InputError
from medusa_train.export.source import HeadTensors, ServeOptions
from medusa_train.export.verify import Target
from medusa_train.heads.config import Layout
from medusa_train.medusa_model import CHOICES_FILE, read_tree
from medusa_train.tree.topology import Tree, TreeError

TREE_TARGETS = frozenset({"fasterdecoding", "tensorrt-llm", "nxd", "combined", "transformers"})
"""Engines that take a candidate tree; the others run a chain."""


@dataclass(frozen=True)
class ExportChoices:
    """What a user may choose; None and ``auto`` leave it to the heads.

    Attributes:
        base_model: hub id or directory of the base.
        tree_file: JSON list of paths.
        dtype: ``auto`` (as stored), ``float32``, ``bfloat16`` or ``float16``.
        num_heads: keep the first so many.
        layout: ``full`` or ``shared``, where nothing is lost.
        num_speculative_tokens: length of the chain.
        min_version: oldest version of vLLM that has to load the export, such as ``0.25``.
        trust_remote_code: run code that comes with the base.
        repo: ``OWNER/NAME`` on the hub, where the export goes there: its card says so.
        repo_root: the directory that goes there, where the export is a part of it.
    """

    base_model: str | None = None
    tree_file: Path | None = None
    dtype: str = "auto"
    num_heads: int | None = None
    layout: Layout | None = None
    num_speculative_tokens: int | None = None
    min_version: str | None = None
    trust_remote_code: bool = False
    repo: str | None = None
    repo_root: Path | None = None


def check_choices(target: Target, chosen: ExportChoices) -> None:
    """Refuse choices that are for other engines.

    Raises:
        InputError: an option that this engine has no use for.
    """
    if chosen.min_version is not None and target != "vllm":
        raise InputError("--min-version: is for vllm alone; leave it out")
    if chosen.tree_file is not None and target not in TREE_TARGETS:
        raise InputError(
            f"--tree: {target} runs only a chain; give --num-speculative-tokens instead"
        )
    if chosen.num_speculative_tokens is not None and target in TREE_TARGETS:
        raise InputError(f"--num-speculative-tokens: {target} takes a tree; give --tree instead")


def serve_options(
    target: Target, source: HeadTensors, *, heads: Path, output: Path, chosen: ExportChoices
) -> ServeOptions:
    """The tree or the length of the chain, and what else a writer asks for.

    Args:
        target: the engine.
        source: the heads that are exported.
        heads: their directory, which may have a tree.
        output: the export.
        chosen: what the user chose.

    Raises:
        InputError: more speculative tokens than heads, a tree that they cannot fill, no version.
    """
    num_heads = source.config.num_heads
    wanted = chosen.num_speculative_tokens
    if wanted is not None and not 1 <= wanted <= num_heads:
        raise InputError(
            f"--num-speculative-tokens: must be from 1 to {num_heads}, the number of heads; got "
            f"{wanted}"
        )
    length = wanted or num_heads
    tree = Tree.chain(length)
    if target in TREE_TARGETS:
        tree = _tree(heads, source, chosen)
    version = None if chosen.min_version is None else parse_version(chosen.min_version)
    return ServeOptions(output, tree, length, version)


def _tree(heads: Path, source: HeadTensors, chosen: ExportChoices) -> Tree:
    num_heads, own = source.config.num_heads, heads / CHOICES_FILE
    path = chosen.tree_file or own
    if chosen.tree_file is not None:
        tree = read_tree(path)
    elif own.exists():
        found = read_tree(own)
        depth = num_heads if chosen.num_heads is not None else found.depth
        tree = Tree(tuple(path for path in found.paths if len(path) <= depth))
    else:
        tree = Tree.chain(num_heads)
    try:
        tree.check_fits(num_heads=num_heads, top_k=source.config.num_logits)
    except TreeError as error:
        raise InputError(f"{path}: {error}; give a tree that the heads can fill") from error
    return tree


def parse_version(text: str) -> tuple[int, int]:
    """``0.25`` or ``v0.25.1`` as numbers.

    Raises:
        InputError: it is no version.
    """
    parts = text.removeprefix("v").split(".")
    if len(parts) < 2 or not all(part.isdigit() for part in parts[:2]):
        raise InputError(f"--min-version: must be a version such as 0.25, got {text!r}")
    return int(parts[0]), int(parts[1])


def verified_tokens(target: Target, options: ServeOptions) -> int | None:
    """What is asked of an engine that runs a chain; None for one with trees."""
    return None if target in TREE_TARGETS else options.num_speculative_tokens
