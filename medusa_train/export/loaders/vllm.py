"""How vLLM up to 0.32 reads a directory of heads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_train.export.files import MAX_COUNT, check_count, indexed_files, weight_files
from medusa_train.export.loaders.view import EngineHead, Request, Shelf, View, config_of, load

_INDEX = "model.safetensors.index.json"
_NOT_IN_PATH = ("eagle-", "eagle3", "dflash", "dspark")
_BLOCK = re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$")
_PROJECTION = re.compile(r"^(\d+)\.(\d+)\.weight$")
_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "vocab_size": 32001,
    "num_heads": 5,
    "num_hidden_layers": 1,
}


def view(request: Request) -> View:
    """Read ``request.directory`` as the engine does."""
    result = View("vLLM")
    _check_version_and_name(request, result)
    config, sources = _renamed(config_of(request.directory, result))
    tensors = _read(request.directory, result)
    is_format_a = any(_BLOCK.match(name) for name in tensors)
    _check_kind(config, result, is_format_a=is_format_a)
    names = _names(tensors, config, result, request)
    counts = {name: _value(name, config, names, sources, result) for name in _DEFAULTS}
    result.num_heads, result.num_layers = counts["num_heads"], counts["num_hidden_layers"]
    truncated = config.get("truncated_vocab_size")
    rows = counts["vocab_size"]
    if isinstance(truncated, int) and not isinstance(truncated, bool):
        rows = truncated
    elif truncated is not None:
        result.error(f"config.json: truncated_vocab_size must be a whole number, got {truncated!r}")
    _build(result, Shelf(names, result), config, counts, rows=rows)
    _check_request(request, result, vocab_size=counts["vocab_size"])
    return result


def _check_version_and_name(request: Request, result: View) -> None:
    if request.version is not None and request.version >= (0, 33):
        result.error("vLLM 0.33 removed Medusa: it loads no heads; use 0.32 or an earlier one")
    for part in _NOT_IN_PATH:
        if part in request.path.lower():
            result.error(
                f"the path {request.path!r} contains {part!r}: vLLM takes the directory for "
                "another kind of draft"
            )


def _renamed(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The config after the engine's renaming, and the key that each renamed value came from."""
    values, sources = dict(config), {}
    for key in config:
        if "num" not in key:
            continue
        kind = "num_heads" if "heads" in key else "num_hidden_layers" if "layers" in key else None
        if kind is not None:
            values[kind] = values.pop(key)
            sources[kind] = key
    return values, sources


def _read(directory: Path, result: View) -> dict[str, Tensor]:
    """All safetensors files of the directory, else its pickles; the last of equal names stays."""
    found = weight_files(directory)
    files = [name for name in found if name.endswith(".safetensors")]
    if files and (directory / _INDEX).exists():
        indexed = indexed_files(directory, _INDEX)
        files = [name for name in files if name in indexed]
    for suffix in (".bin", ".pt"):
        files = files or [name for name in found if name.endswith(suffix)]
    if not files:
        result.error("there is no weights file")
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in load(directory, file, result).items():
            _put(tensors, name.replace("medusa_heads.", ""), tensor, result)
    return tensors


def _put(tensors: dict[str, Tensor], name: str, tensor: Tensor, result: View) -> None:
    if name in tensors and not torch.equal(tensors[name], tensor):
        result.error(f"{name} is there several times with other values: the last one wins")
    tensors[name] = tensor


def _check_kind(config: Mapping[str, Any], result: View, *, is_format_a: bool) -> None:
    kind = config.get("model_type")
    if kind is None and not is_format_a:
        result.error("config.json has no model_type: vLLM does not know the directory as Medusa")
    elif kind not in {None, "medusa"}:
        result.error(
            f"config.json has model_type {kind!r}: vLLM takes the directory for that model"
        )


def _names(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], result: View, request: Request
) -> dict[str, Tensor]:
    """The tensors by the engine's own names; from 0.25 it knows FasterDecoding's."""
    if not any(_BLOCK.match(name) for name in tensors):
        return dict(tensors)
    if request.version is not None and request.version < (0, 25):
        result.error(
            "the names are FasterDecoding's, which vLLM before 0.25 ignores: no block would be "
            "loaded"
        )
        return dict(tensors)
    result.note("the names are FasterDecoding's, which vLLM reads from 0.25")
    renamed: dict[str, Tensor] = {}
    shared = bool(config.get("original_lm_head", False))
    if shared and config.get("num_heads") == 1:
        result.error(
            "one shared head by FasterDecoding's names: vLLM loads that form from two heads on"
        )
    for name, tensor in tensors.items():
        if block := _BLOCK.match(name):
            head, layer, part = block.groups()
            _put(renamed, f"blocks.{head}.layers.{layer}.{part}", tensor, result)
        elif projection := _PROJECTION.match(name):
            _put(renamed, f"lm_heads.{projection.group(1)}.weight", tensor, result)
        else:
            _put(renamed, name, tensor, result)
    return renamed


def _value(
    name: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    sources: Mapping[str, str],
    result: View,
) -> int:
    """A count that the engine builds with; wrong ones are said with where they come from."""
    in_tensors = _in_tensors(tensors)[name]
    value = config.get(name)
    if value is None:
        value = _DEFAULTS[name]
        if value != in_tensors:
            result.error(
                f"config.json has no {name}: vLLM takes {value}, but the tensors have {in_tensors}"
            )
    elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
        result.error(f"config.json: {name} must be a whole number of at least 1, got {value!r}")
        value = in_tensors
    elif name in sources and value > MAX_COUNT:
        result.error(f"config.json: {sources[name]} is {value:,}; at most {MAX_COUNT} are read")
        value = in_tensors
    elif value != in_tensors and name in sources:
        result.error(
            f"vLLM takes {name} = {value} from {sources[name]!r} (of all keys with 'num' and "
            f"{'heads' if name == 'num_heads' else 'layers'!r} the last one wins), but the tensors "
            f"have {in_tensors}"
        )
    elif value != in_tensors and name == "hidden_size":
        result.error(f"config.json: {name} is {value}, but the tensors have {in_tensors}")
    return int(value)


