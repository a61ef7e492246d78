"""scripts/bench_decode.py: its keys, and that its reference engine writes what the base writes."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from medusa_train.medusa_model import MedusaModel
from tests.decoding_for_tests import save_heads_directory
from tests.models_for_tests import save_base

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "scripts" / "bench_decode.py")


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bench")
    base = save_base(directory / "base")
    return save_heads_directory(directory / "heads", base=base, token_map=torch.arange(0, 60, 2))


def test_the_reference_engine_writes_what_the_base_writes(heads: Path) -> None:
    names = runpy.run_path(SCRIPT)
    model = MedusaModel.from_pretrained(heads, dtype="float32")
    ids = torch.randint(0, model.base.num_tokens, (1, 30), generator=torch.manual_seed(3))
    tokens, others = (
        names["preallocating"](model, model.heads, ids, num_tokens=9, full_vocabulary=full)
        for full in (False, True)
    )
    assert tokens == others
    plain = model.base.model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False
    )
    written = plain[0, 30:].tolist()
    assert tokens[: len(written)] == written
    assert names["ours"](model, ids, num_tokens=9) == written


def test_the_result(heads: Path, tmp_path: Path) -> None:
    """One child per engine; of a tiny model memory says nothing, so only its keys are looked at."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"turns": ["Name a metal."]}\n{"turns": ["two and two"]}\n')
    options = ["--heads", heads, "--prompts", prompts, "--max-new-tokens", 6, "--dtypes", "float32"]
    done = subprocess.run(
        [sys.executable, SCRIPT, *map(str, options), "--lengths", "64", "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["identical_outputs"]["identical"] == 2
    assert result["speedup_vs_generate"] == result["speedup"]["speedup"] > 0
    assert result["speedup_vs_self"] > 0
    assert (result["generate_dtype"], result["medusa_dtype"]) == ("float32", "float32")
    [row] = result["memory"]
    assert row["tokens"] == 64
    assert row["same_text"]
    assert result["peak_memory_ratio_64"] == row["ratio"] > 0
    assert result["peak_memory_ratio_64_full_vocabulary"] > 0
