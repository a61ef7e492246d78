"""The stage ``export`` of a recipe: the form of each engine, and from there to the hub."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

from medusa_train.console import log, warn
from medusa_train.export.hub import Push, check_hub, check_repo_name, push_to_hub
from medusa_train.export.verify import Target
from medusa_train.export_options import TREE_TARGETS, ExportChoices
from medusa_train.export_with_base import export_with_base
from medusa_train.exporting import Exported, export_heads
from medusa_train.heads.checkpoint import read_spec
from medusa_train.merging import merge_run
from medusa_train.recipe.schema import ExportSection
from medusa_train.run_dir import write_json
from medusa_train.stages import EXPORTS_FILE, Workspace


def repositories(section: ExportSection) -> dict[Target, str]:
    """The repository of each target; empty where nothing goes to the hub."""
    if section.push_to_hub is None:
        return {}
    only = len(section.targets) == 1
    return {
        target: section.push_to_hub if only else f"{section.push_to_hub}-{target}"
        for target in section.targets
    }


def check_repositories(section: ExportSection) -> None:
    """Find out before long work whether the repositories can be written to.

    Raises:
        InputError: a name that is none, no token, offline mode, or a public repository where a
            private one is wanted.
        MedusaTrainError: the hub cannot be reached, or failed.
    """
    for repo in repositories(section).values():
        check_repo_name(repo)
        check_hub(repo, private=not section.public)


def run_export(workspace: Workspace) -> Mapping[str, Any]:
    """Write every export of the recipe, and send those that go to the hub."""
    section, run = workspace.recipe.export, workspace.run
    check_repositories(section)
    shutil.rmtree(run.exports, ignore_errors=True)
    repos, trusted = repositories(section), workspace.recipe.base_model.trust_remote_code
    written: dict[str, list[str]] = {}
    sent: dict[str, str | None] = {}
    base = None
    # What goes to the hub has the trained base in the same repository.
    if not repos and read_spec(run.heads)[1].trained is not None:
        base = str(run.exports / "base")
        merge_run(run.heads, run.exports / "base", trust_remote_code=trusted)
    for target in section.targets:
        choices = _choices(target, section, base=base, repo=repos.get(target), trusted=trusted)
        write = export_with_base if target in repos else export_heads
        result = write(target, run.heads, run.exports / target, choices=choices)
        for warning in result.warnings:
            warn(warning)
        log(f"{result.output}: read back as {target} does")
        written[target] = list(result.files)
        if target in repos:
            sent[target] = _push(result, repos[target], section).url
    write_json(run.exports / EXPORTS_FILE, written)
    return {"targets": list(written), **({"hub": sent} if sent else {})}


def _choices(
    target: Target, section: ExportSection, *, base: str | None, repo: str | None, trusted: bool
) -> ExportChoices:
    runs_chain = target not in TREE_TARGETS
    return ExportChoices(
        base_model=base,
        dtype=section.dtype,
        num_heads=section.num_heads,
        layout=section.layout,
        num_speculative_tokens=section.num_speculative_tokens if runs_chain else None,
        min_version=section.min_version if target == "vllm" else None,
        trust_remote_code=trusted,
        repo=repo,
    )


def _push(result: Exported, repo: str, section: ExportSection) -> Push:
    sent = push_to_hub(result.output, repo, files=result.files, private=not section.public)
    log(f"sent to {sent.url} ({'private' if sent.private else 'public'}), commit {sent.commit}")
    return sent
