"""The mistakes in a recipe's values: those of each key, and those of keys that belong together.

Conditions between keys are not pydantic validators, because those run only when every key of the
section is right; a user wants to see all mistakes at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from medusa_train.recipe.deepspeed_block import check_deepspeed
from medusa_train.recipe.export_block import export_mistakes
from medusa_train.recipe.medusa2 import medusa2_mistakes
from medusa_train.recipe.quality_block import quality_mistakes
from medusa_train.recipe.schema import DistillSection, EvaluateSection, HeadsSection, Recipe
from medusa_train.recipe.trainer_block import check_trainer
from medusa_train.recipe.yaml_reader import Key, show

Config = TypeVar("Config", bound=BaseModel)
Wrong = tuple[Key, str]
"""A key and what is wrong with its value."""

_PATTERNS = {
    "languages": "must be a language's code of two or three letters, such as en",
    "min_version": "must be a version such as 0.25",
    "push_to_hub": "must be a repository of the hub, OWNER/NAME",
}
_WANTED = {
    "bool_type": "must be true or false",
    "dict_type": "must be a section of keys and values",
    "float_type": "must be a number",
    "greater_than": "must be more than {gt:g}",
    "greater_than_equal": "must be at least {ge:.12g}",
    "list_type": "must be a list",
    "too_short": "must have at least one item",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "less_than": "must be less than {lt:g}",
    "less_than_equal": "must be at most {le:.12g}",
    "model_type": "must be a section of keys and values; remove it for the defaults",
    "string_too_short": "must not be empty; write null to leave it out",
}


def field_mistakes(schema: type[Config], value: Any) -> tuple[Config | None, list[Wrong]]:
    """Check ``value`` key by key; give the checked model, or the mistakes."""
    try:
        return schema.model_validate(value), []
    except ValidationError as error:
        wrong: dict[Key, str] = {}
        for detail in error.errors(include_url=False):
            key = tuple(detail["loc"])
            if _is_choice_of_types(key):
                # One error for each type that the value might have had.
                kinds = "text or a section of keys and values"
                wrong[key[:-1]] = f"must be {kinds}; got {show(detail['input'])}"
            else:
                wrong[key] = _message(schema, detail)
        return None, list(wrong.items())


def combined_mistakes(schema: type[BaseModel], value: Mapping[str, Any]) -> Iterator[Wrong]:
    """Yield what is wrong between keys; a key that has no value of its type is left out."""
    data = _section(value, "data")
    if schema is Recipe and isinstance(value.get("data"), dict):
        yield from _source_mistakes(data)
    if isinstance(data.get("distill"), dict):
        yield from _distill_mistakes(data["distill"], data.get("max_length"))
    train = _section(value, "train")
    yield from _hidden_state_mistakes(train, data)
    if schema is Recipe:
        yield from medusa2_mistakes(value)
        yield from _tree_mistakes(value, data)
        yield from quality_mistakes(value)
        for name, message in export_mistakes(_section(value, "export"), _section(value, "heads")):
            yield ("export", name), message
    trainer = _section(train, "trainer")
    for name, message in check_trainer(trainer):
        yield ("train", "trainer", name), message
    yield from _device_mistakes(value, trainer)


def _hidden_state_mistakes(train: Mapping[str, Any], data: Mapping[str, Any]) -> Iterator[Wrong]:
    if train.get("hidden_states") == "online" and train.get("hidden_states_dtype") == "int8":
        yield ("train", "hidden_states_dtype"), "is for hidden_states: cached; remove it"
    is_frozen = train.get("method", "medusa1") == "medusa1"
    is_cached = train.get("hidden_states", "cached") == "cached"
    if is_frozen and is_cached and data.get("packing") is True:
        yield ("data", "packing"), "is for train.hidden_states: online; remove it"


def _device_mistakes(value: Mapping[str, Any], trainer: Mapping[str, Any]) -> Iterator[Wrong]:
    base_model, deepspeed = _section(value, "base_model"), value.get("deepspeed")
    if base_model.get("quantization") is not None and base_model.get("gguf_file") is not None:
        message = "excludes gguf_file, whose weights are read as they are; set one of them to null"
        yield ("base_model", "quantization"), message
    if isinstance(deepspeed, dict):
        for name, message in check_deepspeed(deepspeed):
            yield ("deepspeed", name), message
    if deepspeed is not None and trainer.get("use_cpu") is True:
        message = "excludes deepspeed; hide the accelerators instead (CUDA_VISIBLE_DEVICES=)"
        yield ("train", "trainer", "use_cpu"), message


def _source_mistakes(data: Mapping[str, Any]) -> Iterator[Wrong]:
    path, distill = data.get("path"), data.get("distill")
    if path is None and distill is None:
        yield ("data",), "needs one of data.path and data.distill; got neither"
    elif path is not None and distill is not None:
        yield (
            ("data",),
            "needs one of data.path and data.distill; got both; set one of them to null",
        )


def _tree_mistakes(value: Mapping[str, Any], data: Mapping[str, Any]) -> Iterator[Wrong]:
    evaluate = _section(value, "evaluate")
    tree, where = evaluate.get("tree"), ("evaluate", "tree")
    if not isinstance(tree, dict):
        return
    if data.get("eval_fraction") == 0:
        yield where, "needs held-out conversations; raise data.eval_fraction, or write null"
    heads = _section(value, "heads")
    limits = {
        "top_k": ("evaluate.top_k", evaluate.get("top_k", _default(EvaluateSection, "top_k"))),
        "max_depth": (
            "heads.num_heads",
            heads.get("num_heads", _default(HeadsSection, "num_heads")),
        ),
    }
    for name, (key, most) in limits.items():
        wanted = tree.get(name)
        if isinstance(wanted, int) and isinstance(most, int) and wanted > most:
            yield (*where, name), f"must be at most {key}, which is {most}; got {wanted}"


def _default(section: type[BaseModel], name: str) -> Any:
    return section.model_fields[name].default


def _distill_mistakes(distill: Mapping[str, Any], max_length: Any) -> Iterator[Wrong]:
    where: Key = ("data", "distill")
    yield from _prompt_source_mistakes(distill, where)
    if distill.get("teacher_top_n") is not None and distill.get("teacher_samples") is not None:
        yield (*where, "teacher_samples"), "excludes teacher_top_n; set one of them to null"
    server = distill.get("server")
    if isinstance(server, dict) and distill.get("teacher_samples") is not None:
        message = "needs generation in process; servers give teacher_top_n only"
        yield (*where, "teacher_samples"), message
    shortest = _number(distill, "min_answer_tokens")
    longest = _number(distill, "max_new_tokens")
    if shortest > longest:
        message = f"must be at most max_new_tokens, which is {longest}; got {shortest}"
        yield (*where, "min_answer_tokens"), message
    prompt = _number(distill, "max_prompt_tokens")
    if isinstance(max_length, int) and prompt >= max_length:
        message = f"must be less than data.max_length, which is {max_length}; got {prompt}"
        yield (*where, "max_prompt_tokens"), message


def _prompt_source_mistakes(distill: Mapping[str, Any], where: Key) -> Iterator[Wrong]:
    sources = [s for s in distill.get("sources") or [] if isinstance(s, dict)]
    kinds = [source.get("source") for source in sources]
    if sources and distill.get("prompts") is not None:
        yield (*where, "sources"), "excludes data.distill.prompts; set one of them to null"
    if "model" in kinds or (distill.get("prompts") is None and not sources):
        if distill.get("num_prompts") is None:
            message = "missing; where the model writes prompts it says how many"
            yield (*where, "num_prompts"), message
        if distill.get("prompt_temperature") == 0:
            message = "must be more than 0; greedy prompts would all be the same; got 0"
            yield (*where, "prompt_temperature"), message
    weighted = any(source.get("weight", 1.0) != 1.0 for source in sources)
    if weighted and distill.get("num_prompts") is None:
        message = "missing; it says how many prompts the weights of the sources divide"
        yield (*where, "num_prompts"), message
    for index, source in enumerate(sources):
        for name, message in _one_source_mistakes(source):
            yield (*where, "sources", index, name), message


def _one_source_mistakes(source: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    kind = source.get("source")
    if kind in {"file", "dataset"} and source.get("path") is None:
        yield "path", f"missing; a source of the kind '{kind}' needs one"
    if kind in {"model", "demo"} and source.get("path") is not None:
        yield "path", f"a source of the kind '{kind}' has none"
    for name in ("name", "split", "column"):
        if kind != "dataset" and source.get(name) is not None:
            yield name, "is for a source of the kind 'dataset'"
    if kind == "model" and source.get("limit") is not None:
        yield "limit", "is for a source that has rows; use num_prompts and weight"


def _number(distill: Mapping[str, Any], name: str) -> int:
    default = DistillSection.model_fields[name].default
    value = distill.get(name, default)
    return value if isinstance(value, int) else int(default)


def _is_choice_of_types(key: Key) -> bool:
    return str(key[-1]) in {"constrained-str", "dict[str,any]"}


def _section(value: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = value.get(name)
    return section if isinstance(section, dict) else {}


def _message(schema: type[BaseModel], detail: ErrorDetails) -> str:
    kind, got = detail["type"], detail["input"]
    key = tuple(detail["loc"])
    match kind:
        case "extra_forbidden":
            return f"unknown key; {_known_keys(schema, key)}"
        case "missing":
            return "missing; there is no default"
        case "literal_error":
            return f"must be one of {_choices(schema, key)}; got {show(got)}"
        case "string_type":
            quote = "; put it in quotes" if isinstance(got, bool | int | float) else ""
            return f"must be text; got {show(got)}{quote}"
        case "string_too_short":
            return _WANTED[kind]
        case "string_pattern_mismatch":
            name = next(name for name in reversed(key) if isinstance(name, str))
            return f"{_PATTERNS[name]}; got {show(got)}"
        case _ if kind in _WANTED:
            return f"{_WANTED[kind].format(**detail.get('ctx', {}))}; got {show(got)}"
    return f"{detail['msg']}; got {show(got)}"


def _known_keys(schema: type[BaseModel], key: Key) -> str:
    section = _model_at(schema, key[:-1])
    names = list(section.model_fields)
    close = difflib.get_close_matches(str(key[-1]), names, n=1)
    return f"did you mean '{close[0]}'?" if close else f"known keys: {', '.join(names)}"


def _choices(schema: type[BaseModel], key: Key) -> str:
    if isinstance(key[-1], int):  # an item of a list
        annotation = _model_at(schema, key[:-2]).model_fields[str(key[-2])].annotation
        [annotation] = get_args(annotation)
    else:
        annotation = _model_at(schema, key[:-1]).model_fields[str(key[-1])].annotation
    options = [choice for option in get_args(annotation) for choice in get_args(option) or [option]]
    return ", ".join(str(choice) for choice in options if choice is not type(None))


def _model_at(schema: type[BaseModel], key: Key) -> type[BaseModel]:
    for name in key:
        if isinstance(name, int):  # an item of a list has the list's schema
            continue
        annotation = schema.model_fields[name].annotation
        options = [annotation, *get_args(annotation)]
        schema = next(o for o in options if isinstance(o, type) and issubclass(o, BaseModel))
    return schema
