"""The prompts that come with the package: all usable, mixed, and distinct."""

from __future__ import annotations

import json
from typing import Any

import pytest

from medusa_train.data.sources import iterate_turns
from medusa_train.data.turns import Turns
from medusa_train.distill.demo_prompts import demo_prompts_path
from medusa_train.distill.duplicates import PromptFilter
from medusa_train.distill.language import LanguageFilter


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in demo_prompts_path().read_text("utf-8").splitlines()]


def user_texts(row: dict[str, Any]) -> list[str]:
    if "turns" in row:
        return list(row["turns"])
    return [turn["content"] for turn in row["messages"] if turn["role"] == "user"]


def test_every_row_can_be_used_as_it_is(rows: list[dict[str, Any]]) -> None:
    read = [row for _, row in iterate_turns(demo_prompts_path(), is_prompts=True)]
    assert len(read) == len(rows) == 120
    for given, turns in zip(rows, read, strict=True):
        assert isinstance(turns, Turns)
        assert not turns.repairs
        assert turns.messages[-1] == {"role": "user", "content": user_texts(given)[0]}
        assert [turn["content"] for turn in turns.later] == user_texts(given)[1:]


def test_all_are_distinct(rows: list[dict[str, Any]]) -> None:
    prompts = PromptFilter(near_duplicate=0.8)
    assert [prompts.fault("\n".join(user_texts(row))) for row in rows] == [None] * len(rows)
    single = PromptFilter(near_duplicate=0.8)
    assert {single.fault(text) for row in rows for text in user_texts(row)} == {None}


def test_the_mix_is_what_the_module_says(rows: list[dict[str, Any]]) -> None:
    assert sum(len(row.get("turns", ())) > 1 for row in rows) == 20
    systems = [row for row in rows if "messages" in row and row["messages"][0]["role"] == "system"]
    assert len(systems) == 12
    english = LanguageFilter(["en"])
    foreign = [row for row in rows if english.is_wrong(" ".join(user_texts(row)))]
    assert len(foreign) == 13
    assert any("turns" in row for row in rows[:20])
    assert any(english.is_wrong(" ".join(user_texts(row))) for row in rows[:20])
    assert any(row in systems for row in rows[:20])


def test_texts_are_clean(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert set(row) in ({"messages"}, {"turns"})
        for text in user_texts(row):
            assert text == text.strip()
            assert 0 < len(text) < 1000
