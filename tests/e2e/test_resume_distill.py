"""Kill -9 during generation; the same command again gives the same bytes."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.processes import finish, kill_when, start
from tests.models_for_tests import save_base

NUM_PROMPTS = 20


def _arguments(directory: Path, base: Path, *, block_size: int = 1) -> list[str]:
    prompts = directory / "prompts.txt"
    prompts.write_text("".join(f"Name a metal, {n} of them.\n" for n in range(NUM_PROMPTS)))
    sets = {
        "data.distill.block_size": block_size,
        "data.distill.loop_ngram": 0,
        "data.distill.temperature": 1.0,
    }
    options = [option for key, value in sets.items() for option in ("--set", f"{key}={value}")]
    return [
        "generate", "--base-model", str(base), "--prompts", str(prompts), "--output",
        str(directory / "out"), "--max-new-tokens", "40", "--batch-size", "4", *options,
    ]  # fmt: skip


def _blocks(directory: Path) -> list[Path]:
    return sorted((directory / "out" / "blocks").glob("*.jsonl"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


def test_killed_generation_gives_the_same_bytes(tmp_path: Path, base: Path) -> None:
    """Case 14: after 7 of 20 rows; and again at other moments."""
    (tmp_path / "straight").mkdir()
    (tmp_path / "cut").mkdir()
    log = tmp_path / "log"
    finish("distill", _arguments(tmp_path / "straight", base), log=log)
    arguments = _arguments(tmp_path / "cut", base)
    written: dict[str, int] = {}
    cut = tmp_path / "cut"
    for moment in (7, 8, 15):
        assert kill_when(lambda m=moment: len(_blocks(cut)) >= m, "distill", arguments, log=log)
        for path in _blocks(cut):
            # What was there is not asked again.
            stamp = path.stat().st_mtime_ns
            assert written.setdefault(path.name, stamp) == stamp
    finish("distill", arguments, log=log)
    straight, cut_bytes = (
        (tmp_path / name / "out" / "conversations.jsonl").read_bytes()
        for name in ("straight", "cut")
    )
    assert straight == cut_bytes
    rows = [json.loads(line) for line in straight.splitlines()]
    assert len({row["id"] for row in rows}) == NUM_PROMPTS
    asked = [row["messages"][0]["content"] for row in rows]
    assert asked == [f"Name a metal, {n} of them." for n in range(NUM_PROMPTS)]


def test_interrupt_says_how_to_go_on(tmp_path: Path, base: Path) -> None:
    log = tmp_path / "log"
    process = start("distill", _arguments(tmp_path, base), log=log)
    while len(_blocks(tmp_path)) < 3:
        assert process.poll() is None, log.read_text()
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert "run the same command again to go on" in log.read_text()


def test_two_processes_on_one_directory_are_refused(tmp_path: Path, base: Path) -> None:
    arguments, log = _arguments(tmp_path, base), tmp_path / "log"
    process = start("distill", arguments, log=log)
    try:
        while len(_blocks(tmp_path)) < 1:
            assert process.poll() is None, log.read_text()
            time.sleep(0.001)
        process.send_signal(signal.SIGSTOP)
        other = tmp_path / "other"
        assert start("distill", arguments, log=other).wait(timeout=120) == 2
        assert "another process is working here" in other.read_text()
    finally:
        process.kill()
        process.wait()
