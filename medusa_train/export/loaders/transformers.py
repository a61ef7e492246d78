"""What ``generate(custom_generate=DIR)`` reads of an export; the loader is this project's own."""

from __future__ import annotations

from medusa_train.errors import MedusaTrainError
from medusa_train.export.files import check_values, inside, read_config, read_tensors
from medusa_train.export.loaders.view import EngineHead, Request, View
from medusa_train.heads.checkpoint import TOKEN_MAP, WEIGHTS_FILE, load_heads
from medusa_train.tree.topology import Tree, TreeError

_OPTIONS = "medusa_generate.json"


def view(request: Request) -> View:
    """Read ``request.directory`` as the exported code does, without running it."""
    result = View("transformers")
    directory = request.directory
    for name in (_OPTIONS, "custom_generate/generate.py", WEIGHTS_FILE, "heads_spec.json"):
        if not inside(directory, name).is_file():
            result.error(f"there is no {name}: the directory decodes nothing")
    if result.findings:
        return result
    tensors = read_tensors(directory, WEIGHTS_FILE)
    check_values(tensors, where=directory / WEIGHTS_FILE, integers=[TOKEN_MAP])
    result.files = [WEIGHTS_FILE, "heads_spec.json", _OPTIONS]
    try:
        heads, _ = load_heads(directory)
    except MedusaTrainError as error:
        for line in error.lines:
            result.error(line)
        return result
    config = heads.config
    result.num_heads, result.num_layers = config.num_heads, config.num_layers
    for head in range(config.num_heads):
        blocks = tuple(
            (tensors[f"{head}.{layer}.linear.weight"], tensors[f"{head}.{layer}.linear.bias"])
            for layer in range(config.num_layers)
        )
        projection = tensors.get(f"{head}.{config.num_layers}.weight")
        result.heads.append(EngineHead(blocks, projection, tensors.get(TOKEN_MAP)))
    options = read_config(directory, _OPTIONS)
    try:
        tree = Tree.from_paths(options.get("tree") or [])
        tree.check_fits(num_heads=config.num_heads, top_k=config.num_logits)
    except TreeError as error:
        result.error(f"{_OPTIONS}: {error}")
    return result
