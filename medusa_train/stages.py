"""What each stage of a recipe reads, does and writes.

A stage reads files and writes one directory, so that each can be rerun, resumed and tested alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from medusa_train.base_model.fingerprint import base_fingerprint
from medusa_train.base_model.load import BaseModel, load_tokenizer
from medusa_train.console import format_seconds, log, warn
from medusa_train.data.chat import ChatTokenizer
from medusa_train.data.conversations import (
    CONVERSATIONS_FILE,
    MANIFEST_FILE,
    Conversation,
    check_supervised,
    check_token_ids,
    is_dataset,
    read_conversations,
    read_manifest,
    split_of,
    write_dataset,
)
from medusa_train.data.convert import import_manifest
from medusa_train.data.sources import load_conversations_file, truncate_rows
from medusa_train.distill.merge import merge
from medusa_train.distill.run import Shard
from medusa_train.distributed import num_processes, on_main, process_index, wait_for_all
from medusa_train.errors import InputError
from medusa_train.evaluate.heads_accuracy import add_tree, evaluate_heads
from medusa_train.evaluate.ranks import RANKS_FILE, read_ranks
from medusa_train.evaluate.tree import search_tree
from medusa_train.evaluate.tree_report import CHOICES_FILE, TREE_FILE, remove_tree
from medusa_train.generation import generate, load_section, make_chat
from medusa_train.heads.checkpoint import SPEC_FILE, heads_fingerprint, save_tensors
from medusa_train.hidden_states.cache import MANIFEST_FILE as CACHE_MANIFEST
from medusa_train.hidden_states.cache import build_cache
from medusa_train.recipe.deepspeed_block import read_deepspeed, zero_stage
from medusa_train.recipe.load import LoadedRecipe
from medusa_train.recipe.schema import DistillSection, HeadsSection, Recipe, TrainSection
from medusa_train.run_dir import (
    RunDir,
    atomic_directory,
    file_fingerprint,
    fingerprint,
    read_json,
)
from medusa_train.train.build import CacheLocation, TrainingData, build_trainer
from medusa_train.train.checkpoints import last_checkpoint

_ON_ALL_PROCESSES = frozenset({"distill", "hidden-states", "train"})

# Keys of a recipe that came after runs were fingerprinted without them.
_LATER_KEYS = frozenset({"hidden_states_dtype", "init_from"})

STAGES = ("data", "distill", "hidden-states", "train", "accuracy", "tree")
"""Every stage, in order. ``data`` reads a file, ``distill`` writes the data; a run has one."""


class Workspace:
    """A recipe, its run directory, and what its stages share: loaded once, when first needed."""

    def __init__(self, loaded: LoadedRecipe) -> None:
        self.loaded = loaded
        self.recipe = loaded.recipe
        self.run = RunDir(loaded.run_dir)

    @cached_property
    def base_fingerprint(self) -> str:
        """The fingerprint of the base model's files; no weights are loaded."""
        section = self.recipe.base_model
        return base_fingerprint(
            section.name_or_path, gguf_file=section.gguf_file, revision=section.revision
        )

    @cached_property
    def base(self) -> BaseModel:
        """The base model, loaded and checked."""
        return load_section(self.recipe.base_model)

    def training_base(self) -> BaseModel:
        """The base model for training: sharded where it runs under ZeRO-3, else :attr:`base`."""
        config = self.recipe.deepspeed
        if config is not None and self.recipe.train.hidden_states == "online":
            complete = read_deepspeed(config)
            if zero_stage(complete) == 3:
                if self.recipe.base_model.quantization is not None:
                    raise InputError(
                        "base_model.quantization: ZeRO-3 shards weights that are not quantised; "
                        "set train.hidden_states to cached, or ZeRO stage 2"
                    )
                return load_section(self.recipe.base_model, zero3=complete)
        return self.base

    @cached_property
    def num_tokens(self) -> int:
        """Ids of the base's tokenizer; no weights are loaded."""
        section = self.recipe.base_model
        return len(
            load_tokenizer(
                section.name_or_path,
                gguf_file=section.gguf_file,
                revision=section.revision,
                trust_remote_code=section.trust_remote_code,
            )
        )

    @cached_property
    def chat(self) -> ChatTokenizer:
        """The base's tokenizer with the recipe's chat template."""
        kwargs = self.recipe.data.chat_template_kwargs
        return make_chat(self.base, self.loaded.chat_template(), kwargs)

    @property
    def data_directory(self) -> Path:
        """The data set: the recipe's own where it names a directory, else the run's."""
        path = self.recipe.data.path
        return Path(path) if path is not None and is_dataset(Path(path)) else self.run.data

    @property
    def data_fingerprint(self) -> str | None:
        """The fingerprint of the conversations; None while they are not there."""
        path = self.data_directory / CONVERSATIONS_FILE
        return file_fingerprint(path) if (self.data_directory / MANIFEST_FILE).exists() else None

    @cached_property
    def data(self) -> TrainingData:
        """The conversations, checked, split, and cut to length.

        Raises:
            InputErrors: ids that are no tokens of the base.
            InputError: nothing to learn from.
        """
        directory, section = self.data_directory, self.recipe.data
        rows = read_conversations(directory)
        check_token_ids(rows, vocab_size=self.num_tokens, path=directory / CONVERSATIONS_FILE)
        sides: dict[str, list[Conversation]] = {"train": [], "eval": []}
        kept, report = truncate_rows(rows, max_length=section.max_length, directory=directory)
        for line in report.location_lines():
            warn(line)
        # The split reads ids of plain text, so it sees the rows before they are cut.
        whole = {row.id: row for row in rows}
        for row in kept:
            side = split_of(whole[row.id], eval_fraction=section.eval_fraction)
            sides[side].append(row)
        check_supervised(sides["train"], where=str(directory), why=report.summary())
        log(f"data: {len(sides['train'])} conversations to train on, {len(sides['eval'])} held out")
        is_cached = self.recipe.train.hidden_states == "cached"
        return TrainingData(
            train=sides["train"],
            eval=sides["eval"],
            train_cache=self._cache("train") if is_cached else None,
            eval_cache=self._cache("eval") if is_cached else None,
            chat_template_hash=read_manifest(directory).get("chat_template_hash"),
        )

    @property
    def evaluates_while_training(self) -> bool:
        """Whether the recipe asks the Trainer to evaluate."""
        return str(self.recipe.train.trainer.get("eval_strategy", "no")) != "no"

    def _cache(self, split: str) -> CacheLocation:
        fingerprints = fingerprint([fingerprint_of("hidden-states", self), split])
        return CacheLocation(self.run.hidden_states / split, fingerprints)


