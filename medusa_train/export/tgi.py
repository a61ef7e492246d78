"""Text Generation Inference: format A, or its shared form ("V2") with one layer."""

from __future__ import annotations

from pathlib import Path

from medusa_train.export.format_a import write_format_a
from medusa_train.export.refusals import (
    chain_warning,
    refuse_bias,
    refuse_layers,
    refuse_truncated,
)
from medusa_train.export.source import HeadTensors, ServeOptions, Written

ENGINE = "TGI"


def check(heads: HeadTensors, options: ServeOptions) -> None:
    """Raise InputError for what the engine cannot load."""
    del options
    refuse_bias(heads, ENGINE)
    refuse_truncated(heads, ENGINE)
    if heads.config.layout == "shared":
        refuse_layers(heads, ENGINE, reason="the engine's shared form has one (medusa_num_layers)")


def write(heads: HeadTensors, directory: Path, options: ServeOptions) -> Written:
    """Write format A; shared heads have their ResBlocks alone in it."""
    write_format_a(heads, directory)
    start = f"""\
```
text-generation-launcher --model-id {options.directory} --speculate {options.num_speculative_tokens}
```

The engine loads the base from `base_model_name_or_path` in `config.json`
(`{heads.base.name_or_path}`): a path there has to exist where the engine runs.
"""
    batch = "speculation is skipped in batches of more than 128 tokens"
    return Written(start, (chain_warning(ENGINE), f"TGI is in maintenance mode; {batch}"))
