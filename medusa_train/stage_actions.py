"""What each stage of a recipe does."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from medusa_train.base_model.changed import changed_directory, check_changed
from medusa_train.base_model.load import load_dtype
from medusa_train.card.of_run import write_run_card
from medusa_train.console import format_seconds, log, process_index, warn
from medusa_train.data.conversations import MANIFEST_FILE, read_manifest, write_dataset
from medusa_train.data.convert import import_manifest
from medusa_train.data.sources import load_conversations_file
from medusa_train.distill.merge import merge
from medusa_train.distill.run import Shard
from medusa_train.distributed import num_processes, on_main, wait_for_all
from medusa_train.errors import InputError
from medusa_train.evaluate.heads_accuracy import add_tree, evaluate_heads
from medusa_train.evaluate.quality_words import verdict_line
from medusa_train.evaluate.ranks import RANKS_FILE, read_ranks
from medusa_train.evaluate.tree import search_tree
from medusa_train.evaluate.tree_report import remove_tree
from medusa_train.export_stage import run_export
from medusa_train.generation import generate
from medusa_train.heads.checkpoint import load_heads, read_spec
from medusa_train.hidden_states.cache import build_cache
from medusa_train.json_values import read_json
from medusa_train.medusa_model import MedusaModel
from medusa_train.quality.judge import JudgeOptions
from medusa_train.quality.measure import compare_models
from medusa_train.quality.options import QualityOptions
from medusa_train.quality.subject import subject_of_run
from medusa_train.recipe.schema import DistillSection
from medusa_train.stages import Workspace
from medusa_train.step_latency import step_kind, step_latency
from medusa_train.training_stage import train
from medusa_train.tree.latency import LatencyCurve

LM_EVAL = "evaluate.quality.lm_eval"
_JUDGE_URL = "evaluate.quality.judge.url"
_ON_ALL_PROCESSES = frozenset({"distill", "hidden-states", "train"})


def run_stage(stage: str, workspace: Workspace) -> Mapping[str, Any]:
    """Run one stage; what it returns is written into the manifest beside its time."""
    actions: Mapping[str, Callable[[Workspace], Mapping[str, Any]]] = {
        "data": _import_data,
        "distill": _distill,
        "hidden-states": _hidden_states,
        "train": train,
        "accuracy": _accuracy,
        "tree": _tree,
        "quality": _quality,
        "export": run_export,
        "card": _card,
    }
    action = actions[stage]
    if stage in _ON_ALL_PROCESSES:
        return action(workspace)
    return on_main(lambda: action(workspace))


def _import_data(workspace: Workspace) -> Mapping[str, Any]:
    section, chat = workspace.recipe.data, workspace.chat
    path = Path(section.path or "")
    rows, report = load_conversations_file(path, chat, strict=section.strict)
    for line in report.location_lines():
        warn(line)
    for text, number in report.notes.items():
        log(f"{path}: {text}: {number}")
    manifest = {
        "base_model": workspace.base.name_or_path,
        "base_fingerprint": workspace.base.fingerprint,
        "source": path.name,
        **import_manifest(rows, report, chat),
    }
    count = write_dataset(workspace.run.data, rows, manifest=manifest)
    return {"num_conversations": count}


def _distill(workspace: Workspace) -> Mapping[str, Any]:
    recipe = workspace.recipe
    section = recipe.data.distill
    assert section is not None
    options: dict[str, Any] = {
        # A run needs its base model for what follows, so it is loaded once and shared.
        "load": lambda: workspace.base,
        "template": workspace.loaded.chat_template(),
        "kwargs": recipe.data.chat_template_kwargs,
    }
    if section.server is None and num_processes() > 1:
        return _distill_together(workspace, section, options)
    manifest = on_main(
        lambda: generate(recipe.base_model, section, output=workspace.run.data, **options)
    )
    return {"num_conversations": manifest["num_conversations"]}


def _distill_together(
    workspace: Workspace, section: DistillSection, options: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Every process writes its shard; the main one puts them together, to the same bytes."""
    num, output = num_processes(), workspace.run.data
    shards = [output / f"shard-{index}-of-{num}" for index in range(num)]
    others = set(output.glob("shard-*-of-*")) - set(shards)
    if others:
        then = min(others).name.rpartition("-")[2]
        raise InputError(
            f"{output}: {then} processes have written a part of this data; go on with as many "
            f"(--devices {then}), or make it again with --from distill"
        )
    index = process_index()
    shard = Shard(index, num)
    # A kill may have come between the data set and the end of its shards.
    is_merged = on_main((output / MANIFEST_FILE).exists)
    if not is_merged:
        generate(workspace.recipe.base_model, section, output=shards[index], shard=shard, **options)
        wait_for_all()

    def put_together() -> dict[str, Any]:
        manifest = read_manifest(output) if is_merged else merge(shards, output)
        for directory in shards:
            shutil.rmtree(directory, ignore_errors=True)
        return manifest

    manifest = on_main(put_together)
    return {"num_conversations": manifest["num_conversations"]}


