"""Kill -9 during generation; the same command again gives the same bytes."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest

from medusa_train.distill.journal import Journal
from medusa_train.errors import InputError
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


def _journal(directory: Path) -> Path:
    return directory / "out" / "generation" / "journal.jsonl"


def _finished(directory: Path) -> frozenset[int]:
    """The units whose records are whole."""
    try:
        with Journal(_journal(directory)) as journal:
            return journal.finished
    except InputError:
        return frozenset()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def straight(base: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = tmp_path_factory.mktemp("straight")
    finish("distill", _arguments(directory, base), log=directory / "log")
    return (directory / "out" / "conversations.jsonl").read_bytes()


def test_killed_generation_gives_the_same_bytes(
    tmp_path: Path, base: Path, straight: bytes
) -> None:
    """Case 14: after 7 of 20 rows."""
    log, arguments = tmp_path / "log", _arguments(tmp_path, base)
    assert kill_when(lambda: len(_finished(tmp_path)) >= 7, "distill", arguments, log=log)
    before = _journal(tmp_path).read_bytes()
    with Journal(_journal(tmp_path)) as journal:
        whole = sum(
            len(line) for line in before.splitlines(keepends=True)[: 2 * len(journal.finished)]
        )
    assert kill_when(lambda: len(_finished(tmp_path)) >= 12, "distill", arguments, log=log)
    # What was there is not asked again.
    assert _journal(tmp_path).read_bytes()[:whole] == before[:whole]
    finish("distill", arguments, log=log)
    assert (tmp_path / "out" / "conversations.jsonl").read_bytes() == straight
    rows = [json.loads(line) for line in straight.splitlines()]
    assert len({row["id"] for row in rows}) == NUM_PROMPTS
    asked = [row["messages"][0]["content"] for row in rows]
    assert asked == [f"Name a metal, {n} of them." for n in range(NUM_PROMPTS)]


def test_ten_kills_at_random_moments(tmp_path: Path, base: Path, straight: bytes) -> None:
    """Some in the start, some in a unit, some while a record or the data set is written."""
    log, arguments = tmp_path / "log", _arguments(tmp_path, base)
    rng, kills = random.Random(14), 0
    manifest = tmp_path / "out" / "manifest.json"
    while kills < 10:
        num_finished = len(_finished(tmp_path))
        process = start("distill", arguments, log=log)
        # Two more units at most, so that ten kills find something to interrupt; then any moment.
        wanted = num_finished + rng.randrange(3)
        while len(_finished(tmp_path)) < wanted and not manifest.exists():
            assert process.poll() is None, log.read_text()
            time.sleep(0.001)
        time.sleep(rng.random() * (3.0 if wanted == num_finished else 0.02))
        process.kill()
        assert process.wait() in {-signal.SIGKILL, 0}, log.read_text()
        kills += 1
    finish("distill", arguments, log=log)
    assert (tmp_path / "out" / "conversations.jsonl").read_bytes() == straight
    assert not _journal(tmp_path).exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_finishes_the_block_and_says_how_to_go_on(
    tmp_path: Path, base: Path, number: signal.Signals
) -> None:
    log = tmp_path / "log"
    process = start("distill", _arguments(tmp_path, base), log=log)
    while len(_finished(tmp_path)) < 3:
        assert process.poll() is None, log.read_text()
        time.sleep(0.001)
    process.send_signal(number)
    assert process.wait(timeout=60) == 130
    text = log.read_text()
    assert "finishing what is being written" in text
    assert "run the same command again to go on" in text
    # No torn record: the unit that was being written is there.
    with Journal(_journal(tmp_path)) as journal:
        assert 3 <= len(journal.finished) < NUM_PROMPTS
        assert _journal(tmp_path).stat().st_size == journal.size


def test_two_processes_on_one_directory_are_refused(tmp_path: Path, base: Path) -> None:
    arguments, log = _arguments(tmp_path, base), tmp_path / "log"
    process = start("distill", arguments, log=log)
    try:
        while len(_finished(tmp_path)) < 1:
            assert process.poll() is None, log.read_text()
            time.sleep(0.001)
        process.send_signal(signal.SIGSTOP)
        other = tmp_path / "other"
        assert start("distill", arguments, log=other).wait(timeout=120) == 2
        assert "another process is working here" in other.read_text()
    finally:
        process.kill()
        process.wait()
