"""What each stage of a recipe reads and writes, and what decides its output.

A stage reads files and writes one directory, so that each can be rerun, resumed and tested alone.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from medusa_train.base_model.changed import changed_directory, changed_fingerprint
from medusa_train.base_model.fingerprint import base_fingerprint
from medusa_train.base_model.load import BaseModel, load_tokenizer
from medusa_train.card.sources import REPORT_FILES
from medusa_train.card.write import CARD_FILE, CARD_VERSION
from medusa_train.console import log, warn
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
)
from medusa_train.data.sources import truncate_rows
from medusa_train.data.teacher_logprobs import (
    TEACHER_DIRECTORY,
    TeacherLogprobsReader,
    read_teacher,
)
from medusa_train.errors import InputError
from medusa_train.evaluate.quality_report import REPORT_FILE as QUALITY_FILE
from medusa_train.evaluate.ranks import RANKS_FILE
from medusa_train.evaluate.tree_report import CHOICES_FILE, TREE_FILE
from medusa_train.generation import load_section, make_chat
from medusa_train.heads.checkpoint import SPEC_FILE, heads_fingerprint
from medusa_train.hidden_states.cache import MANIFEST_FILE as CACHE_MANIFEST
from medusa_train.json_values import fingerprint
from medusa_train.recipe.deepspeed_block import read_deepspeed, zero_stage
from medusa_train.recipe.load import LoadedRecipe
from medusa_train.recipe.schema import HeadsSection, TrainSection
from medusa_train.recipe.section import Section
from medusa_train.run_dir import RunDir, file_fingerprint
from medusa_train.train.build import CacheLocation, TrainingData
from medusa_train.train.build_joint import needs_original, trained_in_float32
from medusa_train.trained_base import load_trained_base

# Keys of a recipe that came after runs were fingerprinted without them.
_LATER_KEYS = frozenset(
    {"hidden_states_dtype", "init_from", "medusa2", "num_rollbacks", "lower_learning_rate_by"}
)

EXPORTS_FILE = "exports.json"
"""In ``exports/``: what was exported; written last."""

STAGES = (
    "data", "distill", "hidden-states", "train", "accuracy", "tree", "quality", "export", "card",
)  # fmt: skip
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
        """The frozen base for training: sharded where it runs under ZeRO-3, else :attr:`base`."""
        complete = self._zero3() if self.recipe.train.hidden_states == "online" else None
        return (
            self.base if complete is None else load_section(self.recipe.base_model, zero3=complete)
        )

    def joint_base(self) -> tuple[BaseModel, BaseModel | None]:
        """A base model to train, in the type for that, and an original where no copy will do."""
        # What is trained is no longer what other stages mean by the base.
        self.__dict__.pop("base", None)
        recipe, section = self.recipe, self.recipe.base_model
        joint = recipe.train.joint
        assert joint is not None
        if trained_in_float32(recipe):
            section = section.model_copy(update={"dtype": "float32"})
        complete = self._zero3()
        if complete is None:
            return load_section(section), None
        base = load_section(section, zero3=complete, runs_alone=False)
        is_copied = joint.teacher == "frozen_copy" and needs_original(recipe)
        return base, load_section(section, zero3=complete) if is_copied else None

    def _zero3(self) -> dict[str, Any] | None:
        """The DeepSpeed configuration that shards the base; None where nothing does."""
        config = self.recipe.deepspeed
        if config is None:
            return None
        complete = read_deepspeed(config)
        if zero_stage(complete) != 3:
            return None
        if self.recipe.base_model.quantization is not None:
            raise InputError(
                "base_model.quantization: ZeRO-3 shards weights that are not quantised; "
                "set train.hidden_states to cached, or ZeRO stage 2"
            )
        return complete

    @cached_property
    def trained_base(self) -> BaseModel:
        """The base model that the run's heads belong to: :attr:`base`, or what was made of it."""
        if self.recipe.train.joint is None:
            return self.base
        self.__dict__.pop("base", None)
        return load_trained_base(
            self.run.heads, **self.recipe.base_model.model_dump(exclude={"name_or_path"})
        )

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
            stored=self._stored(),
        )

    def _stored(self) -> TeacherLogprobsReader | None:
        """The base's log-probabilities that lie with the data, where training reads them."""
        joint = self.recipe.train.joint
        if joint is None or joint.teacher != "stored":
            return None
        directory = self.data_directory / TEACHER_DIRECTORY
        if not directory.is_dir():
            raise InputError(
                f"train.medusa2.teacher: {self.data_directory} has no log-probabilities stored "
                "with it; generate the data with data.distill.teacher_top_n or teacher_samples"
            )
        return read_teacher(directory)

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
    if loaded.recipe.evaluate.quality is not None:
        stages.append("quality")
    if loaded.recipe.export.targets:
        stages.append("export")
    stages.append("card")
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
        case "quality":
            return [run.report / QUALITY_FILE]
        case "export":
            return [run.exports / EXPORTS_FILE]
        case "card":
            return [run.heads / CARD_FILE]
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
            return [run.checkpoints, run.adapters, run.base, run.warm_up.root, run.heads]
        case "tree" | "quality" | "card":
            return []  # their files lie among others', and are written over
        case "export":
            return [run.exports]
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
            settings = recipe.evaluate.model_dump(exclude={"quality"})
            if settings["tree"] and not settings["tree"]["for_this_device"]:
                del settings["tree"]["for_this_device"]  # older runs were fingerprinted without it
            return fingerprint([content, settings]) if needed else None
        case "quality" | "export" | "card":
            return _later_fingerprint(stage, workspace, text=[data, cutting, chat])
        case _:
            if not outputs_of("train", workspace.run)[0].exists():
                return None
            heads = heads_fingerprint(workspace.run.heads)
            settings = recipe.evaluate.model_dump(exclude={"tree", "quality"})
            return fingerprint([loading, data, cutting, heads, settings])


