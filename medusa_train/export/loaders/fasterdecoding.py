"""How the original implementation reads heads: from two directories, or from one with the base."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from medusa_train.export.files import indexed_files, tensor_names
from medusa_train.export.loaders.choices import check_choices
from medusa_train.export.loaders.view import (
    EngineHead,
    Request,
    Shelf,
    View,
    check_rows,
    config_of,
    count_of,
    load,
    num_heads_in,
    take_head,
)

_ENGINE = "FasterDecoding/Medusa"
_FILE = "medusa_lm_head.pt"
_BUILT = 5
_TYPES = ("llama", "mistral")
_PREFIX = "medusa_head."
_STAYS_RANDOM = "the engine does not report it, and that part of the head keeps random values"


def view(request: Request) -> View:
    """Read ``request.directory``, which holds heads alone."""
    result = View(_ENGINE)
    config = config_of(request.directory, result)
    if "base_model_name_or_path" not in config:
        result.error(
            "config.json has no base_model_name_or_path: the engine takes lmsys/vicuna-7b-v1.3"
        )
    num_layers = count_of(config, "medusa_num_layers", result, default=1)
    _check_kind(result, request.base_value("model_type"))
    path = request.directory / _FILE
    if not path.exists():
        result.error(f"there is no {_FILE}: the engine reads no other file of heads")
        return result
    tensors = load(request.directory, _FILE, result)
    in_file = num_heads_in(tensors, r"^(\d+)\.")
    result.num_heads, result.num_layers = _BUILT, num_layers
    if in_file > _BUILT:
        result.error(
            f"there are {in_file} heads, but the engine builds {_BUILT} and leaves the others out "
            "without a word"
        )
    elif in_file < _BUILT:
        result.warning(
            f"the engine always builds {_BUILT} heads: those after head {in_file} keep random "
            "values, so use a tree that does not reach them"
        )
    _read(result, Shelf(tensors, result), min(in_file, _BUILT), num_layers, request, prefix="")
    check_choices(request.directory, result, depth=in_file, max_rank=10)
    return result


def view_combined(request: Request) -> View:
    """Read ``request.directory``, which holds base and heads."""
    result = View(_ENGINE)
    config = config_of(request.directory, result)
    _check_kind(result, config.get("model_type"))
    num_heads = count_of(config, "medusa_num_heads", result, default=None)
    num_layers = count_of(config, "medusa_num_layers", result, default=None)
    result.num_heads, result.num_layers = num_heads, num_layers
    tensors, others = _read_combined(request.directory, result)
    if not others:
        result.error("there is no tensor of a base model in it")
    shelf = Shelf(tensors, result)
    _read(result, shelf, num_heads, num_layers, request, prefix=_PREFIX)
    check_rows(result, request)
    if config.get("vocab_size") is not None and request.base_config is None:
        rows = Request(request.directory, request.path, base_config=config)
        check_rows(result, rows)
    check_choices(request.directory, result, depth=num_heads, max_rank=10)
    result.note("TGI, vLLM and TensorRT-LLM fail on base and heads in one directory")
    return result


def _read_combined(directory: Path, result: View) -> tuple[dict[str, Tensor], int]:
    """The heads' tensors, and how many others there are, in the files that transformers chooses."""
    index = "model.safetensors.index.json"
    if (directory / "model.safetensors").exists():
        files = ["model.safetensors"]
        if (directory / index).exists():
            result.warning(f"model.safetensors is read, and {index} is not")
    elif (directory / index).exists():
        files = indexed_files(directory, index)
    else:
        result.error(f"there is neither model.safetensors nor {index}")
        files = []
    tensors: dict[str, Tensor] = {}
    others = 0
    for file in files:
        names = tensor_names(directory, file)
        own = [name for name in names if name.startswith(_PREFIX)]
        others += len(names) - len(own)
        if own:
            tensors |= load(directory, file, result, only=r"medusa_head\.")
        else:
            result.files.append(file)
    unread = [
        path.name
        for path in directory.glob("*.safetensors")
        if path.name not in files
        and any(n.startswith(_PREFIX) for n in tensor_names(directory, path.name))
    ]
    for name in unread:
        result.error(
            f"{name} has heads in it, but the engine reads {', '.join(files) or 'nothing'}"
        )
    return tensors, others


def _check_kind(result: View, kind: object) -> None:
    if kind is not None and kind not in _TYPES:
        result.error(
            f"the base is of the kind {kind!r}, but the engine has Llama and Mistral alone"
        )


def _read(
    result: View, shelf: Shelf, num_heads: int, num_layers: int, request: Request, *, prefix: str
) -> None:
    for head in range(num_heads):
        names = {
            "block": f"{prefix}{head}.{{layer}}.linear.{{part}}",
            "projection": f"{prefix}{head}.{num_layers}.weight",
        }
        found = take_head(shelf, names, num_layers=num_layers, missing=_STAYS_RANDOM)
        if found is not None:
            result.heads.append(_with_one_block(found, result, number=head + 1))
    shelf.report_left("the engine ignores such tensors without a word")
    check_rows(result, request)


def _with_one_block(head: EngineHead, result: View, *, number: int) -> EngineHead:
    """The head as the engine computes it: one ResBlock for all layers, loaded last one last."""
    last_weight, last_bias = head.blocks[-1]
    assert last_bias is not None
    for weight, bias in head.blocks[:-1]:
        assert bias is not None
        if not (torch.equal(weight, last_weight) and torch.equal(bias, last_bias)):
            result.error(
                f"head {number} has layers that differ: the engine makes one ResBlock and uses it "
                "for all layers, so the last one's weights would stand in all of them"
            )
            break
    return EngineHead(((last_weight, last_bias),) * len(head.blocks), head.projection)
