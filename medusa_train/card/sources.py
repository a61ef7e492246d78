"""What a model card is made from: the heads, and what their run measured and wrote down."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from medusa_train.card.base_card import BaseCard
from medusa_train.console import warn
from medusa_train.data.conversations import MANIFEST_FILE
from medusa_train.errors import InputError
from medusa_train.evaluate.chain import of_first_heads
from medusa_train.evaluate.quality_report import REPORT_FILE as QUALITY_FILE
from medusa_train.evaluate.ranks import RANKS_FILE, read_ranks
from medusa_train.evaluate.report import REPORT_FILE as ACCURACY_FILE
from medusa_train.evaluate.speed_report import REPORT_FILE as SPEED_FILE
from medusa_train.evaluate.tree_report import CHOICES_FILE, TREE_FILE
from medusa_train.heads.checkpoint import heads_fingerprint, read_spec
from medusa_train.heads.config import BaseIdentity, HeadsConfig
from medusa_train.json_values import read_json
from medusa_train.run_dir import RunDir

REPORT_FILES = (ACCURACY_FILE, TREE_FILE, SPEED_FILE, QUALITY_FILE)
# The reports in words hold each picture with its title and its caption.
_WORDS = ("heads_accuracy.md", "speedup.md", "quality.md")
_PICTURE = re.compile(r"^!\[(?P<title>[^\]\n]+)\]\((?P<name>\w+)\.png\)\n\n(?P<caption>.+)$", re.M)


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture of a report.

    Attributes:
        path: the PNG file.
        title: what it shows.
        caption: how to read it.
    """

    path: Path
    title: str
    caption: str

    @property
    def name(self) -> str:
        """Of its file, without ending."""
        return self.path.stem


@dataclass(frozen=True, slots=True)
class CardSources:
    """All that a card says; what is None is left out of it.

    Attributes:
        config: of the heads.
        identity: the base model that they belong to.
        fingerprint: of the heads; None where a file that it covers is not there.
        base: the base model as the hub knows it.
        tree_paths: the candidate tree that lies beside the heads.
        accuracy: ``heads_accuracy.json``.
        tree: ``tree.json``.
        speedup: ``speedup.json``.
        quality: ``quality.json``.
        pictures: of the reports.
        manifest: of the run.
        recipe: of the run, every default written out.
        data: the manifest of the data set.
    """

    config: HeadsConfig
    identity: BaseIdentity
    fingerprint: str | None
    base: BaseCard
    tree_paths: list[Any] | None = None
    accuracy: Mapping[str, Any] | None = None
    tree: Mapping[str, Any] | None = None
    speedup: Mapping[str, Any] | None = None
    quality: Mapping[str, Any] | None = None
    pictures: tuple[Picture, ...] = ()
    manifest: Mapping[str, Any] | None = None
    recipe: Mapping[str, Any] | None = None
    data: Mapping[str, Any] | None = None

    @property
    def is_joint(self) -> bool:
        """Whether the base model was trained with the heads."""
        return self.identity.trained is not None

    def first(self, num_heads: int) -> CardSources:
        """What is known of the first so many heads alone: no tree or speed is theirs."""
        if num_heads == self.config.num_heads:
            return self
        report = self.accuracy
        if report is not None:
            report = of_first_heads(report, num_heads)
        return replace(
            self,
            config=replace(self.config, num_heads=num_heads),
            accuracy=report,
            tree_paths=None,
            tree=None,
            speedup=None,
            pictures=(),
        )

    def stage(self, name: str) -> Mapping[str, Any]:
        """What the manifest says of a stage of the run."""
        stages: Mapping[str, Any] = (self.manifest or {}).get("stages", {})
        record: Mapping[str, Any] = stages.get(name, {})
        return record

    def pictures_named(self, *names: str) -> list[Picture]:
        """Those of ``names`` that there are, in this order."""
        found = {picture.name: picture for picture in self.pictures}
        return [found[name] for name in names if name in found]


def run_of(heads: Path) -> RunDir | None:
    """The run that wrote a heads directory, if it still lies in it."""
    run = RunDir(heads.absolute().parent)
    is_its = run.heads == heads.absolute() and run.manifest.exists() and run.recipe.exists()
    return run if is_its else None


def read_sources(heads: Path, *, run: RunDir | None, base: BaseCard) -> CardSources:
    """Read everything that there is.

    Args:
        heads: a heads directory.
        run: whose reports and manifests are of these heads; None for the heads alone.
        base: the base model's own card.

    Raises:
        InputError: no heads, or a file that cannot be read.
    """
    config, identity = read_spec(heads)
    try:
        fingerprint = heads_fingerprint(heads)
    except FileNotFoundError:
        fingerprint = None
    choices = heads / CHOICES_FILE
    known: dict[str, Any] = {"tree_paths": read_json(choices) if choices.exists() else None}
    if run is not None:
        known |= _reports(run, fingerprint)
        known |= {"manifest": _read(run.manifest), "recipe": read_recipe(run.recipe)}
        known["data"] = _read(_data_directory(run, known["recipe"]) / MANIFEST_FILE)
    return CardSources(config, identity, fingerprint, base, **known)


def _reports(run: RunDir, fingerprint: str | None) -> dict[str, Any]:
    """The reports that are of these heads."""
    names = dict(zip(("accuracy", "tree", "speedup", "quality"), REPORT_FILES, strict=True))
    found = {key: _read(run.report / name) for key, name in names.items()}
    for key, report in found.items():
        of = _heads_of(key, report, run)
        if of is not None and of != fingerprint:
            warn(f"{run.report / names[key]}: is of other heads, so the card leaves it out")
            found[key] = None
    left_out = {"quality.md"} if found["quality"] is None else set()
    left_out |= {"speedup.md"} if found["speedup"] is None else set()
    left_out |= {"heads_accuracy.md"} if found["accuracy"] is None else set()
    pictures = []
    for name in sorted(set(_WORDS) - left_out):
        path = run.report / name
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for match in _PICTURE.finditer(text):
            picture = path.with_name(f"{match['name']}.png")
            if picture.exists():
                pictures.append(Picture(picture, match["title"], match["caption"]))
    return {**found, "pictures": tuple(pictures)}


def _heads_of(key: str, report: Mapping[str, Any] | None, run: RunDir) -> str | None:
    """The fingerprint of the heads that a report is of, where it says."""
    if report is None:
        return None
    if key == "accuracy":
        path = run.report / RANKS_FILE
        stored: Any = read_ranks(path).metadata.get("heads_fingerprint") if path.exists() else None
    else:
        stored = report.get("heads_fingerprint")
    return stored if isinstance(stored, str) else None


def _read(path: Path) -> Any:
    return read_json(path) if path.exists() else None


def read_recipe(path: Path) -> dict[str, Any]:
    """A run's resolved recipe, as it was written: an older one has fewer keys.

    Raises:
        InputError: it cannot be read.
    """
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not valid YAML") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: must be a recipe, got {type(value).__name__}")
    return value


def _data_directory(run: RunDir, recipe: Mapping[str, Any]) -> Path:
    """The data set: the recipe's own where it names a directory, else the run's."""
    path = recipe.get("data", {}).get("path")
    return Path(path) if path is not None and Path(path).is_dir() else run.data
