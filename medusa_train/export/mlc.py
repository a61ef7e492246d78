"""MLC-LLM: FasterDecoding's names behind ``medusa_head.`` (format C)."""

from __future__ import annotations

from pathlib import Path

from medusa_train.errors import InputError
from medusa_train.export.format_a import provenance, write_safetensors
from medusa_train.export.refusals import (
    chain_warning,
    refuse_bias,
    refuse_shared,
    refuse_truncated,
)
from medusa_train.export.source import HeadTensors, ServeOptions, Written
from medusa_train.heads.checkpoint import CONFIG_FILE
from medusa_train.run_dir import write_json

ENGINE = "MLC-LLM"
WEIGHTS_FILE = "model.safetensors"
PREFIX = "medusa_head."


def check(heads: HeadTensors, options: ServeOptions) -> None:
    """Raise InputError for what the engine cannot load."""
    refuse_bias(heads, ENGINE)
    refuse_truncated(heads, ENGINE)
    refuse_shared(heads, ENGINE)
    num_heads, wanted = heads.config.num_heads, options.num_speculative_tokens
    if wanted != num_heads:
        raise InputError(
            f"--num-speculative-tokens: MLC-LLM drafts with all heads, so it must be {num_heads}; "
            f"got {wanted}: give --num-heads {wanted} instead"
        )


def write(heads: HeadTensors, directory: Path, options: ServeOptions) -> Written:
    """Write format C."""
    write_safetensors(
        directory / WEIGHTS_FILE, {PREFIX + name: value for name, value in heads.tensors.items()}
    )
    config = heads.config
    write_json(
        directory / CONFIG_FILE,
        {
            "model_type": "medusa",
            "medusa_num_heads": config.num_heads,
            "medusa_num_layers": config.num_layers,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "base_model_name_or_path": heads.base.name_or_path,
            **provenance(heads),
        },
    )
    start = f"""\
BASE-MLC is the base model compiled for MLC-LLM, and CONV-TEMPLATE the name of its chat template:

```
mlc_llm convert_weight {options.directory} --quantization q0f16 -o heads-MLC
mlc_llm gen_config {options.directory} --quantization q0f16 \\
    --conv-template CONV-TEMPLATE -o heads-MLC
mlc_llm serve BASE-MLC --additional-models heads-MLC --speculative-mode medusa \\
    --overrides "spec_draft_length={config.num_heads}"
```
"""
    kept = "MLC-LLM has no quantised heads: q0f16 or q0f32, whatever the base has"
    return Written(start, (chain_warning(ENGINE), kept))
