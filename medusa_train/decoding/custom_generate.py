"""What ``model.generate(custom_generate=DIR, heads=DIR)`` of transformers runs, from an export.

An export ships this module as ``generate.py``, with the modules that it imports beside it, and a
directory of heads.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from medusa_train.base_model.features import output_projection
from medusa_train.base_model.fingerprint import base_fingerprint
from medusa_train.decoding.acceptance import Typical
from medusa_train.decoding.generate import Generated, Generator
from medusa_train.errors import ArgumentError, InputError
from medusa_train.heads.checkpoint import SPEC_FILE, load_heads
from medusa_train.heads.config import BaseIdentity
from medusa_train.tree.topology import Tree, TreeError

OPTIONS_FILE = "medusa_generate.json"

# The heads, the export's tree, and what is wrong with the model as their base.
_Loaded = tuple[Generator, Tree, str | None]
# Heads are read once for each model; a model that goes takes its heads with it.
_generators: weakref.WeakKeyDictionary[PreTrainedModel, dict[str, _Loaded]]
_generators = weakref.WeakKeyDictionary()


def generate(
    model: PreTrainedModel,
    inputs: Tensor | None = None,
    *,
    heads: str | os.PathLike[str] | None = None,
    tree: Iterable[Sequence[int]] | None = None,
    typical: tuple[float, float] | None = None,
    other_base: bool = False,
    **kwargs: Any,
) -> Tensor | Generated:
    """Write with the heads in a directory; the text is the model's own.

    Args:
        model: the base model of the heads.
        inputs: [B, P] prompts, padded on the left; or ``input_ids=`` and ``attention_mask=``.
        heads: the exported directory; None where the model was loaded from it.
        tree: candidate paths; None for the export's own.
        typical: (ε, δ) of typical acceptance; needs ``do_sample=True``.
        other_base: take heads that were trained on another model of this shape.
        **kwargs: as in transformers.

    Raises:
        ArgumentError: (a ``ValueError``) no heads, heads of another model, or an option that means
            nothing or does not go with heads.
    """
    if heads is not None and not isinstance(heads, str | os.PathLike):
        raise ArgumentError(f"heads: must be the exported directory, got {heads!r}")
    directory = str(heads or model.config.name_or_path)
    if not (Path(directory) / SPEC_FILE).exists():
        raise ArgumentError(
            f"{directory or 'the model'}: has no {SPEC_FILE}; give the exported directory with "
            "heads="
        )
    generator, own_tree, complaint = _generator(model, directory)
    if complaint is not None and not other_base:
        raise ArgumentError(complaint)
    # The library hands over all arguments of its generate, given or not.
    given = {name: value for name, value in kwargs.items() if value is not None}
    return generator.generate(
        inputs,
        tree=own_tree if tree is None else _as_tree(tree),
        typical=None if typical is None else _as_typical(typical),
        **given,
    )


def _as_tree(paths: Iterable[Sequence[int]]) -> Tree:
    try:
        return Tree.from_paths(paths)
    except TreeError as error:
        raise ArgumentError(f"tree: {error}") from error


def _as_typical(values: object) -> Typical:
    if not (isinstance(values, Sequence) and len(values) == 2):
        raise ArgumentError(
            f"typical: must be (epsilon, delta), such as (0.09, 0.3), got {values!r}"
        )
    return Typical(*values)


def _generator(model: PreTrainedModel, directory: str) -> _Loaded:
    known = _generators.setdefault(model, {})
    if directory not in known:
        weight, _ = output_projection(model)
        options = json.loads((Path(directory) / OPTIONS_FILE).read_text(encoding="utf-8"))
        heads, identity = load_heads(
            Path(directory),
            hidden_size=weight.shape[1],
            vocab_size=weight.shape[0],
            device=weight.device,
        )
        generator = Generator(model, heads, num_tokens=options["num_tokens"])
        complaint = _complaint(model, identity, directory)
        known[directory] = generator, Tree.from_paths(options["tree"]), complaint
    return known[directory]


def _complaint(model: PreTrainedModel, identity: BaseIdentity, directory: str) -> str | None:
    """What is wrong with this model as the base of these heads, as far as its files say."""
    name = str(model.config.name_or_path)
    if not name:
        return None
    revision = getattr(model.config, "_commit_hash", None)
    try:
        found = base_fingerprint(name, gguf_file=identity.gguf_file, revision=revision)
    except InputError:
        # It was made in memory, or its files are gone: its shapes fit, and no more can be said.
        return None
    if found == identity.fingerprint:
        return None
    return (
        f"{directory}: heads of the base model {identity.name_or_path} with fingerprint "
        f"{identity.fingerprint}, but the files of this one ({name}) have {found}; load the model "
        "that they were trained on, or give other_base=True: the text is the model's own with any "
        "heads, but others are seldom right"
    )
