"""The stages of a recipe in order: which are done, which run.

A stage is skipped when its output is there and was made from the same things (its fingerprint).
Output of a long stage that was made from other things is never thrown away unasked: the run stops
and says so, and ``--from STAGE`` makes it again.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

from medusa_train.console import format_seconds, is_main_process, log, table
from medusa_train.distributed import on_main, process_group
from medusa_train.errors import InputError
from medusa_train.export_stage import check_repositories
from medusa_train.json_values import read_json
from medusa_train.quality.tasks import check_tasks
from medusa_train.recipe.load import LoadedRecipe, dump_resolved
from medusa_train.run_dir import RunDir, check_writable, locked, write_json, write_text
from medusa_train.stage_actions import LM_EVAL, run_stage
from medusa_train.stages import (
    STAGES,
    Workspace,
    directories_of,
    fingerprint_of,
    named_stages,
    outputs_of,
)
from medusa_train.train.trackers import chosen_trackers

State = Literal["up to date", "to run", "goes on", "differs", "not needed"]

MANIFEST_VERSION = 1
# Hours may lie in what these wrote, so it is made again only when the user says so.
_KEPT_UNLESS_ASKED = frozenset({"data", "distill", "train"})
_PACKAGES = ("medusa-train", "torch", "transformers", "accelerate", "datasets", "tokenizers")


def run_pipeline(
    loaded: LoadedRecipe,
    *,
    only: str | None = None,
    start: str | None = None,
    dry_run: bool = False,
) -> RunDir:
    """Run the stages that the recipe names, in order.

    Args:
        loaded: the recipe.
        only: run this stage alone.
        start: make this stage and all after it again, even where they are up to date.
        dry_run: say what would run, and do nothing.

    Returns:
        The run directory.

    Raises:
        InputError: a stage that the recipe does not have; a missing file; a tracker or lm-eval that
            is not installed; output that was made with other settings; a repository of the hub that
            cannot be written to.
    """
    stages = _chosen(loaded, only=only, start=start)
    loaded.require_files()
    if "train" in stages:
        chosen_trackers(loaded.recipe.tracking)
    quality = loaded.recipe.evaluate.quality
    if "quality" in stages and quality is not None and quality.lm_eval:
        check_tasks(quality.lm_eval, option=LM_EVAL)
    with process_group(use_cpu=bool(loaded.recipe.train.trainer.get("use_cpu", False))):
        return _run(loaded, stages, alone=only is not None, anew=start is not None, dry=dry_run)


def _run(loaded: LoadedRecipe, stages: list[str], *, alone: bool, anew: bool, dry: bool) -> RunDir:
    workspace = Workspace(loaded)
    # Read before anything is written: a base model that is not there stops the run here.
    log(f"base model {loaded.recipe.base_model.name_or_path}: {workspace.base_fingerprint}")
    if dry:
        rows = [
            [stage, "to run" if anew else _state(stage, workspace, alone=alone)] for stage in stages
        ]
        table(f"{loaded.path} → {workspace.run.root}", ["stage", "state"], rows)
        return workspace.run
    if "export" in stages and not _record("export", workspace.run).get("finished"):
        on_main(lambda: check_repositories(loaded.recipe.export))
    with ExitStack() as stack:
        # The lock and the manifest are the main process's; what it writes all processes read.
        on_main(lambda: _begin(stack, stages, workspace, anew=anew))
        for stage in stages:
            _run_or_skip(stage, workspace, alone=alone)
    return workspace.run


def _begin(stack: ExitStack, stages: list[str], workspace: Workspace, *, anew: bool) -> None:
    check_writable(workspace.run.root)
    stack.enter_context(locked(workspace.run.root))
    _start_manifest(workspace)
    if anew:
        _remove_outputs(stages, workspace.run)


def _chosen(loaded: LoadedRecipe, *, only: str | None, start: str | None) -> list[str]:
    assert only is None or start is None, "the command line takes one of them"
    named = named_stages(loaded)
    for option, stage in (("--only", only), ("--from", start)):
        if stage is not None and stage not in named:
            known = "no such stage" if stage not in STAGES else f"{loaded.path} does not have it"
            raise InputError(f"{option} {stage}: {known}; choose from {', '.join(named)}")
    if only is not None:
        return [only]
    return named if start is None else named[named.index(start) :]


def _state(stage: str, workspace: Workspace, *, alone: bool) -> State:
    """What would become of a stage now; ``alone``: it was asked for by ``--only``."""
    record = _record(stage, workspace.run)
    is_done = all(path.exists() for path in outputs_of(stage, workspace.run))
    wanted = fingerprint_of(stage, workspace)
    is_same = wanted is not None and record.get("fingerprint") == wanted
    if is_same and is_done and record.get("finished"):
        return "up to date"
    # Heads that are trained need the states no more, and they may not have been kept.
    is_for_training = stage == "hidden-states" and not alone
    if is_for_training and _state("train", workspace, alone=True) == "up to date":
        return "not needed"
    if is_same:
        return "goes on"
    started = record and any(path.exists() for path in directories_of(stage, workspace.run))
    return "differs" if started and stage in _KEPT_UNLESS_ASKED else "to run"


def _run_or_skip(stage: str, workspace: Workspace, *, alone: bool) -> None:
    state, fingerprint, spent = on_main(lambda: _decide(stage, workspace, alone=alone))
    if state in {"up to date", "not needed"}:
        log(f"{stage}: {state}")
        return
    log(f"{stage}: {'going on' if state == 'goes on' else 'starting'}")
    run = workspace.run
    record = {"fingerprint": fingerprint, "finished": False, "seconds": spent}
    on_main(lambda: _write_record(stage, run, record))
    begin = time.monotonic()
    try:
        facts = dict(run_stage(stage, workspace))
    finally:
        record["seconds"] = spent = round(spent + time.monotonic() - begin, 1)
        if is_main_process():
            _write_record(stage, run, record)
    on_main(lambda: _write_record(stage, run, {**record, "finished": True, **facts}))
    log(f"{stage}: done in {format_seconds(spent)}")


def _decide(stage: str, workspace: Workspace, *, alone: bool) -> tuple[State, str | None, float]:
    """What becomes of a stage, its fingerprint, and the seconds that it has taken already."""
    run = workspace.run
    state = _state(stage, workspace, alone=alone)
    if state == "differs":
        directory = directories_of(stage, run)[-1]
        raise InputError(
            f"{directory}: the stage {stage} ran here with other settings or data; give another "
            f"run_dir (--set run_dir=…), or make it again with --from {stage}, which removes "
            "what is there"
        )
    fingerprint = fingerprint_of(stage, workspace)
    if fingerprint is None and state in {"to run", "goes on"}:
        raise InputError(
            f"{run.root}: the stage {stage} has nothing to read yet; run the stages before it"
        )
    spent = _record(stage, run).get("seconds", 0.0) if state == "goes on" else 0.0
    return state, fingerprint, spent


def _remove_outputs(stages: list[str], run: RunDir) -> None:
    manifest = _read_manifest(run)
    for stage in stages:
        manifest["stages"].pop(stage, None)
        for directory in directories_of(stage, run):
            if directory.exists():
                log(f"removing {directory}")
                shutil.rmtree(directory)
    write_json(run.manifest, manifest)


def _start_manifest(workspace: Workspace) -> None:
    """Write the resolved recipe, and what runs it, before the first stage."""
    run = workspace.run
    write_text(run.recipe, dump_resolved(workspace.recipe))
    manifest = _read_manifest(run)
    manifest.update(
        {
            "schema_version": MANIFEST_VERSION,
            "argv": sys.argv,
            "recipe": str(workspace.loaded.path),
            "git_revision": _git_revision(),
            "base_model": workspace.recipe.base_model.name_or_path,
            "base_fingerprint": workspace.base_fingerprint,
            "versions": {"python": platform.python_version(), **_versions()},
            "machine": {"platform": platform.platform(), "threads": torch.get_num_threads()},
        }
    )
    write_json(run.manifest, manifest)


def _read_manifest(run: RunDir) -> dict[str, Any]:
    manifest = read_json(run.manifest) if run.manifest.exists() else {}
    manifest.setdefault("stages", {})
    return dict(manifest)


def _record(stage: str, run: RunDir) -> dict[str, Any]:
    return dict(_read_manifest(run)["stages"].get(stage, {}))


def _write_record(stage: str, run: RunDir, record: dict[str, Any]) -> None:
    manifest = _read_manifest(run)
    manifest["stages"][stage] = record
    write_json(run.manifest, manifest)


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            # Run from a source tree that is not installed: then its own version is not known.
            continue
    return found


def _git_revision() -> str | None:
    """The commit of the working directory, for recipes that are kept in git; None outside one."""
    try:
        result = subprocess.run(
            ["git", "rev-parse", "HEAD"],  # noqa: S607
            capture_output=True,
            text=True,
            check=False,
            cwd=Path.cwd(),
        )
    except OSError:
        return None
    return result.stdout.strip() or None
