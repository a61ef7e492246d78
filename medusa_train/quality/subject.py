"""Which two models are compared: those of a run, or those that the user names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_train.base_model.changed import (
    changed_directory,
    changed_fingerprint,
    check_changed,
    named_base,
)
from medusa_train.base_model.fingerprint import base_fingerprint
from medusa_train.errors import InputError
from medusa_train.json_values import read_json
from medusa_train.recipe.load import load_recipe, read_chat_template
from medusa_train.recipe.schema import BaseModelSection
from medusa_train.run_dir import RunDir
from medusa_train.stages import Workspace


@dataclass(frozen=True, slots=True)
class Subject:
    """The models of one measurement; no weights are loaded.

    Attributes:
        loading: options of :func:`medusa_train.base_model.load.load_base_model` for the original,
            but for its dtype.
        original_fingerprint: of the original's files.
        changed: directory of the changed model or of its adapters.
        changed_fingerprint: of its files.
        workspace: of the run; None where there is none.
        chat_template: text of the template; None for the tokenizer's own.
        chat_template_kwargs: further variables of the template.
    """

    loading: Mapping[str, Any]
    original_fingerprint: str
    changed: Path
    changed_fingerprint: str
    workspace: Workspace | None
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any]


def find_subject(
    run: Path | None,
    *,
    base_model: str | None,
    model: Path | None,
    chat_template: str | None,
) -> Subject:
    """Find both models.

    Args:
        run: a run directory; None: the user names the models.
        base_model: hub id or directory of the original; None for the run's or the adapters' own.
        model: directory of the changed model; None for the run's.
        chat_template: path or text; None for the run's.

    Raises:
        InputError: one of them is missing or no model, or the original is not that of the run.
    """
    template = read_chat_template(chat_template)
    if run is None:
        changed = _given(model)
        name = base_model or named_base(changed)
        if name is None:
            raise InputError(
                f"{changed}: says nothing of the model that it was trained from; give that with "
                "--base-model"
            )
        return _subject(BaseModelSection(name_or_path=name), changed, None, template)
    workspace = _workspace(run, base_model)
    found = model or changed_directory(workspace.run)
    if found is None:
        raise InputError(
            f"{run}: has not changed its base model: neither adapters nor base is in it; give "
            "the run of a recipe that does, or a model with --model"
        )
    check_changed(found)
    _check_original(workspace)
    return subject_of_run(workspace, found, chat_template=template)


def subject_of_run(
    workspace: Workspace, changed: Path, *, chat_template: str | None = None
) -> Subject:
    """The base of a run and its changed form.

    Args:
        workspace: of the run.
        changed: directory of the changed model or of its adapters.
        chat_template: text; None for the recipe's.
    """
    template = chat_template or workspace.loaded.chat_template()
    return _subject(workspace.recipe.base_model, changed, workspace, template)


def _subject(
    section: BaseModelSection, changed: Path, workspace: Workspace | None, template: str | None
) -> Subject:
    # Both are compared in float32, whatever the run was trained with.
    loading = section.model_dump(exclude={"dtype", "quantization"})
    return Subject(
        loading=loading,
        original_fingerprint=base_fingerprint(
            section.name_or_path, gguf_file=section.gguf_file, revision=section.revision
        ),
        changed=changed,
        changed_fingerprint=changed_fingerprint(changed),
        workspace=workspace,
        chat_template=template,
        chat_template_kwargs=(
            {} if workspace is None else workspace.recipe.data.chat_template_kwargs
        ),
    )


def _given(model: Path | None) -> Path:
    if model is None:
        raise InputError(
            "RUN: give a run directory, or the changed model with --model and its original with "
            "--base-model"
        )
    check_changed(model)
    return model


def _workspace(run: Path, base_model: str | None) -> Workspace:
    directory = RunDir(run)
    if not directory.recipe.exists():
        raise InputError(
            f"{run}: not a run directory: no {directory.recipe.name} in it; give RUN, or --model "
            "and --base-model without one"
        )
    overrides = [f"run_dir={run}"]
    if base_model is not None:
        overrides.append(f"base_model.name_or_path={base_model}")
    return Workspace(load_recipe(directory.recipe, overrides))


def _check_original(workspace: Workspace) -> None:
    """Refuse another base than the run began with: its figures would say nothing of the run."""
    if not workspace.run.manifest.exists():
        return
    known = read_json(workspace.run.manifest).get("base_fingerprint")
    if known is not None and known != workspace.base_fingerprint:
        raise InputError(
            f"{workspace.recipe.base_model.name_or_path}: has the fingerprint "
            f"{workspace.base_fingerprint}, but the run began with a base model that has {known}; "
            "give that one (--base-model)"
        )