def _hidden_states(workspace: Workspace) -> Mapping[str, Any]:
    data = workspace.data
    splits = [(data.train, data.train_cache)]
    if workspace.evaluates_while_training:
        splits.append((data.eval, data.eval_cache))
    for rows, cache in splits:
        assert cache is not None
        build_cache(
            workspace.base.model,
            rows,
            directory=cache.directory,
            fingerprint=cache.fingerprint,
            dtype=workspace.recipe.train.hidden_states_dtype,
            with_last=workspace.recipe.train.soft_target_weight > 0,
            process_index=process_index(),
            num_processes=num_processes(),
            wait=wait_for_all,
        )
    return {}


def _facts(workspace: Workspace) -> dict[str, str]:
    """What the head of the report says of the run."""
    seconds = read_json(workspace.run.manifest)["stages"].get("train", {}).get("seconds")
    facts = {
        "recipe": workspace.loaded.name,
        "trained on": f"{len(workspace.data.train):,} conversations",
        "device": f"{workspace.trained_base.device}, {torch.get_num_threads()} CPU threads",
    }
    return facts if seconds is None else {**facts, "training": format_seconds(seconds)}


def _accuracy(workspace: Workspace) -> Mapping[str, Any]:
    recipe, run = workspace.recipe, workspace.run
    conversations = workspace.data.eval
    if not conversations:
        warn("no conversation is held out (data.eval_fraction), so there is no accuracy report")
        return {"num_conversations": 0}
    remove_tree(run.report)
    facts = _facts(workspace)
    evaluate_heads(
        workspace.trained_base,
        run.heads,
        conversations=conversations,
        output=run.report,
        metrics=run.metrics,
        facts=facts,
        **recipe.evaluate.model_dump(exclude={"tree", "quality"}),
    )
    return {"num_conversations": len(conversations), "facts": facts}


def _tree(workspace: Workspace) -> Mapping[str, Any]:
    section, run = workspace.recipe.evaluate, workspace.run
    assert section.tree is not None
    if not (run.report / RANKS_FILE).exists():
        warn("no conversation is held out (data.eval_fraction), so there is no tree")
        return {"num_nodes": 0}
    result = search_tree(
        read_ranks(run.report / RANKS_FILE),
        **section.tree.model_dump(exclude={"for_this_device"}),
        latency=_latency(workspace) if section.tree.for_this_device else None,
        num_bootstrap=section.num_bootstrap,
        seed=section.seed,
    )
    for note in result["notes"]:
        warn(note)
    record = read_json(run.manifest)["stages"].get("accuracy", {})
    add_tree(
        result,
        report_directory=run.report,
        heads_directory=run.heads,
        metrics=run.metrics,
        facts=record.get("facts"),
    )
    return {"num_nodes": result["num_nodes"]}


def _quality(workspace: Workspace) -> Mapping[str, Any]:
    section, run = workspace.recipe.evaluate, workspace.run
    changed = changed_directory(run)
    assert section.quality is not None
    assert changed is not None, "without one the stage has nothing to read"
    check_changed(changed)
    quality = section.quality
    judge = quality.judge
    report = compare_models(
        subject_of_run(workspace, changed),
        QualityOptions(
            prompts=None if quality.prompts is None else Path(quality.prompts),
            judge=None if judge is None else JudgeOptions(**judge.model_dump(), option=_JUDGE_URL),
            lm_eval=tuple(quality.lm_eval),
            lm_eval_option=LM_EVAL,
            **quality.model_dump(exclude={"prompts", "judge", "lm_eval"}),
            num_bootstrap=section.num_bootstrap,
            seed=section.seed,
            output=run.report,
        ),
    )
    log(verdict_line(report))
    return {"kept": report["verdict"]["kept"]}


def _card(workspace: Workspace) -> Mapping[str, Any]:
    write_run_card(workspace.run)
    return {}


def _latency(workspace: Workspace) -> LatencyCurve:
    """How long the steps of this run's heads take on this device."""
    section, heads = workspace.recipe.base_model, workspace.run.heads
    tree = workspace.recipe.evaluate.tree
    assert tree is not None
    config, identity = read_spec(heads)
    dtype = load_dtype(section.name_or_path, dtype=section.dtype, revision=section.revision)

    def load() -> MedusaModel:
        base = workspace.trained_base
        loaded, _ = load_heads(heads, base_fingerprint=base.fingerprint, device=base.device)
        return MedusaModel(base, loaded)

    return step_latency(
        load,
        kind=step_kind(
            config,
            base_fingerprint=identity.fingerprint,
            dtype=dtype or section.dtype,
            attn_implementation=section.attn_implementation,
            quantization=section.quantization,
        ),
        num_nodes=tree.num_nodes,
    )
