"""From a run that trained base and heads to a plain base model: ``medusa-train merge``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from medusa_train.base_model.changed import is_adapters
from medusa_train.base_model.fingerprint import base_fingerprint
from medusa_train.base_model.load import load_tokenizer
from medusa_train.base_model.trained import write_trained_base
from medusa_train.console import log
from medusa_train.errors import InputError
from medusa_train.heads.checkpoint import read_spec
from medusa_train.run_dir import atomic_directory, check_writable


def merge_run(
    run: Path,
    output: Path,
    *,
    base_model: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Write the base model of a run's heads, as it was trained, as a plain model directory.

    Args:
        run: a run directory, or any heads directory of a base that was trained with them.
        output: the directory to write.
        base_model: the original, where it is no longer where the heads say.
        dtype: of the weights that are written: ``auto`` (the original's), ``float32``,
            ``bfloat16`` or ``float16``.
        trust_remote_code: run code that comes with the base model.

    Returns:
        ``output``, ``fingerprint`` and the ``kind`` of training.

    Raises:
        InputError: no such run, a base that was not trained, another original, or something is
            there already.
    """
    heads = run / "heads" if (run / "heads").is_dir() else run
    _, identity = read_spec(heads)
    if identity.trained is None:
        raise InputError(
            f"{heads}: its base model was not trained (method: medusa1), so there is nothing to "
            f"merge; the heads go with {identity.name_or_path} as it is"
        )
    if output.exists() and any(output.iterdir()):
        raise InputError(f"{output}: is there already; give another directory, or remove it")
    check_writable(output.parent)
    trained = (heads / identity.trained.directory).resolve()
    if not trained.is_dir():
        raise InputError(f"{heads}: what was trained was in {trained}, which is not there")
    if (trained / "config.json").exists():
        if dtype != "auto":
            raise InputError(
                f"--dtype: {trained} is a whole model in a type of its own, and is copied as it is"
            )
        log(f"{trained} is a whole model, and is copied")
        with atomic_directory(output) as temporary:
            shutil.copytree(trained, temporary, dirs_exist_ok=True)
        return {"output": str(output), "fingerprint": identity.fingerprint, "kind": "weights"}
    name = base_model or identity.name_or_path
    revision = identity.revision if base_model is None else None
    found = base_fingerprint(name, revision=revision)
    if found != identity.trained.original_fingerprint:
        raise InputError(
            f"{name}: has fingerprint {found}, and what was trained belongs to "
            f"{identity.trained.original_fingerprint}; give the original (--base-model)"
        )
    log(f"merging {trained} into {name}")
    original = {
        "name_or_path": name,
        "revision": revision,
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
    }
    with atomic_directory(output) as temporary:
        write_trained_base(original, trained, temporary, original_fingerprint=found)
        load_tokenizer(
            name, revision=revision, trust_remote_code=trust_remote_code
        ).save_pretrained(temporary)
    kind = "adapters" if is_adapters(trained) else "weights"
    return {"output": str(output), "fingerprint": identity.fingerprint, "kind": kind}
