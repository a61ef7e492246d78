"""From heads and the base model that they name to what an engine loads."""

from __future__ import annotations

from pathlib import Path

from medusa_train.base_model.fingerprint import base_fingerprint
from medusa_train.base_model.load import load_tokenizer
from medusa_train.errors import InputError
from medusa_train.export.transformers import export_transformers
from medusa_train.heads.checkpoint import read_spec
from medusa_train.heads.config import BaseIdentity
from medusa_train.medusa_model import CHOICES_FILE, read_tree
from medusa_train.run_dir import check_writable
from medusa_train.tree.topology import Tree, TreeError


def export_for_transformers(
    heads: Path, output: Path, *, base_model: str | None = None, tree_file: Path | None = None
) -> list[str]:
    """What ``medusa-train export transformers`` does; loads no weights of the base model.

    Args:
        heads: a heads directory.
        output: the directory to write.
        base_model: hub id or directory; None for the one that the heads name.
        tree_file: None for the heads' own tree, else the top-1 chain.

    Returns:
        The names of the files that were written.

    Raises:
        InputError: no heads or base, another base, a tree that the heads cannot fill, or an export
            is there.
    """
    config, identity = read_spec(heads)
    check_writable(output)
    is_named = base_model is None
    # The base that the heads name need not be here; a process that decodes checks it.
    for model in [base_model, str(output) if (output / "config.json").exists() else None]:
        if model is not None:
            _check_base(heads, identity, model)
    tokenizer = load_tokenizer(
        base_model or identity.name_or_path,
        gguf_file=identity.gguf_file if is_named else None,
        revision=identity.revision if is_named else None,
    )
    choices = tree_file or heads / CHOICES_FILE
    tree = Tree.chain(config.num_heads)
    if tree_file is not None or choices.exists():
        tree = read_tree(choices)
    try:
        tree.check_fits(num_heads=config.num_heads, top_k=config.num_logits)
    except TreeError as error:
        raise InputError(f"{choices}: {error}; give a tree that the heads can fill") from error
    return export_transformers(heads, output, tree=tree, num_tokens=len(tokenizer))


def _check_base(heads: Path, identity: BaseIdentity, model: str) -> None:
    gguf_file = identity.gguf_file if model == identity.name_or_path else None
    found = base_fingerprint(model, gguf_file=gguf_file)
    if found != identity.fingerprint:
        raise InputError(
            f"{heads}: heads of the base model {identity.name_or_path} with fingerprint "
            f"{identity.fingerprint}, but {model} has {found}; give the base that they were "
            "trained on, or a copy of its files"
        )
