"""What a card says of training: the data, the recipe, and the run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medusa_train.card.markdown import block, bullets, folded, heading, picture, table
from medusa_train.card.sources import CardSources
from medusa_train.console import format_seconds
from medusa_train.evaluate.tables import counted
from medusa_train.heads.config import HeadsConfig
from medusa_train.recipe.yaml_reader import dump

TRAINING_PICTURES = ("training_loss", "training_top1")
_METHODS = {
    "medusa1": "Medusa-1: the base model is frozen",
    "medusa2": "Medusa-2: the base model is trained with the heads",
}
_SOURCES = {
    "magpie": "written by the base model itself from its chat template (Magpie)",
    "continuation": "begun by the base model itself from nothing",
    "demo": "of a small set that comes with medusa-train",
}
_VERSIONS = ("medusa-train", "torch", "transformers")
# Where results go, who watches, and on whose machine: no part of how heads are trained.
_PRIVATE = frozenset(
    {"run_dir", "tracking", "url", "urls", "api_key_env", "hub_token", "hub_model_id"}
)


def training_section(sources: CardSources) -> list[str]:
    """The heads, how they were trained, and the whole recipe."""
    rows = [["heads", _shape(sources.config)], *_trained(sources)]
    parts = [heading("Training"), table(["", ""], rows)]
    parts += map(picture, sources.pictures_named(*TRAINING_PICTURES))
    if sources.recipe is not None:
        text = block(dump(public_recipe(sources.recipe)), language="yaml")
        parts.append(folded("The recipe, with every default", text))
    return parts


def data_section(sources: CardSources) -> list[str]:
    """What the heads were trained on, and what was left out of it."""
    data = sources.data
    if data is None:
        return []
    lines = [*_prompts(data), *_answers(data), *_counts(data)]
    parts = [heading("Data"), bullets(lines)]
    rows = [
        [f"{what}: {reason}", f"{count:,}"]
        for what, key in (
            ("dropped", "num_dropped"), ("shortened", "num_shortened"),
            ("failed", "num_failed"), ("repaired", "num_repaired"),
        )
        for reason, count in (data.get(key) or {}).items()
    ]  # fmt: skip
    if rows:
        parts.append(table(["left out or changed", "rows"], rows))
    return parts


def public_recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe without what belongs to one machine or one user.

    Directories of results, trackers, servers and tokens are left out, and of a path from the root
    or the home directory its last part stays.
    """
    return {key: _public(value) for key, value in recipe.items() if key not in _PRIVATE}


def _public(value: Any) -> Any:
    if isinstance(value, Mapping):
        return public_recipe(value)
    if isinstance(value, list):
        return [_public(item) for item in value]
    if isinstance(value, str) and value.startswith(("/", "~")) and "\n" not in value:
        return Path(value).name
    return value


def _shape(config: HeadsConfig) -> str:
    count = config.num_heads * config.head_parameters
    matrices = {
        "full": "an output matrix of its own",
        "shared": "the base model's output matrix",
    }
    return (
        f"{config.num_heads}, each of {counted(config.num_layers, 'residual layer')} and "
        f"{matrices[config.layout]}; {count / 1e6:,.1f} million parameters"
    )


def _trained(sources: CardSources) -> list[list[str]]:
    rows = []
    recipe, manifest = sources.recipe or {}, sources.manifest or {}
    section, record = recipe.get("train") or {}, sources.stage("train")
    facts = sources.stage("accuracy").get("facts") or {}
    if (method := section.get("method")) in _METHODS:
        rows.append(["method", _METHODS[method]])
    if "trained on" in facts:
        rows.append(["trained on", facts["trained on"]])
    if trainer := _public(section.get("trainer") or {}):
        named = ", ".join(f"`{key}` {value}" for key, value in trainer.items() if _is_short(value))
        rows.append(["arguments of the Trainer", named])
    if share := section.get("soft_target_weight"):
        rows.append(["share of soft targets", str(share)])
    if steps := record.get("steps"):
        processes = record.get("processes", 1)
        rows.append(["steps", f"{steps:,}" + (f", {processes} processes" if processes > 1 else "")])
    if record.get("finished") and record.get("seconds"):
        where = f" on {facts['device']}" if "device" in facts else ""
        rows.append(["time", format_seconds(record["seconds"]) + where])
    versions = manifest.get("versions") or {}
    if known := [f"{name} {versions[name]}" for name in _VERSIONS if name in versions]:
        rows.append(["versions", ", ".join(known)])
    return rows


def _is_short(value: Any) -> bool:
    return isinstance(value, str | int | float | bool)


def _prompts(data: Mapping[str, Any]) -> list[str]:
    sources = data.get("sources")
    if isinstance(sources, Mapping):
        parts = [
            f"{count:,} " + _SOURCES.get(name, f"of `{name.replace('`', chr(39))}`")
            for name, count in sources.items()
        ]
        lines = [f"prompts: {'; '.join(parts)}"]
        drawn = data.get("prompts_of_the_model") or {}
        if drawn.get("drawn"):
            lines.append(f"of {drawn['drawn']:,} prompts drawn, {drawn['usable']:,} were usable")
        return lines
    if isinstance(source := data.get("source"), str):
        return [f"conversations of `{source.replace('`', chr(39))}`, which were given"]
    return []


def _answers(data: Mapping[str, Any]) -> list[str]:
    sampling = data.get("sampling")
    if not isinstance(sampling, Mapping):
        return []
    settings = [
        f"{words} {sampling[key]}"
        for key, words, off in (
            ("temperature", "temperature", None), ("top_p", "top-p", 1.0), ("top_k", "top-k", 0),
            ("max_new_tokens", "most new tokens", None), ("seed", "seed", None),
        )
        if sampling.get(key) not in {None, off}
    ]  # fmt: skip
    generation = data.get("generation") or {}
    dtype = (generation.get("writer") or {}).get("dtype")
    where = f", in {dtype}" if isinstance(dtype, str) else ""
    return [f"answers: written by the base model itself{where}; {', '.join(settings)}"]


def _counts(data: Mapping[str, Any]) -> list[str]:
    lines = []
    if (number := data.get("num_conversations")) is not None:
        line = counted(number, "conversation")
        if (tokens := data.get("num_tokens")) is not None:
            line += f", {counted(tokens, 'token')}"
        if (supervised := data.get("num_supervised_tokens")) is not None:
            line += f", {supervised:,} of them in answers, from which the heads learn"
        lines.append(line)
    ends = data.get("end_of_turn") or {}
    if "with" in ends and "without" in ends:
        ended, others = ends["with"], ends["without"]
        lines.append(f"answers with an end-of-turn token: {ended:,}; without one: {others:,}")
    if number := data.get("num_retokenised"):
        lines.append(f"answers whose ids were made from their text: {number:,}")
    return lines
