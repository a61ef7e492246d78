"""FasterDecoding's Medusa, the original implementation at its last commit, e2a5d20."""

from __future__ import annotations

from pathlib import Path

from medusa_train.export.format_a import write_choices, write_format_a
from medusa_train.export.refusals import (
    refuse,
    refuse_bias,
    refuse_deep_or_wide,
    refuse_layers,
    refuse_shared,
    refuse_truncated,
)
from medusa_train.export.source import HeadTensors, ServeOptions, Written

ENGINE = "FasterDecoding/Medusa"
NUM_HEADS = 5
"""How many heads it builds on this path, whatever the config says."""
NUM_RANKS = 10
MODEL_TYPES = ("llama", "mistral")
REPEATED_BLOCK = (
    "the engine makes one ResBlock and uses it for all layers of a head, so the last one's weights "
    "would stand in all of them"
)


def check(heads: HeadTensors, options: ServeOptions) -> None:
    """Raise InputError for what the engine cannot load."""
    check_model(heads, options, engine=ENGINE)
    if heads.config.num_heads > NUM_HEADS:
        raise refuse(
            ENGINE,
            f"there are {heads.config.num_heads}, but the engine builds {NUM_HEADS} and would "
            "leave the others out without a word",
            f"give --num-heads {NUM_HEADS}",
        )


def check_model(heads: HeadTensors, options: ServeOptions, *, engine: str) -> None:
    """What holds for both forms that the original implementation reads."""
    if heads.model_type not in MODEL_TYPES:
        raise refuse(
            engine,
            f"the base is of the kind {heads.model_type!r}, but the engine has Llama and Mistral "
            "alone",
            "choose another target",
        )
    refuse_bias(heads, engine)
    refuse_truncated(heads, engine)
    refuse_shared(heads, engine)
    refuse_layers(heads, engine, reason=REPEATED_BLOCK)
    refuse_deep_or_wide(options, engine, max_rank=NUM_RANKS)


def write(heads: HeadTensors, directory: Path, options: ServeOptions) -> Written:
    """Write format A, its pickle, which alone the engine reads, and the tree."""
    write_format_a(heads, directory, with_pickle=True)
    write_choices(directory, options)
    warnings = ["the engine decodes one prompt at a time"]
    if heads.config.num_heads < NUM_HEADS:
        warnings.append(
            f"the engine always builds {NUM_HEADS} heads; those after head "
            f"{heads.config.num_heads} keep random weights, and its own trees use them: pass "
            "medusa_choices.json, which does not"
        )
    return Written(start_command(heads, options, directory=str(options.directory)), tuple(warnings))


def start_command(heads: HeadTensors, options: ServeOptions, *, directory: str) -> str:
    """How to start it with the tree of the export."""
    del options
    half = "bfloat16" if str(heads.dtype) == "torch.bfloat16" else "float16"
    return f"""\
```
pip install git+https://github.com/FasterDecoding/Medusa@e2a5d20
```

```python
import json, torch
from medusa.model.medusa_model import MedusaModel

model = MedusaModel.from_pretrained({directory!r}, torch_dtype=torch.{half}, device_map="auto")
ids = model.get_tokenizer()("Hello", return_tensors="pt").input_ids.to(model.base_model.device)
choices = json.load(open({directory + "/medusa_choices.json"!r}))
for step in model.medusa_generate(ids, temperature=0.0, medusa_choices=choices):
    print(step["text"])
```
"""
