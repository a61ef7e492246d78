"""Heads of a base model that was trained with them: two directories, the base and the heads."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from medusa_train.errors import InputError
from medusa_train.export.verify import Target
from medusa_train.export_card import write_pair_card
from medusa_train.export_options import ExportChoices
from medusa_train.exporting import Exported, check_export, export_heads
from medusa_train.heads.checkpoint import read_spec
from medusa_train.merging import merge_run

BASE, HEADS = "base", "heads"


def export_with_base(
    target: Target, heads: Path, output: Path, *, choices: ExportChoices | None = None
) -> Exported:
    """Export heads, and where their base was trained with them, the base too.

    Then ``output`` has the directories ``base``, a plain model, and ``heads``, and a model card of
    both; ``combined`` has both in one. A base that the user gives is not written again.

    Args:
        target: the engine.
        heads: a heads directory.
        output: a new or empty directory.
        choices: what the user chose.

    Raises:
        InputError: as :func:`medusa_train.exporting.export_heads`.
    """
    chosen = choices or ExportChoices()
    _, identity = read_spec(heads)
    if identity.trained is None or chosen.base_model is not None:
        return export_heads(target, heads, output, choices=chosen)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output}: is there already; give another directory or remove it")
    check_export(target, heads, output, chosen)
    try:
        if target == "combined":
            output.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".base.", dir=output.parent) as name:
                return _export(target, heads, output, chosen, base=Path(name) / BASE)
        chosen = replace(chosen, repo_root=output)
        result = _export(target, heads, output / HEADS, chosen, base=output / BASE)
        warning = (
            f"the base was trained with the heads: serve {output / BASE}, not "
            f"{identity.name_or_path}"
        )
        write_pair_card(
            target,
            heads,
            output,
            chosen=chosen,
            start=result.start,
            notes=result.warnings,
            directories=(BASE, HEADS),
        )
    except BaseException:
        shutil.rmtree(output, ignore_errors=True)
        raise
    files = sorted(str(p.relative_to(output)) for p in output.rglob("*") if p.is_file())
    return replace(result, output=output, files=tuple(files), warnings=(*result.warnings, warning))


def _export(
    target: Target, heads: Path, output: Path, chosen: ExportChoices, *, base: Path
) -> Exported:
    merge_run(heads, base, trust_remote_code=chosen.trust_remote_code)
    return export_heads(target, heads, output, choices=replace(chosen, base_model=str(base)))