def named_stages(loaded: LoadedRecipe) -> list[str]:
    """The stages of a recipe, in order."""
    section = loaded.recipe.data
    stages = []
    if section.distill is not None:
        stages.append("distill")
    elif section.path is not None and not is_dataset(Path(section.path)):
        stages.append("data")
    if loaded.recipe.train.hidden_states == "cached":
        stages.append("hidden-states")
    stages.append("train")
    if section.eval_fraction > 0:
        stages.append("accuracy")
        if loaded.recipe.evaluate.tree is not None:
            stages.append("tree")
    return stages


def outputs_of(stage: str, run: RunDir) -> list[Path]:
    """The files whose presence says that the stage was finished."""
    match stage:
        case "data" | "distill":
            return [run.data / MANIFEST_FILE]
        case "hidden-states":
            return [run.hidden_states / "train" / CACHE_MANIFEST]
        case "train":
            return [run.heads / SPEC_FILE]
        case "tree":
            return [run.report / TREE_FILE, run.heads / CHOICES_FILE]
        case _:
            return [run.report / "heads_accuracy.json"]


def directories_of(stage: str, run: RunDir) -> list[Path]:
    """The directories that a stage writes; they go when it is made again."""
    match stage:
        case "data" | "distill":
            return [run.data]
        case "hidden-states":
            return [run.hidden_states]
        case "train":
            return [run.checkpoints, run.heads]
        case "tree":
            return []  # its files lie among others', and are written over
        case _:
            return [run.report]


def fingerprint_of(stage: str, workspace: Workspace) -> str | None:
    """A hash of all that decides a stage's output; None while an input of it is not there."""
    recipe, base = workspace.recipe, workspace.base_fingerprint
    chat = [workspace.loaded.chat_template(), recipe.data.chat_template_kwargs]
    loading = [base, recipe.base_model.dtype, recipe.base_model.attn_implementation]
    # Older runs were fingerprinted without it.
    loading += [recipe.base_model.quantization] if recipe.base_model.quantization else []
    cutting = [recipe.data.max_length, recipe.data.eval_fraction]
    match stage:
        case "data":
            path = Path(recipe.data.path or "")
            content = file_fingerprint(path) if path.is_file() else None
            return None if content is None else fingerprint([base, chat, content])
        case "distill":
            section = recipe.data.distill
            assert section is not None
            paths = [section.prompts, *(s.path for s in section.sources if s.source == "file")]
            files = [file_fingerprint(Path(path)) for path in paths if path is not None]
            settings = section.model_dump(exclude={"prompts", "sources", "server"})
            sources = [source.model_dump(exclude={"path"}) for source in section.sources]
            names = [s.path for s in section.sources if s.source == "dataset"]
            return fingerprint(
                [loading, chat, settings, sources, names, files, section.server is not None]
            )
    data = workspace.data_fingerprint
    if data is None:
        return None
    match stage:
        case "hidden-states":
            # Soft targets need each span's last state too.
            more = ["with last"] if recipe.train.soft_target_weight else []
            dtype = recipe.train.hidden_states_dtype
            more += [dtype] if dtype != "bfloat16" else []
            return fingerprint([loading, data, cutting, *more])
        case "train":
            more = ["packing"] if recipe.data.packing else []
            section_train = _deciding(recipe.train)
            heads_section = _deciding(recipe.heads)
            return fingerprint([loading, data, cutting, heads_section, section_train, *more])
        case "tree":
            ranks = workspace.run.report / RANKS_FILE
            content = file_fingerprint(ranks) if ranks.exists() else None
            needed = outputs_of("train", workspace.run)[0].exists()
            return fingerprint([content, recipe.evaluate.model_dump()]) if needed else None
        case _:
            if not outputs_of("train", workspace.run)[0].exists():
                return None
            heads = heads_fingerprint(workspace.run.heads)
            settings = recipe.evaluate.model_dump(exclude={"tree"})
            return fingerprint([loading, data, cutting, heads, settings])


