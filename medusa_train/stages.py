"""What each stage of a recipe reads, does and writes.

A stage reads files and writes one directory, so that each can be rerun, resumed and tested alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from medusa_train.base_model.fingerprint import base_fingerprint
from medusa_train.base_model.load import (
    BaseModel,
    load_base_model,
    load_max_length,
    load_stop_ids,
    load_tokenizer,
)
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
from medusa_train.distill.in_process_writer import InProcessWriter
from medusa_train.distill.run import Shard, run_distill
from medusa_train.distill.server import ServerWriter
from medusa_train.distill.settings import DistillSettings, PromptSource
from medusa_train.distill.writer import Teacher
from medusa_train.errors import InputError
from medusa_train.evaluate.heads_accuracy import evaluate_heads
from medusa_train.heads.checkpoint import SPEC_FILE, heads_fingerprint, save_heads
from medusa_train.hidden_states.cache import MANIFEST_FILE as CACHE_MANIFEST
from medusa_train.hidden_states.cache import build_cache
from medusa_train.recipe.load import LoadedDistillConfig, LoadedRecipe
from medusa_train.recipe.schema import BaseModelSection, DistillSection
from medusa_train.run_dir import (
    RunDir,
    atomic_directory,
    check_writable,
    file_fingerprint,
    fingerprint,
    read_json,
)
from medusa_train.train.build import CacheLocation, TrainingData, build_trainer
from medusa_train.train.trainer import last_checkpoint

# Keys of a recipe's data.distill that are the writer's and not the generation's.
_WRITERS_KEYS = frozenset(
    {"batch_size", "block_size", "teacher_top_n", "teacher_samples", "server"}
)

STAGES = ("data", "distill", "hidden-states", "train", "accuracy")
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
        return _load(self.recipe.base_model)

    @cached_property
    def chat(self) -> ChatTokenizer:
        """The base's tokenizer with the recipe's chat template."""
        kwargs = self.recipe.data.chat_template_kwargs
        return _chat(self.base, self.loaded.chat_template(), kwargs)

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
        check_token_ids(rows, vocab_size=self.base.num_tokens, path=directory / CONVERSATIONS_FILE)
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
    return [*stages, "accuracy"] if section.eval_fraction > 0 else stages


def outputs_of(stage: str, run: RunDir) -> list[Path]:
    """The files whose presence says that the stage was finished."""
    match stage:
        case "data" | "distill":
            return [run.data / MANIFEST_FILE]
        case "hidden-states":
            return [run.hidden_states / "train" / CACHE_MANIFEST]
        case "train":
            return [run.heads / SPEC_FILE]
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
        case _:
            return [run.report]


def fingerprint_of(stage: str, workspace: Workspace) -> str | None:
    """A hash of all that decides a stage's output; None while an input of it is not there."""
    recipe, base = workspace.recipe, workspace.base_fingerprint
    chat = [workspace.loaded.chat_template(), recipe.data.chat_template_kwargs]
    loading = [base, recipe.base_model.dtype, recipe.base_model.attn_implementation]
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
            return fingerprint([loading, data, cutting, *more])
        case "train":
            section_train = recipe.train.model_dump(exclude={"keep_hidden_states"})
            return fingerprint([loading, data, cutting, recipe.heads.model_dump(), section_train])
        case _:
            if not outputs_of("train", workspace.run)[0].exists():
                return None
            heads = heads_fingerprint(workspace.run.heads)
            return fingerprint([loading, data, cutting, heads, recipe.evaluate.model_dump()])


def run_stage(stage: str, workspace: Workspace) -> Mapping[str, Any]:
    """Run one stage; what it returns is written into the manifest beside its time."""
    actions: Mapping[str, Callable[[Workspace], Mapping[str, Any]]] = {
        "data": _import_data,
        "distill": _distill,
        "hidden-states": _hidden_states,
        "train": _train,
        "accuracy": _accuracy,
    }
    return actions[stage](workspace)


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
    manifest = _generate(
        recipe.base_model,
        section,
        # A run needs its base model for what follows, so it is loaded once and shared.
        base=workspace.base if section.server is None else None,
        template=workspace.loaded.chat_template(),
        kwargs=recipe.data.chat_template_kwargs,
        output=workspace.run.data,
    )
    return {"num_conversations": manifest["num_conversations"]}


def _chat(base: BaseModel, template: str | None, kwargs: Mapping[str, Any]) -> ChatTokenizer:
    return ChatTokenizer(
        base.tokenizer,
        stop_ids=base.stop_ids,
        chat_template=template,
        chat_template_kwargs=kwargs,
    )


