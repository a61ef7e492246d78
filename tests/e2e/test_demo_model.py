"""The directory that scripts/make_demo_model.py writes is a plain chat model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"

pytestmark = pytest.mark.e2e


def test_it_is_no_longer_quantised_and_ends_its_turns():
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    generation = json.loads((MODEL / "generation_config.json").read_text(encoding="utf-8"))
    assert generation["eos_token_id"] == config["eos_token_id"]
    tokens = json.loads((MODEL / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    (end,) = [token["id"] for token in tokens if token["content"] == "<|im_end|>"]
    assert generation["eos_token_id"] == end


def test_it_answers():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**ids, max_new_tokens=24, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, ids["input_ids"].shape[1] :])


def test_it_is_written_once():
    result = subprocess.run(
        [sys.executable, "scripts/make_demo_model.py"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0
    assert result.stderr == "models/SmolLM2-135M-Instruct: is there already\n"