def _deciding(section: HeadsSection | TrainSection) -> dict[str, Any]:
    """The keys that decide the heads; a later one only where it is set, for the runs before it."""
    kept = section.model_dump(exclude={"keep_hidden_states", "hidden_states_ram"})
    for name in _LATER_KEYS & kept.keys():
        if kept[name] == type(section).model_fields[name].default:
            del kept[name]
    return kept


def run_stage(stage: str, workspace: Workspace) -> Mapping[str, Any]:
    """Run one stage; what it returns is written into the manifest beside its time."""
    actions: Mapping[str, Callable[[Workspace], Mapping[str, Any]]] = {
        "data": _import_data,
        "distill": _distill,
        "hidden-states": _hidden_states,
        "train": _train,
        "accuracy": _accuracy,
        "tree": _tree,
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
    generate(workspace.recipe.base_model, section, output=shards[index], shard=shard, **options)
    wait_for_all()

    def put_together() -> dict[str, Any]:
        manifest = merge(shards, output)
        for directory in shards:
            shutil.rmtree(directory)
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


def _train(workspace: Workspace) -> Mapping[str, Any]:
    run, data = workspace.run, workspace.data
    if workspace.evaluates_while_training and not data.eval:
        raise InputError(
            "train.trainer.eval_strategy: no conversation is held out to evaluate on; raise "
            "data.eval_fraction, or set eval_strategy to 'no'"
        )
    base = workspace.training_base()
    trainer = build_trainer(
        workspace.recipe, base=base, data=data, run=run, run_name=workspace.loaded.name
    )
    checkpoint = last_checkpoint(run.checkpoints)
    if checkpoint is not None:
        log(f"going on from {checkpoint}")
    trainer.fit(checkpoint)
    tensors = trainer.whole_tensors()

    def save() -> None:
        with atomic_directory(run.heads) as temporary:
            config = trainer.module.heads.config
            save_tensors(tensors, temporary, config=config, base=trainer.identity)
            base.tokenizer.save_pretrained(temporary)
        if not workspace.recipe.train.keep_hidden_states:
            shutil.rmtree(run.hidden_states, ignore_errors=True)

    on_main(save)
    # Models that later stages load are not the training's, and are not sharded.
    unset_hf_deepspeed_config()
    return {
        "steps": trainer.state.global_step,
        "seed": trainer.args.seed,
        "processes": num_processes(),
        **_best(trainer.state, workspace.recipe),
    }


def _best(state: TrainerState, recipe: Recipe) -> Mapping[str, Any]:
    """The checkpoint that was best on the held-out text, if there was evaluation."""
    if state.best_global_step is None or state.best_metric is None:
        return {}
    name = recipe.train.trainer.get("metric_for_best_model", "acceptance_length")
    return {"best_step": state.best_global_step, f"best_{name}": state.best_metric}


def _facts(workspace: Workspace) -> dict[str, str]:
    """What the head of the report says of the run."""
    seconds = read_json(workspace.run.manifest)["stages"].get("train", {}).get("seconds")
    facts = {
        "recipe": workspace.loaded.name,
        "trained on": f"{len(workspace.data.train):,} conversations",
        "device": f"{workspace.base.device}, {torch.get_num_threads()} CPU threads",
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
        workspace.base,
        run.heads,
        conversations=conversations,
        output=run.report,
        metrics=run.metrics,
        facts=facts,
        **recipe.evaluate.model_dump(exclude={"tree"}),
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
        **section.tree.model_dump(),
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
