"""How Text Generation Inference reads a directory of heads."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from medusa_train.export.loaders.view import (
    EngineHead,
    Request,
    Shelf,
    View,
    check_rows,
    config_of,
    count_of,
    load,
    take_head,
)

_FILE = "medusa_lm_head.safetensors"
_FAILS = "TGI fails while it loads"


def view(request: Request) -> View:
    """Read ``request.directory`` as the engine does."""
    result = View("TGI")
    config = config_of(request.directory, result)
    if "architectures" in config:
        result.error("config.json has architectures: TGI turns speculation off without a word")
    if "model_type" in config:
        result.error("config.json has model_type: TGI then needs the base's tokenizer in here too")
    if "base_model_name_or_path" not in config:
        result.error("config.json has no base_model_name_or_path: TGI does not find the base")
    num_heads = count_of(config, "medusa_num_heads", result, default=None)
    num_layers = count_of(config, "medusa_num_layers", result, default=None)
    if not (request.directory / _FILE).exists():
        result.error(f"there is no {_FILE}: TGI reads no other file")
        return result
    tensors = load(request.directory, _FILE, result)
    wanted = request.num_speculative_tokens or num_heads
    if wanted > num_heads:
        result.error(f"{wanted} speculative tokens are asked for, but there are {num_heads} heads")
        wanted = num_heads
    result.num_heads, result.num_layers = wanted, num_layers
    result.num_left_out = num_heads - wanted
    shelf = Shelf(tensors, result)
    missing = _missing_for_full(tensors, wanted, num_layers)
    if missing is None:
        _read_full(shelf, result, wanted, num_layers)
    else:
        _read_shared(shelf, result, tensors, wanted, num_layers, missing=missing)
    for name in shelf.left():
        if wanted < num_heads and name.split(".")[0].isdigit():
            shelf.take(name, missing="")  # heads beyond --speculate are left out as asked
    shelf.report_left("TGI ignores such tensors without a word")
    check_rows(result, request)
    result.note("TGI runs the top-1 chain alone; a tree is not used")
    return result


def _missing_for_full(tensors: Mapping[str, Tensor], num_heads: int, num_layers: int) -> str | None:
    """The first tensor that the form with own matrices needs and the file lacks."""
    for head in range(num_heads):
        blocks = [f"{head}.{i}.linear.{p}" for i in range(num_layers) for p in ("weight", "bias")]
        for name in [*blocks, f"{head}.{num_layers}.weight"]:
            if name not in tensors:
                return name
    return None


def _read_full(shelf: Shelf, result: View, num_heads: int, num_layers: int) -> None:
    for head in range(num_heads):
        names = {
            "block": f"{head}.{{layer}}.linear.{{part}}",
            "projection": f"{head}.{num_layers}.weight",
        }
        found = take_head(shelf, names, num_layers=num_layers, missing=_FAILS)
        if found is not None:
            result.heads.append(found)


def _read_shared(
    shelf: Shelf,
    result: View,
    tensors: Mapping[str, Tensor],
    num_heads: int,
    num_layers: int,
    *,
    missing: str,
) -> None:
    """The form without own matrices, which the engine falls back to after any error."""
    own = [name for name in tensors if re.match(r"^\d+\.\d+\.weight$", name)]
    if own:
        result.error(
            f"{missing} is missing: TGI falls back to the base's lm_head for all heads, and their "
            f"own matrices ({own[0]}, …) are not used"
        )
        for name in own:
            shelf.take(name, missing="")
    if num_layers != 1:
        result.error(
            f"the heads share the base's lm_head and medusa_num_layers is {num_layers}: TGI has "
            "that form with one layer alone"
        )
        return
    for head in range(num_heads):
        size = (shelf.shape_of("0.0.linear.weight") or (None,))[0]
        name = f"{head}.0.linear"
        weight = shelf.take(f"{name}.weight", missing=_FAILS, shape=(size, size))
        bias = shelf.take(f"{name}.bias", missing=_FAILS, shape=(size,))
        if weight.numel() and bias.numel():
            result.heads.append(EngineHead(((weight, bias),), None))
    if not own:
        result.note("the heads share the base's lm_head (TGI's second form)")
