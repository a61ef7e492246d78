"""How MLC-LLM reads a directory of heads."""

from __future__ import annotations

from torch import Tensor

from medusa_train.export.files import indexed_files
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

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FAILS = "MLC-LLM fails while it converts the weights"


def view(request: Request) -> View:
    """Read ``request.directory`` as the engine's converter does."""
    result = View("MLC-LLM")
    directory = request.directory
    config = config_of(directory, result)
    if config.get("model_type") != "medusa":
        result.error(
            f"config.json has model_type {config.get('model_type')!r}: MLC-LLM knows Medusa by "
            "'medusa'"
        )
    counts = {
        name: count_of(config, name, result, default=None)
        for name in ("medusa_num_heads", "medusa_num_layers", "hidden_size", "vocab_size")
    }
    num_heads, num_layers = counts["medusa_num_heads"], counts["medusa_num_layers"]
    result.num_heads, result.num_layers = num_heads, num_layers
    files = [_FILE] if (directory / _FILE).exists() else []
    if (directory / _INDEX).exists():
        files = indexed_files(directory, _INDEX)
    if not files:
        result.error(f"there is no {_FILE}: MLC-LLM finds no weights")
        return result
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= load(directory, file, result)
    shelf = Shelf(tensors, result)
    for head in range(num_heads):
        names = {
            "block": f"medusa_head.{head}.{{layer}}.linear.{{part}}",
            "projection": f"medusa_head.{head}.{num_layers}.weight",
        }
        found = take_head(
            shelf,
            names,
            num_layers=num_layers,
            missing=_FAILS,
            hidden_size=counts["hidden_size"] or None,
            num_rows=counts["vocab_size"] or None,
        )
        if found is not None:
            result.heads.append(found)
    shelf.report_left("MLC-LLM leaves such tensors out")
    wanted = request.num_speculative_tokens
    if wanted is not None and wanted != num_heads:
        result.error(
            f"the draft length is {wanted}, but MLC-LLM needs that of all {num_heads} heads"
        )
    check_rows(result, request)
    result.note("MLC-LLM runs the top-1 chain alone; a tree is not used")
    return result
