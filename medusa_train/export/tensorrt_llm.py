"""TensorRT-LLM up to 1.2.1, the TensorRT backend: format A with its pickle, which is read first."""

from __future__ import annotations

from pathlib import Path

from medusa_train.export.format_a import write_choices, write_format_a
from medusa_train.export.refusals import (
    refuse_bias,
    refuse_deep_or_wide,
    refuse_shared,
    refuse_truncated,
)
from medusa_train.export.source import HeadTensors, ServeOptions, Written

ENGINE = "TensorRT-LLM"
MAX_NODES = 63


def check(heads: HeadTensors, options: ServeOptions) -> None:
    """Raise InputError for what the engine cannot load."""
    refuse_bias(heads, ENGINE)
    refuse_truncated(heads, ENGINE)
    refuse_shared(heads, ENGINE)
    refuse_deep_or_wide(options, ENGINE, max_nodes=MAX_NODES)


def write(heads: HeadTensors, directory: Path, options: ServeOptions) -> Written:
    """Write format A, its pickle and the tree."""
    write_format_a(heads, directory, with_pickle=True)
    write_choices(directory, options)
    config, place = heads.config, options.directory
    half = "bfloat16" if str(heads.dtype) == "torch.bfloat16" else "float16"
    start = f"""\
With the examples of TensorRT-LLM 1.2.1, BASE being a directory with `{heads.base.name_or_path}`:

```
python examples/medusa/convert_checkpoint.py --model_dir BASE --medusa_model_dir {place} \\
    --num_medusa_heads {config.num_heads} --num_medusa_layers {config.num_layers} \\
    --max_medusa_token_len {options.tree.num_nodes} --dtype {half} --output_dir checkpoint
trtllm-build --checkpoint_dir checkpoint --output_dir engine --gemm_plugin {half} \\
    --speculative_decoding_mode medusa --max_batch_size 4
python examples/run.py --engine_dir engine --tokenizer_dir BASE --max_output_len 128 \\
    --medusa_choices "$(cat {place}/medusa_choices.json)" --temperature 1.0 --input_text "Hello"
```
"""
    return Written(start, ("releases after 1.2.1 have no TensorRT backend and so no Medusa",))
