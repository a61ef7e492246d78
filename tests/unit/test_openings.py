"""Where prompts come from, and in which proportion."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_train.distill.openings import Openings, _interleaved
from medusa_train.distill.settings import DistillSettings, PromptSource
from medusa_train.errors import InputError


def _lines(directory: Path, name: str, count: int) -> PromptSource:
    path = directory / f"{name}.txt"
    path.write_text("".join(f"{name} {n}\n" for n in range(count)))
    return PromptSource("file", str(path))


def _weighted(source: PromptSource, weight: float) -> PromptSource:
    return PromptSource(source.source, source.path, weight=weight)


def _open(directory: Path, *sources: PromptSource, **settings: Any) -> Openings:
    return Openings(
        DistillSettings(sources=sources, **settings), has_template=True, scratch=directory
    )


def test_all_prompts_of_a_file_in_its_order(tmp_path: Path) -> None:
    with _open(tmp_path, _lines(tmp_path, "a", 5)) as openings:
        assert len(openings) == 5
        texts = [o.messages[0]["content"] for o in openings.between(0, 9) if o.messages]
        assert texts == [f"a {n}" for n in range(5)]
        assert [o.index for o in openings.between(2, 4)] == [2, 3]


def test_sources_are_mixed_by_weight_in_every_stretch(tmp_path: Path) -> None:
    a, b = (_lines(tmp_path, name, 100) for name in "ab")
    with _open(
        tmp_path, _weighted(a, 3.0), b, PromptSource("model", weight=1.0), num_prompts=50
    ) as openings:
        assert openings.sizes == {"a.txt": 30, "b.txt": 10, "magpie": 10}
        first = Counter(o.source for o in openings.between(0, 10))
        assert first == {"a.txt": 6, "b.txt": 2, "magpie": 2}
        texts = [o.messages[0]["content"] for o in openings.between(0, 50) if o.source == "a.txt"
                 and o.messages]  # fmt: skip
        assert texts == [f"a {n}" for n in range(30)]


def test_a_source_with_too_few_prompts_gives_all_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = _lines(tmp_path, "a", 4), _lines(tmp_path, "b", 30)
    with _open(tmp_path, a, b, num_prompts=20) as openings:
        assert openings.sizes == {"a.txt": 4, "b.txt": 16}
    with _open(tmp_path, a, b, num_prompts=50) as openings:
        assert openings.sizes == {"a.txt": 4, "b.txt": 30}
    assert "the sources hold 34 prompts; 50 were asked for" in capsys.readouterr().err


def test_a_limit_bounds_what_is_read(tmp_path: Path) -> None:
    source = PromptSource("file", _lines(tmp_path, "a", 9).path, limit=4)
    with _open(tmp_path, source) as openings:
        assert len(openings) == 4


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4))
def test_mixing_loses_and_doubles_nothing(sizes: list[int]) -> None:
    which, places = _interleaved(sizes)
    pairs = list(zip(which.tolist(), places.tolist(), strict=True))
    assert sorted(pairs) == [(i, n) for i, size in enumerate(sizes) for n in range(size)]
    for i in range(len(sizes)):
        assert [n for w, n in pairs if w == i] == list(range(sizes[i]))


def test_a_directory_of_the_datasets_library(tmp_path: Path) -> None:
    directory = tmp_path / "corpus"
    directory.mkdir()
    rows = [
        {"messages": [{"role": "user", "content": f"q {n}"},
                      {"role": "assistant", "content": "a"},
                      {"role": "user", "content": "more"}], "score": n}
        for n in range(6)
    ]  # fmt: skip
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = PromptSource("dataset", str(directory), limit=4)
    with _open(tmp_path, source) as openings:
        assert len(openings) == 4
        [first] = openings.between(0, 1)
        assert first.messages == ({"role": "user", "content": "q 0"},)
        assert [turn["content"] for turn in first.later] == ["more"]
    with pytest.raises(InputError, match=r"no column 'nix'; name one of messages, score"):
        _open(tmp_path, PromptSource("dataset", str(directory), column="nix"))
    with pytest.raises(InputError, match=r"split 'nix' cannot be loaded"):
        _open(tmp_path, PromptSource("dataset", str(directory), split="nix"))


def test_a_column_of_texts(tmp_path: Path) -> None:
    directory = tmp_path / "corpus"
    directory.mkdir()
    (directory / "train.jsonl").write_text('{"question": "Why?"}\n{"question": "How?"}\n')
    with _open(tmp_path, PromptSource("dataset", str(directory), column="question")) as openings:
        asked = [o.messages for o in openings.between(0, 2)]
    assert asked == [({"role": "user", "content": text},) for text in ("Why?", "How?")]


def test_the_bundled_prompts(tmp_path: Path) -> None:
    with _open(tmp_path, PromptSource("demo")) as openings:
        assert len(openings) == 120
        assert any(opening.later for opening in openings.between(0, 120))


def test_a_number_is_needed_where_the_model_writes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"num_prompts: must be given"):
        _open(tmp_path, PromptSource("model"))


def test_a_directory_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    settings = DistillSettings(sources=(PromptSource("file", str(tmp_path)),))
    with pytest.raises(InputError, match=rf"^{tmp_path}: cannot be read: Is a directory"):
        Openings(settings, has_template=True, scratch=tmp_path)


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"conversations": []}\n')
    with pytest.raises(InputError, match=r"x.jsonl: no prompts: 1 of 1 rows were dropped"):
        _open(tmp_path, PromptSource("file", str(tmp_path / "x.jsonl")))
