"""What an inspection counts, refuses and shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from medusa_train.data.inspect import (
    check_mask,
    decoded_segments,
    end_of_turn,
    inspect_rows,
)
from medusa_train.data.inspect_page import write_inspection
from medusa_train.data.sources import load_conversations_file
from medusa_train.errors import InputError
from tests.tokenizers_for_tests import CHATML, CHATML_THINK, CHATML_TOOLS, make_chat

DIRTY = Path(__file__).parents[1] / "data" / "dirty_sharegpt.json"


def chat_file(path: Path, *conversations: list[str]) -> Path:
    roles = ("user", "assistant")
    rows = [
        {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}
        for texts in conversations
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_what_is_counted_and_shown():
    chat = make_chat("{{ bos_token }}" + CHATML)
    rows, _ = load_conversations_file(DIRTY, chat)
    found = inspect_rows(rows, chat)
    assert found.num_conversations == found.num_double_bos == 9
    assert found.num_with_end_of_turn == found.num_spans == 9
    assert found.end_of_turn_id == chat.tokenizer.eos_token_id
    assert found.sources == {"dirty_sharegpt.json": 9}
    assert found.num_supervised_tokens == sum(row.num_supervised for row in rows)
    assert 0 < found.supervised_share < 1
    assert inspect_rows(rows, make_chat(CHATML)).as_json()["longest"] == found.longest
    pieces = decoded_segments(rows[0], chat)
    assert pieces == [
        ("<s><s><|im_start|>user\nName a colour.<|im_end|>\n<|im_start|>assistant\n", False),
        ("Teal.<|im_end|>", True),
        ("\n", False),
    ]


def test_a_mask_that_says_nothing_is_refused():
    chat = make_chat()
    rows, _ = load_conversations_file(DIRTY, chat)
    check_mask(inspect_rows(rows, chat), rows, where="data")
    empty = [replace(row, assistant_spans=(), finish_reasons=()) for row in rows]
    with pytest.raises(InputError, match="data: 0 supervised tokens"):
        check_mask(inspect_rows(empty, chat), empty, where="data")
    full = [replace(row, assistant_spans=((0, len(row.input_ids)),)) for row in rows]
    with pytest.raises(InputError, match="every token of every row is supervised"):
        check_mask(inspect_rows(full, chat), full, where="data")


def test_a_mask_over_all_but_the_first_token_of_a_chat_is_refused():
    chat = make_chat("{{ bos_token }}" + CHATML)
    rows, _ = load_conversations_file(DIRTY, chat)
    full = [replace(row, assistant_spans=((1, len(row.input_ids)),)) for row in rows]
    with pytest.raises(InputError, match="every token of every row is supervised"):
        check_mask(inspect_rows(full, chat), full, where="data")
    # Plain text has no prompt: all of it may be learned.
    text = [replace(row, messages=()) for row in full]
    check_mask(inspect_rows(text, chat), text, where="data")


def test_what_became_of_the_rows_is_in_the_refusal():
    with pytest.raises(InputError, match="data: 0 supervised tokens: all gone; "):
        check_mask(inspect_rows([], make_chat()), [], where="data", why="all gone")


def test_repeated_tokens_and_prompts_are_counted():
    chat = make_chat()
    rows, _ = load_conversations_file(DIRTY, chat)
    found = inspect_rows(rows, chat)
    assert (found.num_same_tokens, found.num_same_prompt) == (0, 0)
    found = inspect_rows([*rows, *rows[:3]], chat)
    assert (found.num_same_tokens, found.num_same_prompt) == (3, 3)


def test_a_prompt_is_the_same_whatever_its_case_and_spaces(tmp_path):
    path = chat_file(
        tmp_path / "x.jsonl",
        ["Name a colour.", "Teal."],
        ["name  a\nＣＯＬＯＵＲ.", "Teal."],
        ["Name a colour.", "Plum.", "And?", "Teal."],
        ["Name a metal.", "Teal."],
    )
    chat = make_chat()
    rows, _ = load_conversations_file(path, chat)
    found = inspect_rows(rows, chat)
    assert (found.num_same_tokens, found.num_same_prompt) == (0, 2)
    # A system turn is part of the prompt, and plain text has none.
    system = {"role": "system", "content": "Be brief."}
    other = [rows[0], replace(rows[0], messages=(system, *rows[0].messages))]
    assert inspect_rows(other, chat).num_same_prompt == 0
    text = [replace(row, messages=()) for row in rows]
    assert inspect_rows(text, chat).num_same_prompt == 0


def test_the_rows_of_one_conversation_have_one_prompt(tmp_path):
    texts = ["Hi", "<think>\na\n</think>\n\nTeal.", "And?", "Zinc."]
    chat = make_chat(CHATML_THINK)
    rows, _ = load_conversations_file(chat_file(tmp_path / "x.jsonl", texts), chat)
    assert len(rows) == 2
    assert inspect_rows(rows, chat).num_same_prompt == 0
    assert inspect_rows([*rows, *rows], chat).num_same_prompt == 1


def test_control_characters_are_shown(tmp_path):
    chat = make_chat()
    texts = ["Hi", "a\x1b[31mb\x00\tc\nd"]
    [row], _ = load_conversations_file(chat_file(tmp_path / "x.jsonl", texts), chat)
    [_, (answer, _), _] = decoded_segments(row, chat)
    assert not {"\x1b", "\x00"} & set(answer)
    assert "\t" in answer
    assert "\n" in answer


def test_the_page_adds_up_and_loads_nothing(tmp_path):
    chat = make_chat(CHATML_TOOLS)
    rows, report = load_conversations_file(DIRTY, chat)
    inspection = inspect_rows(rows, chat)
    write_inspection(
        tmp_path / "page",
        name="<b>dirty</b>",
        report=report,
        inspection=inspection,
        end_of_turn=end_of_turn(inspection, chat),
        samples=[("first", [("<s>Hi", False), ("Te<al>", True)])],
        facts={"data": "x & y"},
    )
    names = sorted(path.name for path in (tmp_path / "page").iterdir())
    assert names == ["answer_lengths.png", "inspect.html", "lengths.png"]
    page = (tmp_path / "page" / "inspect.html").read_text(encoding="utf-8")
    assert "Data: &lt;b&gt;dirty&lt;/b&gt;" in page
    assert "14 rows: 5 kept, 4 repaired, 5 dropped" in page
    assert '<th scope="row">all rows</th><td>14</td>' in page
    assert "&lt;s&gt;Hi<mark>Te&lt;al&gt;</mark>" in page
    assert page.count("<svg") == 2
    assert "http" not in page
    assert "src=" not in page
    png = (tmp_path / "page" / "lengths.png").read_bytes()
    assert png.startswith(b"\x89PNG")


def test_no_rows_leave_no_picture_of_older_ones(tmp_path):
    (tmp_path / "lengths.png").write_bytes(b"old")
    chat = make_chat()
    _, report = load_conversations_file(DIRTY, chat, max_length=1, allow_empty=True)
    inspection = inspect_rows([], chat)
    write_inspection(tmp_path, name="x", report=report, inspection=inspection, end_of_turn=None)
    assert [path.name for path in tmp_path.iterdir()] == ["inspect.html"]
