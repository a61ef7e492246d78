"""AWS NxD Inference: ``medusa_heads.pt`` in the base model's directory (format E)."""

from __future__ import annotations

from pathlib import Path

from medusa_train.export.format_a import write_choices, write_pickle
from medusa_train.export.refusals import (
    refuse_bias,
    refuse_layers,
    refuse_shared,
    refuse_truncated,
)
from medusa_train.export.source import HeadTensors, ServeOptions, Written

ENGINE = "NxD Inference"
WEIGHTS_FILE = "medusa_heads.pt"


def check(heads: HeadTensors, options: ServeOptions) -> None:
    """Raise InputError for what the engine cannot load."""
    del options
    refuse_bias(heads, ENGINE)
    refuse_truncated(heads, ENGINE)
    refuse_shared(heads, ENGINE)
    refuse_layers(heads, ENGINE, reason="the engine's heads have one")


def write(heads: HeadTensors, directory: Path, options: ServeOptions) -> Written:
    """Write format E and the tree; the base's own files are left alone."""
    write_pickle(
        directory / WEIGHTS_FILE,
        {f"medusa_head_{name}": value for name, value in heads.tensors.items()},
    )
    write_choices(directory, options)
    place, tree = options.directory, options.tree
    start = f"""\
BASE is a directory with `{heads.base.name_or_path}`; the heads have to lie in it:

```
cp {place}/{WEIGHTS_FILE} BASE/
inference_demo --model-type llama --task-type causal-lm run --model-path BASE \\
    --compiled-model-path BASE-traced --torch-dtype bfloat16 --tp-degree 2 --batch-size 1 \\
    --is-medusa --num-medusa-heads {heads.config.num_heads} \\
    --medusa-speculation-length {tree.size} --medusa-tree-json {place}/medusa_choices.json \\
    --prompt "Hello"
```
"""
    return Written(start, ("NxD Inference has Medusa for Llama models",))
