"""How AWS NxD Inference reads heads out of the base model's directory."""

from __future__ import annotations

from medusa_train.export.loaders.choices import check_choices
from medusa_train.export.loaders.view import (
    Request,
    Shelf,
    View,
    check_rows,
    load,
    num_heads_in,
    take_head,
)

_FILE = "medusa_heads.pt"


def view(request: Request) -> View:
    """Read ``request.directory`` as the engine does; the number of heads is that of the file."""
    result = View("NxD Inference")
    directory = request.directory
    if not (directory / _FILE).exists():
        result.error(f"there is no {_FILE}: the engine builds heads and never fills them")
        return result
    tensors = load(directory, _FILE, result)
    num_heads = num_heads_in(tensors, r"^medusa_head_(\d+)\.")
    result.num_heads, result.num_layers = num_heads, 1
    if num_heads == 0:
        result.error(f"{_FILE} has no names that begin with medusa_head_0.: they fit no head")
    shelf = Shelf(tensors, result)
    for head in range(num_heads):
        names = {
            "block": f"medusa_head_{head}.{{layer}}.linear.{{part}}",
            "projection": f"medusa_head_{head}.1.weight",
        }
        found = take_head(shelf, names, num_layers=1, missing="that part keeps random values")
        if found is not None:
            result.heads.append(found)
    shelf.report_left("the engine has heads of one layer, and ignores such tensors")
    check_rows(result, request)
    check_choices(directory, result, depth=num_heads)
    if not (directory / "config.json").exists():
        result.note(f"the engine reads {_FILE} in the base model's directory: copy it there")
    kind = request.base_value("model_type")
    if kind is not None and kind != "llama":
        result.warning(f"the base is of the kind {kind!r}, and the engine has Medusa for Llama")
    return result