def generate_dataset(
    loaded: LoadedDistillConfig, *, output: Path, shard: tuple[int, int] | None = None
) -> dict[str, Any]:
    """Generate a data set apart from any run: what ``medusa-distill generate`` does.

    Args:
        loaded: what to generate.
        output: directory of the data set.
        shard: (i, n): do part i of n.

    Returns:
        The data set's manifest; of a shard, what it is part of.
    """
    config = loaded.config
    check_writable(output)
    return _generate(
        config.base_model,
        config.data.distill,
        base=None,
        template=loaded.chat_template(),
        kwargs=config.data.chat_template_kwargs,
        output=output,
        shard=None if shard is None else Shard(*shard),
    )


def _generate(
    base_model: BaseModelSection,
    section: DistillSection,
    *,
    base: BaseModel | None,
    template: str | None,
    kwargs: Mapping[str, Any],
    output: Path,
    shard: Shard | None = None,
) -> dict[str, Any]:
    """Generate in process with ``base`` (loaded if it is None), or with servers, without it."""
    shared: dict[str, Any] = {"settings": _settings(section), "output": output, "shard": shard}
    if section.server is None:
        base = _load(base_model) if base is None else base
        writer = InProcessWriter(
            base.model,
            vocab_size=base.num_tokens,
            max_rows=section.batch_size,
            unit_size=section.block_size,
            teacher=_teacher(section),
        )
        return run_distill(
            writer,
            _chat(base, template, kwargs),
            base_model=base.name_or_path,
            base_fingerprint=base.fingerprint,
            **shared,
        )
    place = {"gguf_file": base_model.gguf_file, "revision": base_model.revision}
    name = base_model.name_or_path
    tokenizer = load_tokenizer(name, trust_remote_code=base_model.trust_remote_code, **place)
    chat = ChatTokenizer(
        tokenizer,
        stop_ids=load_stop_ids(name, tokenizer=tokenizer, revision=base_model.revision),
        chat_template=template,
        chat_template_kwargs=kwargs,
    )
    options = section.server.model_dump(exclude={"max_failed"})
    max_length = load_max_length(name, revision=base_model.revision)
    with ServerWriter(
        chat=chat, teacher=_teacher(section), max_length=max_length, **options
    ) as servers:
        return run_distill(
            servers,
            chat,
            base_model=name,
            base_fingerprint=base_fingerprint(name, **place),
            max_failed=section.server.max_failed,
            **shared,
        )


def _load(section: BaseModelSection) -> BaseModel:
    log(f"loading {section.name_or_path}")
    return load_base_model(**section.model_dump())


def _settings(section: DistillSection) -> DistillSettings:
    """The recipe's section without what the writer alone needs."""
    sources = tuple(PromptSource(**source.model_dump()) for source in section.sources)
    if not sources:
        kind: Literal["model", "file"] = "model" if section.prompts is None else "file"
        sources = (PromptSource(kind, section.prompts),)
    values = section.model_dump(exclude={"prompts", *_WRITERS_KEYS})
    languages = tuple(section.languages)
    return DistillSettings(**{**values, "sources": sources, "languages": languages})


def _teacher(section: DistillSection) -> Teacher | None:
    if section.teacher_top_n is not None:
        return Teacher("top", section.teacher_top_n)
    return None if section.teacher_samples is None else Teacher("samples", section.teacher_samples)


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
            with_last=workspace.recipe.train.soft_target_weight > 0,
        )
    return {}


def _train(workspace: Workspace) -> Mapping[str, Any]:
    run, data = workspace.run, workspace.data
    if workspace.evaluates_while_training and not data.eval:
        raise InputError(
            "train.trainer.eval_strategy: no conversation is held out to evaluate on; raise "
            "data.eval_fraction, or set eval_strategy to 'no'"
        )
    trainer = build_trainer(
        workspace.recipe, base=workspace.base, data=data, run=run, run_name=workspace.loaded.name
    )
    checkpoint = last_checkpoint(run.checkpoints)
    if checkpoint is not None:
        log(f"going on from {checkpoint}")
    trainer.fit(checkpoint)
    with atomic_directory(run.heads) as temporary:
        save_heads(trainer.module.heads, temporary, base=trainer.identity)
        workspace.base.tokenizer.save_pretrained(temporary)
    if not workspace.recipe.train.keep_hidden_states:
        shutil.rmtree(run.hidden_states, ignore_errors=True)
    return {"steps": trainer.state.global_step, "seed": trainer.args.seed}


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
    evaluate_heads(
        workspace.base,
        run.heads,
        conversations=conversations,
        output=run.report,
        metrics=run.metrics,
        facts=_facts(workspace),
        **recipe.evaluate.model_dump(),
    )
    return {"num_conversations": len(conversations)}