def _later_fingerprint(stage: str, workspace: Workspace, *, text: list[Any]) -> str | None:
    """Of what comes after the heads' own reports."""
    if stage == "quality":
        return _quality_fingerprint(workspace, text)
    run = workspace.run
    if not outputs_of("train", run)[0].exists():
        return None
    heads = heads_fingerprint(run.heads)
    if stage == "export":
        choices = run.heads / CHOICES_FILE
        tree = file_fingerprint(choices) if choices.exists() else None
        # Older runs were fingerprinted without these.
        later = {"push_to_hub", "public"} if workspace.recipe.export.push_to_hub is None else None
        return fingerprint([heads, tree, workspace.recipe.export.model_dump(exclude=later)])
    reports = [run.report / name for name in REPORT_FILES]
    contents = [file_fingerprint(path) if path.exists() else None for path in reports]
    known = [heads, workspace.data_fingerprint, contents]
    return fingerprint([CARD_VERSION, *known, workspace.recipe.model_dump()])


def _deciding(section: HeadsSection | TrainSection) -> dict[str, Any]:
    """The keys that decide the heads; a later one only where it is set, for the runs before it."""
    kept = section.model_dump(exclude={"keep_hidden_states", "hidden_states_ram"})
    _drop_later(section, kept)
    return kept


def _drop_later(section: Section, values: dict[str, Any]) -> None:
    """Drop from its ``values`` the later keys of a section that are not set, at any depth."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if name in _LATER_KEYS and value == field.default:
            values.pop(name, None)
        elif isinstance(value, Section):
            _drop_later(value, values[name])


def _quality_fingerprint(workspace: Workspace, text: list[Any]) -> str | None:
    """The fingerprint of the stage ``quality``; None where the run has no changed base.

    Args:
        workspace: of the run.
        text: what decides the held-out conversations and how prompts are encoded.
    """
    recipe, changed = workspace.recipe, changed_directory(workspace.run)
    section = recipe.evaluate.quality
    if changed is None or section is None:
        return None
    prompts = None if section.prompts is None else file_fingerprint(Path(section.prompts))
    # Both models are in float32, whatever the recipe says.
    models = [
        workspace.base_fingerprint,
        changed_fingerprint(changed),
        recipe.base_model.attn_implementation,
    ]
    settings = recipe.evaluate.model_dump(include={"num_bootstrap", "seed"})
    settings |= section.model_dump(exclude={"prompts", "judge", "lm_eval", "lm_eval_limit"})
    if section.judge is not None:
        settings["judge"] = section.judge.model_dump(include={"url", "model"})
    if section.lm_eval:
        files = [file_fingerprint(Path(t)) for t in section.lm_eval if Path(t).is_file()]
        settings["lm_eval"] = [section.lm_eval, files, section.lm_eval_limit]
    return fingerprint([models, text, prompts, settings])
