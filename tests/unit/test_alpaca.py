"""Rows with the keys ``instruction``, ``input`` and ``output``."""

from __future__ import annotations

import json

import pytest

from medusa_train.data.report import Tally
from medusa_train.data.sources import load_conversations_file, usable_turns
from medusa_train.data.turns import RowRefusedError, read_turns
from tests.tokenizers_for_tests import make_chat

NAME = {"role": "user", "content": "Name it.\n\nteal, a colour"}


def roles_and_contents(row, **options) -> list[tuple[str, str]]:
    return [(turn["role"], turn["content"]) for turn in read_turns(row, **options).messages]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"input": "teal, a colour"}, "Name it.\n\nteal, a colour"),
        ({"input": ""}, "Name it."),
        ({"input": " \n"}, "Name it."),
        ({"input": None}, "Name it."),
        ({}, "Name it."),
        ({"instruction": "", "input": "teal"}, "teal"),
        # The files of the Alpaca project repeat the row here, in another model's format.
        ({"text": "Below is an instruction"}, "Name it."),
    ],
)
def test_instruction_and_input_are_the_user_turn(given, expected):
    row = {"instruction": "Name it.", "output": "Teal.", **given}
    assert roles_and_contents(row) == [("user", expected), ("assistant", "Teal.")]
    assert read_turns(row).repairs == ()


def test_system_and_history_come_first():
    row = {
        "instruction": "And a metal?",
        "output": "Zinc.",
        "system": "Be brief.",
        "history": [["A colour?", "Teal."]],
    }
    assert roles_and_contents(row) == [
        ("system", "Be brief."),
        ("user", "A colour?"),
        ("assistant", "Teal."),
        ("user", "And a metal?"),
        ("assistant", "Zinc."),
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"instruction": "Name it.", "output": ""}, "no assistant turn"),
        ({"instruction": "Name it."}, "no assistant turn"),
        ({"instruction": "", "input": "", "output": "Teal."}, "an empty turn"),
        (
            {"instruction": "Name it.", "input": ["a"], "output": "Teal."},
            "a turn whose content is not text",
        ),
        (
            {"instruction": "Name it.", "history": [["a"]], "output": "Teal."},
            "not a JSON object, list of turns or text",
        ),
        ({"input": "a", "output": "b"}, "no conversations, messages or text key"),
    ],
)
def test_what_cannot_be_used_is_named(row, reason):
    with pytest.raises(RowRefusedError) as caught:
        read_turns(row)
    assert caught.value.reason == reason


def test_a_file_of_rows_and_as_prompts(tmp_path):
    path = tmp_path / "alpaca.json"
    rows = [
        {"instruction": "Name it.", "input": "teal, a colour", "output": "Teal."},
        {"instruction": "Name a metal.", "input": "", "output": ""},
    ]
    path.write_text(json.dumps(rows, indent=1))
    chat = make_chat()
    [row], report = load_conversations_file(path, chat)
    assert row.messages[0] == NAME
    [(start, end)] = row.assistant_spans
    assert chat.tokenizer.decode(row.input_ids[start:end]) == "Teal.<|im_end|>"
    assert report.dropped["no assistant turn"].count == 1
    tally = Tally()
    prompts = [list(turns.messages) for turns in usable_turns(path, tally, is_prompts=True)]
    assert prompts == [[NAME], [{"role": "user", "content": "Name a metal."}]]
    assert (tally.report().num_kept, tally.report().num_dropped) == (2, 0)
