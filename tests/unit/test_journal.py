"""The append-only file of a generation: what is whole counts, what is torn goes."""

from __future__ import annotations

import resource
from collections import Counter
from pathlib import Path

import pytest

from medusa_train.data.conversations import Conversation
from medusa_train.distill.journal import Failed, Journal, Unit
from medusa_train.errors import InputError, MedusaTrainError


def _row(name: str) -> Conversation:
    messages = ({"role": "user", "content": "Grüße ☃"}, {"role": "assistant", "content": name})
    return Conversation(name, "test", messages, (1, 2, 3), ((1, 3),), ("stop",), {"seed": 0})


def _unit(number: int, *, rows: int = 2, failed: bool = False) -> Unit:
    return Unit(
        number,
        rows=[_row(f"{number}-{n}") for n in range(rows)],
        teachers=[f"teacher {n}" for n in range(rows)],
        dropped=Counter({"empty answer": 1}),
        failed=[Failed(number, "test", "timeout", "3 s")] if failed else [],
        num_drawn=3,
        num_usable=2,
        num_tokens=17,
        seconds=0.25,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "work" / "journal.jsonl"


def test_units_are_read_as_they_were_written(path: Path) -> None:
    units = [_unit(3), _unit(0, rows=0), _unit(7)]
    with Journal(path, writable=True) as journal:
        for unit in units:
            journal.append(unit)
        assert [journal.read(unit.number) for unit in units] == units
    with Journal(path) as journal:
        assert [journal.read(unit.number) for unit in units] == units
        assert journal.finished == {0, 3, 7}
        assert (journal.num_rows, journal.num_drawn, journal.num_usable) == (4, 9, 6)
        assert 5 not in journal


def test_a_kill_at_any_byte_loses_only_the_unit_that_was_written(path: Path) -> None:
    with Journal(path, writable=True) as journal:
        journal.append(_unit(0))
        whole = path.stat().st_size
        journal.append(_unit(1))
    content = path.read_bytes()
    for size in range(whole, len(content)):
        path.write_bytes(content[:size])
        with Journal(path, writable=True) as journal:
            assert journal.finished == {0}
            assert path.stat().st_size == whole
            journal.append(_unit(1))
        assert path.read_bytes() == content


def test_a_unit_with_failed_prompts_is_not_finished(path: Path) -> None:
    with Journal(path, writable=True) as journal:
        journal.append(_unit(0, failed=True))
        assert journal.finished == frozenset()
        assert 0 in journal
        assert journal.read(0).failed == [Failed(0, "test", "timeout", "3 s")]
        journal.append(_unit(0))
    with Journal(path) as journal:
        assert journal.finished == {0}
        assert journal.read(0).failed == []


def test_a_full_disk_is_an_error_that_keeps_what_was_there(path: Path) -> None:
    """The limit on the size of a file fails a write in the middle, as a full disk does."""
    with Journal(path, writable=True) as journal:
        journal.append(_unit(0))
        size = path.stat().st_size
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, before[1]))
        try:
            with pytest.raises(MedusaTrainError, match=r"cannot be written: .*1 finished units"):
                journal.append(_unit(1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert path.stat().st_size == size
        journal.append(_unit(1))
    with Journal(path) as journal:
        assert journal.finished == {0, 1}
        assert journal.read(1) == _unit(1)


def test_damage_before_the_end_is_an_error_and_nothing_is_cut_off(path: Path) -> None:
    with Journal(path, writable=True) as journal:
        for number in range(3):
            journal.append(_unit(number))
    content = path.read_bytes()
    second = content.index(b'{"unit": 1')
    for damaged in (b"?" + content[1:], content[:second] + b"{}\n" + content[second:]):
        path.write_bytes(damaged)
        for writable in (True, False):
            with pytest.raises(MedusaTrainError, match=r"journal.jsonl: damaged: byte \d+ begins"):
                Journal(path, writable=writable)
        assert path.read_bytes() == damaged
    row = content.index(b'"id":', second)
    path.write_bytes(content[:row] + b"\xff" + content[row + 1 :])
    with Journal(path) as journal:
        assert journal.read(0) == _unit(0)
        with pytest.raises(MedusaTrainError, match=r"damaged: unit 1: .*remove it and run"):
            journal.read(1)


def test_a_missing_journal_is_named(path: Path) -> None:
    with pytest.raises(InputError, match=r"journal.jsonl: no such file"):
        Journal(path)
    assert not path.parent.exists()