def _in_tensors(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    blocks = [m for n in tensors if (m := re.match(r"^blocks\.(\d+)\.layers\.(\d+)\.weight$", n))]
    first = tensors.get("blocks.0.layers.0.weight")
    heads = [t for n, t in tensors.items() if re.match(r"^lm_heads?(\.\d+)?\.weight$", n)]
    return {
        "num_heads": _count(int(m.group(1)) for m in blocks),
        "num_hidden_layers": _count(int(m.group(2)) for m in blocks),
        "hidden_size": 0 if first is None or not first.dim() else first.shape[0],
        "vocab_size": heads[0].shape[0] if heads and heads[0].dim() else 0,
    }


def _count(indices: Iterable[int]) -> int:
    return check_count(max(indices, default=-1) + 1, where="weights")


def _build(
    result: View, shelf: Shelf, config: Mapping[str, Any], counts: Mapping[str, int], *, rows: int
) -> None:
    has_bias = bool(config.get("medusa_fc_bias", False))
    shared = bool(config.get("original_lm_head", False))
    size = counts["hidden_size"]
    token_map = _token_map(result, shelf, counts["vocab_size"], rows=rows, shared=shared)
    common = _shared_lm_head(result, shelf, size, rows, token_map) if shared else None
    for head in range(counts["num_heads"]):
        blocks: list[tuple[Tensor, Tensor | None]] = []
        for layer in range(counts["num_hidden_layers"]):
            name, why = f"blocks.{head}.layers.{layer}", "vLLM fails while it loads"
            weight = shelf.take(f"{name}.weight", missing=why, shape=(size, size))
            bias = shelf.take(f"{name}.bias", missing=why, shape=(size,)) if has_bias else None
            blocks.append((weight, bias))
        own = common if shared else _projection(shelf, f"lm_heads.{head}.weight", size, rows)
        if own is not None and all(w.numel() and (b is None or b.numel()) for w, b in blocks):
            result.heads.append(EngineHead(tuple(blocks), own, token_map))
    left = shelf.left()
    if not has_bias and any(name.endswith(".bias") for name in left):
        how = "is false" if "medusa_fc_bias" in config else "is not in config.json"
        result.error(f"medusa_fc_bias {how}: vLLM drops the biases of all blocks without a word")
        left = [name for name in left if not name.endswith(".bias")]
    if left:
        result.error(f"{', '.join(left[:4])}: vLLM ignores such names without a word")
    if config.get("logit_scale", 1.0) != 1.0:
        result.note(f"vLLM multiplies the logits by {config['logit_scale']}")


def _token_map(
    result: View, shelf: Shelf, vocab_size: int, *, rows: int, shared: bool
) -> Tensor | None:
    if rows > vocab_size:
        result.error(
            f"truncated_vocab_size is {rows}, more than vocab_size: vLLM fails while it loads"
        )
    if rows >= vocab_size:
        if "token_map" in shelf:
            shelf.take("token_map", missing="")
            result.error(
                "there is a token_map, but truncated_vocab_size is not below vocab_size: vLLM "
                "ignores the map, and rows stand for the wrong tokens"
            )
        return None
    if "token_map" not in shelf:
        result.error("truncated_vocab_size is below vocab_size, but there is no token_map")
        return None
    if not shared:
        result.error("token_map works only with original_lm_head: true")
    token_map = shelf.take("token_map", missing="", shape=(rows,))
    return token_map.long() if token_map.numel() else None


def _shared_lm_head(
    result: View, shelf: Shelf, size: int, rows: int, token_map: Tensor | None
) -> Tensor | None:
    name = "lm_head.weight" if "lm_head.weight" in shelf else "lm_heads.0.weight"
    if name not in shelf:
        result.error(
            "original_lm_head is true, but there is neither lm_head.weight nor lm_heads.0.weight: "
            "vLLM never borrows the target's, and does not report it; the one lm_head would keep "
            "random values"
        )
        return None
    weight = shelf.take(name, missing="", shape=(None, size))
    if not weight.numel():
        return None
    if token_map is not None and weight.shape[0] > len(token_map):
        weight = weight[token_map]
    return _checked_rows(result, weight, name, size, rows)


def _projection(shelf: Shelf, name: str, size: int, rows: int) -> Tensor | None:
    tensor = shelf.take(
        name,
        missing="vLLM does not report it, and the lm_head of that head would keep random values",
        shape=(rows, size),
    )
    return tensor if tensor.numel() else None


def _checked_rows(result: View, weight: Tensor, name: str, size: int, rows: int) -> Tensor | None:
    if tuple(weight.shape) == (rows, size):
        return weight
    result.error(
        f"{name} has shape {list(weight.shape)}, but vLLM builds {[rows, size]} from config.json"
    )
    return None


def _check_request(request: Request, result: View, *, vocab_size: int) -> None:
    wanted, num_heads = request.num_speculative_tokens, result.num_heads or 0
    if wanted is not None and wanted > num_heads:
        result.error(f"{wanted} speculative tokens are asked for, but there are {num_heads} heads")
    base = request.base_value("vocab_size")
    if base is not None and base != vocab_size:
        result.error(
            f"config.json: vocab_size is {vocab_size}, but the base's is {base}: they must be equal"
        )
    result.note("vLLM runs the top-1 chain alone; a tree is not used")
