"""A recipe file and its ``--set`` overrides → a checked recipe, or every mistake with its line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from medusa_train.errors import InputError, InputErrors
from medusa_train.recipe.checks import combined_mistakes, field_mistakes
from medusa_train.recipe.deepspeed_block import check_deepspeed, read_deepspeed
from medusa_train.recipe.schema import DistillConfig, Recipe
from medusa_train.recipe.source import Mistake, Source, read_source, read_text
from medusa_train.recipe.yaml_reader import Key, dump

Config = TypeVar("Config", bound=BaseModel)

FILE_KEYS: tuple[Key, ...] = (
    ("data", "path"),
    ("data", "chat_template"),
    ("data", "distill", "prompts"),
    ("deepspeed",),
    ("heads", "init_from"),
    ("evaluate", "quality", "prompts"),
)
"""Keys that name files; a relative path is looked up here, else beside the recipe."""


@dataclass(frozen=True, slots=True)
class LoadedRecipe:
    """A recipe without mistakes.

    ``recipe`` has ``run_dir`` set, and its paths are those at which the files were found. A file
    that was not found is in ``missing``, one message each, since a recipe may be checked on a
    machine that has no data.
    """

    recipe: Recipe
    path: Path
    name: str
    run_dir: Path
    missing: tuple[str, ...] = ()

    def require_files(self) -> None:
        """Raise :class:`InputErrors` when a file that the recipe names is not there."""
        if self.missing:
            raise InputErrors(self.missing)

    def chat_template(self) -> str | None:
        """The text of the chat template, or ``None`` for the tokenizer's own."""
        return read_chat_template(self.recipe.data.chat_template)


@dataclass(frozen=True, slots=True)
class LoadedDistillConfig:
    """A generation config without mistakes; ``path`` is ``None`` when it came from flags alone."""

    config: DistillConfig
    path: Path | None
    missing: tuple[str, ...] = ()

    def require_files(self) -> None:
        """Raise :class:`InputErrors` when a file that the config names is not there."""
        if self.missing:
            raise InputErrors(self.missing)

    def chat_template(self) -> str | None:
        """The text of the chat template, or ``None`` for the tokenizer's own."""
        return read_chat_template(self.config.data.chat_template)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read and check the recipe at ``path`` with ``overrides`` of the form ``a.b=value``.

    Raises:
        InputErrors: one message per mistake, ``path:line: key: what is wrong``.
    """
    config, missing = _load(path, overrides, schema=Recipe)
    run_dir = config.run_dir or f"runs/{path.stem}"
    return LoadedRecipe(
        recipe=config.model_copy(update={"run_dir": run_dir}),
        path=path,
        name=path.stem,
        run_dir=Path(run_dir),
        missing=missing,
    )


def load_distill_config(path: Path | None, overrides: Sequence[str] = ()) -> LoadedDistillConfig:
    """Read and check a generation config; without ``path`` it comes from ``overrides`` alone.

    Raises:
        InputErrors: one message per mistake, ``path:line: key: what is wrong``.
    """
    config, missing = _load(path, overrides, schema=DistillConfig)
    return LoadedDistillConfig(config=config, path=path, missing=missing)


def dump_resolved(recipe: BaseModel) -> str:
    """``recipe`` as YAML with every default written out; it loads as the same recipe."""
    return dump(recipe.model_dump(mode="json"))


def is_template_text(value: str) -> bool:
    """Whether ``data.chat_template`` is a template itself rather than the path of one."""
    return "{" in value or "\n" in value


def read_chat_template(value: str | None) -> str | None:
    """The text of the template that ``data.chat_template`` is or names.

    Raises:
        InputError: it names a file that cannot be read.
    """
    if value is None or is_template_text(value):
        return value
    return read_text(Path(value))


def _load(
    path: Path | None, overrides: Sequence[str], *, schema: type[Config]
) -> tuple[Config, tuple[str, ...]]:
    source = read_source(path, overrides)
    mistakes = list(source.mistakes)
    config: Config | None = None
    if source.value is not None:
        config, wrong = field_mistakes(schema, source.value)
        wrong += combined_mistakes(schema, source.value)
        # A value that could not be read has had its message; what follows from that is no news.
        unread = [mistake.key for mistake in mistakes]
        mistakes += [
            Mistake(source.place_of(key), key, message)
            for key, message in wrong
            if not any(other[: len(key)] == key for other in unread)
        ]
    if mistakes:
        mistakes.sort(key=lambda mistake: mistake.place.order)
        raise InputErrors([str(mistake) for mistake in mistakes])
    assert config is not None
    return _with_found_files(config, source)


def _with_found_files(config: Config, source: Source) -> tuple[Config, tuple[str, ...]]:
    missing = []
    for key in (*FILE_KEYS, *_source_keys(source), *_task_keys(source)):
        value = source.get(key)
        if not isinstance(value, str) or (key[-1] == "chat_template" and is_template_text(value)):
            continue
        places = [Path(value).expanduser()]
        if source.path is not None and not places[0].is_absolute():
            places.append(source.path.parent / value)
        found = next((place for place in places if place.exists()), None)
        if found is not None:
            config = _replaced(config, key, str(found))
            if key == ("deepspeed",):
                _check_deepspeed_file(found, source)
        else:
            tried = " and ".join(repr(str(place)) for place in dict.fromkeys(places))
            message = f"no such file; looked for {tried}"
            missing.append(str(Mistake(source.place_of(key), key, message)))
    return config, tuple(missing)


def _check_deepspeed_file(path: Path, source: Source) -> None:
    key: Key = ("deepspeed",)
    try:
        config = read_deepspeed(str(path))
        wrong = [f"{path}: {name}: {what}" for name, what in check_deepspeed(config)]
    except InputError as error:
        wrong = [str(error)]
    if wrong:
        place = source.place_of(key)
        raise InputErrors([str(Mistake(place, key, message)) for message in wrong])


def _source_keys(source: Source) -> list[Key]:
    """The paths of the sources of prompts that are files."""
    where: Key = ("data", "distill", "sources")
    sources = source.get(where) or []
    return [(*where, i, "path") for i, item in enumerate(sources) if item["source"] == "file"]


def _task_keys(source: Source) -> list[Key]:
    """The tasks of lm-eval that are files."""
    where: Key = ("evaluate", "quality", "lm_eval")
    return [
        (*where, i)
        for i, task in enumerate(source.get(where) or [])
        if task.endswith((".yaml", ".yml"))
    ]


def _replaced(config: Config, key: Key, value: str) -> Config:
    name = str(key[0])
    old = getattr(config, name)
    new: Any = value
    if len(key) > 1 and isinstance(old, list):
        index = int(key[1])
        item = value if len(key) == 2 else _replaced(old[index], key[2:], value)
        new = [*old[:index], item, *old[index + 1 :]]
    elif len(key) > 1:
        new = _replaced(old, key[1:], value)
    return config.model_copy(update={name: new})
