"""How TensorRT-LLM up to 1.2.1 (the converter of its TensorRT backend) reads heads."""

from __future__ import annotations

import torch

from medusa_train.export.loaders.choices import check_choices
from medusa_train.export.loaders.view import (
    Request,
    Shelf,
    View,
    check_rows,
    config_of,
    count_of,
    load,
    take_head,
)

_FILES = ("medusa_lm_head.pt", "medusa_lm_head.safetensors")  # the first that is there
_FAILS = "the converter fails"


def view(request: Request) -> View:
    """Read ``request.directory`` as the engine's converter does."""
    result = View("TensorRT-LLM")
    directory = request.directory
    config = config_of(directory, result)
    num_heads = count_of(config, "medusa_num_heads", result, default=4)
    num_layers = count_of(config, "medusa_num_layers", result, default=1)
    result.num_heads, result.num_layers = num_heads, num_layers
    there = [name for name in _FILES if (directory / name).exists()]
    if not there:
        result.error(f"there is neither {_FILES[0]} nor {_FILES[1]}")
        return result
    tensors = load(directory, there[0], result)
    if len(there) > 1:
        twin = load(directory, there[1], View("TensorRT-LLM"))
        same = tensors.keys() == twin.keys() and all(
            torch.equal(tensor, twin[name]) for name, tensor in tensors.items()
        )
        if not same:
            result.error(
                f"{there[0]} and {there[1]} differ: the converter reads {there[0]} and never looks "
                "at the other"
            )
    shelf = Shelf(tensors, result)
    for head in range(num_heads):
        names = {
            "block": f"{head}.{{layer}}.linear.{{part}}",
            "projection": f"{head}.{num_layers}.weight",
        }
        found = take_head(shelf, names, num_layers=num_layers, missing=_FAILS)
        if found is not None:
            result.heads.append(found)
    shelf.report_left("the converter ignores such tensors without a word")
    check_rows(result, request)
    check_choices(directory, result, depth=num_heads, max_nodes=63)
    return result
