"""Memory does not grow with the number of rows."""

from __future__ import annotations

import os
import random
from pathlib import Path

from tests.e2e.processes import start
from tests.models_for_tests import save_base

MB = 2**20


def _peak(directory: Path, base: Path, *, num_prompts: int) -> int:
    """Bytes that generation of so many rows of 8 tokens had in memory at its worst."""
    rng = random.Random(0)
    words = [f"{a}{b}" for a in "bcdfglmnprst" for b in ("an", "el", "ir", "os", "ut")]
    prompts = directory / f"{num_prompts}.txt"
    prompts.write_text(
        "".join(f"{' '.join(rng.choices(words, k=12))}?\n" for _ in range(num_prompts))
    )
    arguments = [
        "generate", "--base-model", str(base), "--prompts", str(prompts), "--output",
        str(directory / f"out-{num_prompts}"), "--max-new-tokens", "8", "--batch-size", "128",
        "--set", "data.distill.near_duplicate=0.8", "--set", "data.distill.loop_ngram=0",
    ]  # fmt: skip
    log = directory / "log"
    process = start("distill", arguments, log=log)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, log.read_text()
    assert f"conversations of {num_prompts} prompts" in log.read_text()
    return usage.ru_maxrss * 1024


def test_ten_thousand_rows_need_the_memory_of_two_hundred(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    few, many = (_peak(tmp_path, base, num_prompts=count) for count in (200, 10_000))
    assert many <= 1.05 * few + 50 * MB, (few / MB, many / MB)
