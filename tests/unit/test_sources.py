"""Files to rows: every row is kept, repaired or dropped, and counted."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from medusa_train.data.chat import ChatTokenizer
from medusa_train.data.conversations import split_of
from medusa_train.data.report import Tally
from medusa_train.data.sources import iterate_prompts, load_conversations_file, truncate_rows
from medusa_train.errors import InputError, InputErrors
from tests.tokenizers_for_tests import (
    CHATML_THINK,
    CHATML_TOOLS,
    EOS,
    MISTRAL,
    make_chat,
    make_tokenizer,
)

DIRTY = Path(__file__).parents[1] / "data" / "dirty_sharegpt.json"
TABLE = [
    ("kept", "", 5),
    ("repaired", "neighbouring turns of one role joined by a blank line", 1),
    ("repaired", "number taken as text", 1),
    ("repaired", "turns after the last answer removed", 1),
    ("repaired", "turns before the first user turn removed", 1),
    ("dropped", "a turn without content", 1),
    ("dropped", "no assistant turn", 1),
    ("dropped", "no conversations, messages or text key", 1),
    ("dropped", "no turns", 1),
    ("dropped", "unknown role", 1),
    ("all rows", "", 14),
]


def chat_row(*texts: str, role_key: str = "role") -> dict:
    roles = ("user", "assistant")
    turns = [{role_key: roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": turns}


def write_lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def answers(chat, rows) -> list[list[str]]:
    return [
        [chat.tokenizer.decode(row.input_ids[s:e]) for s, e in row.assistant_spans] for row in rows
    ]


@pytest.fixture
def dirty_array(tmp_path):
    lines = DIRTY.read_text(encoding="utf-8-sig").splitlines()
    path = tmp_path / "dirty_array.json"
    path.write_text(json.dumps([json.loads(line) for line in lines], indent=1))
    return path


def test_a_dirty_file_gives_a_table_that_adds_up():
    chat = make_chat(CHATML_TOOLS)
    rows, report = load_conversations_file(DIRTY, chat)
    assert report.rows() == TABLE
    assert report.num_rows == 14
    assert report.dropped["unknown role"].locations == (f"{DIRTY}:10 ('narrator')",)
    assert answers(chat, rows) == [
        ["Teal.<|im_end|>"],
        ["Plum.<|im_end|>"],
        ["The Danube.<|im_end|>"],
        ["Zinc.<|im_end|>"],
        ["Wren.<|im_end|>"],
        ["Neon.<|im_end|>"],
        ["Alder.<|im_end|>"],
        ["Seven.<|im_end|>"],
        [
            '[call]{"name": "weather", "arguments": {"city": "Oslo"}}<|im_end|>',
            "It is 4 degrees and raining in Oslo.<|im_end|>",
        ],
    ]
    contents = [[message["content"] for message in row.messages] for row in rows]
    assert contents[1] == ["You are terse.", "Name a fruit.", "Plum."]
    assert contents[2] == ["Name a river.", "The Danube."]
    assert contents[5] == ["Wait.\n\nName a gas.", "Neon."]
    assert contents[6] == ["Name a tree.", "Alder."]
    assert contents[7] == ["7", "Seven."]
    assert len({row.id for row in rows}) == 9


def test_the_same_rows_as_an_array_give_the_same_table(dirty_array):
    rows, report = load_conversations_file(dirty_array, make_chat(CHATML_TOOLS))
    expected, _ = load_conversations_file(DIRTY, make_chat(CHATML_TOOLS))
    assert report.rows() == TABLE
    assert [row.input_ids for row in rows] == [row.input_ids for row in expected]


def test_strict_names_every_row():
    with pytest.raises(InputErrors) as caught:
        load_conversations_file(DIRTY, make_chat(CHATML_TOOLS), strict=True)
    lines = caught.value.lines
    assert len(lines) == 9
    assert lines[0] == (
        f"{DIRTY}:3: the row needs a repair: turns before the first user turn removed (strict)"
    )
    assert lines[5] == f"{DIRTY}:10: the row cannot be used: unknown role, got 'narrator' (strict)"


def prompts_of(path):
    tally = Tally()
    return list(iterate_prompts(path, tally)), tally.report()


def test_prompts_keep_user_only_rows(dirty_array):
    for path in (DIRTY, dirty_array):
        prompts, report = prompts_of(path)
        messages = [list(prompt.messages) for prompt in prompts]
        assert [{"role": "user", "content": "Is anyone there?"}] in messages
        assert all(turns[-1]["role"] == "user" for turns in messages)
        assert report.num_rows == 14
        assert len(prompts) == report.num_kept + report.num_repaired


def test_prompts_of_other_kinds(tmp_path):
    text = tmp_path / "prompts.txt"
    text.write_bytes(b"\xef\xbb\xbfName a colour.\r\n\n  Name a metal.\n")
    asked = ["Name a colour.", "Name a metal."]
    assert [prompt.text for prompt in prompts_of(text)[0]] == asked
    rows = [
        {"turns": ["Name a colour.", "And another?"]},
        {"prompt": "Name a metal.", "completion": "Zinc."},
    ]
    prompts, _ = prompts_of(write_lines(tmp_path / "x.jsonl", *rows))
    assert [prompt.messages for prompt in prompts] == [
        ({"role": "user", "content": text},) for text in asked
    ]
    assert prompts[0].later == ({"role": "user", "content": "And another?"},)
    prompts, report = prompts_of(write_lines(tmp_path / "y.jsonl", {"conversations": []}))
    assert not prompts
    assert report.summary() == "1 of 1 rows were dropped (no turns: 1)"


def test_later_turns_of_a_prompt_end_where_they_cannot_be_asked_again(tmp_path):
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"), ("tool", "e")]
    row = {"messages": [{"role": r, "content": c} for r, c in [*turns, ("user", "f")]]}
    [prompt], _ = prompts_of(write_lines(tmp_path / "x.jsonl", row))
    assert prompt.messages == ({"role": "user", "content": "a"},)
    assert prompt.later == ({"role": "user", "content": "c"},)


def test_user_only_rows_are_nothing_to_learn(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", chat_row("Hello"), chat_row("Hello there"))
    with pytest.raises(InputError) as caught:
        load_conversations_file(path, make_chat())
    assert str(caught.value) == (
        f"{path}: 0 supervised tokens: 2 of 2 rows were dropped (no assistant turn: 2); "
        "every conversation needs an answer of the assistant within the maximal length"
    )
    assert load_conversations_file(path, make_chat(), allow_empty=True)[0] == []


def test_an_answer_beyond_the_maximal_length_is_reported_with_its_line(tmp_path):
    path = write_lines(
        tmp_path / "x.jsonl", chat_row("Hi", "Teal."), chat_row("Name a colour. " * 20, "Teal.")
    )
    rows, report = load_conversations_file(path, make_chat(), max_length=40)
    reason = "no supervised token within the maximal length"
    assert len(rows) == 1
    assert report.dropped[reason].locations == (f"{path}:2",)
    # The same for a data set directory, where the line is that of conversations.jsonl.
    whole, _ = load_conversations_file(path, make_chat())
    kept, report = truncate_rows(whole, max_length=40, directory=tmp_path)
    assert kept == rows
    [location] = report.dropped[reason].locations
    assert location == f"{tmp_path / 'conversations.jsonl'}:2 (id {whole[1].id})"


def test_a_cut_answer_has_no_invented_end(tmp_path):
    chat = make_chat()
    path = write_lines(tmp_path / "x.jsonl", chat_row("Hi", "Teal is a colour between blue."))
    [whole], _ = load_conversations_file(path, chat)
    [(start, _)] = whole.assistant_spans
    [row], _ = load_conversations_file(path, chat, max_length=start + 3)
    assert row.assistant_spans == ((start, start + 3),)
    assert len(row.input_ids) == start + 3
    assert row.finish_reasons == ("length",)
    assert chat.stop_ids.isdisjoint(row.input_ids[start:])
    assert row.id == whole.id


def _call(calls):
    """A row with an answer that holds tool calls."""
    row = chat_row("Hi", "Teal.")
    row["messages"][-1] |= {"tool_calls": calls}
    return row


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"conversations": "hello"}, "not a JSON object, list of turns or text"),
        (3, "not a JSON object, list of turns or text"),
        ({"messages": ["hello"]}, "not a JSON object, list of turns or text"),
        (chat_row("Hi", ""), "an empty turn"),
        (chat_row("Hi", " \n"), "an empty turn"),
        ({"text": ""}, "an empty turn"),
        ({"text": 3}, "a turn whose content is not text"),
        (chat_row("Hi", True), "a turn whose content is not text"),
        (chat_row("Hi", [{"type": "image", "url": "x"}]), "a turn whose content is not text"),
        (chat_row("Hi", "\ud83d"), "text that is not valid Unicode"),
        (
            {"messages": [{"role": "user", "content": "Hi", "name": "\ud83d"}]},
            "text that is not valid Unicode",
        ),
        ({**chat_row("Hi", "Teal."), "tools": ["\ud83d"]}, "text that is not valid Unicode"),
        (_call(3), "tool calls or tools that are no list of objects"),
        (_call({"name": "f"}), "tool calls or tools that are no list of objects"),
        (_call(["f"]), "tool calls or tools that are no list of objects"),
        (_call([{"function": "f"}]), "tool calls or tools that are no list of objects"),
        (_call("[" * 100_000), "a turn whose content is not text"),
        (_call("1" * 5000), "a turn whose content is not text"),
        (
            {**chat_row("Hi", "Teal."), "tools": {"name": "f"}},
            "tool calls or tools that are no list of objects",
        ),
        ({**chat_row("Hi", "Teal."), "tools": "[" * 100_000}, "a turn whose content is not text"),
        ({"messages": [{"role": "assistant", "content": "Hi"}]}, "no user turn"),
        ({"messages": [{"content": "Hi"}]}, "unknown role"),
        ({"id": 1, "messages": None}, "no conversations, messages or text key"),
    ],
)
def test_what_cannot_be_used_is_dropped_by_name(tmp_path, row, reason):
    path = write_lines(tmp_path / "x.jsonl", chat_row("Hi", "Teal."), row)
    rows, report = load_conversations_file(path, make_chat())
    assert len(rows) == 1
    assert list(report.dropped) == [reason]
    assert report.dropped[reason].locations[0].startswith(f"{path}:2")


@pytest.mark.parametrize(
    ("row", "contents"),
    [
        (
            chat_row("Hi", [{"type": "text", "text": "Te"}, {"type": "text", "text": "al."}]),
            "Teal.",
        ),
        (chat_row("Hi", 1.5), "1.5"),
        (
            {"messages": [*chat_row("Hi", "Te")["messages"], {"role": "bot", "content": "al"}]},
            "Te\n\nal",
        ),
        ({"prompt": "Hi", "completion": 7}, "7"),
    ],
)
def test_what_can_be_repaired_is_repaired_and_counted(tmp_path, row, contents):
    [row], report = load_conversations_file(write_lines(tmp_path / "x.jsonl", row), make_chat())
    assert row.messages[-1]["content"] == contents
    assert (report.num_kept, report.num_repaired, report.num_dropped) == (0, 1, 0)


def test_two_repairs_of_one_row_count_once(tmp_path):
    row = {"messages": [{"role": "gpt", "content": "Hi"}, *chat_row("a", 3, "b")["messages"]]}
    _, report = load_conversations_file(write_lines(tmp_path / "x.jsonl", row), make_chat())
    assert report.rows()[-1] == ("all rows", "", 1)
    assert list(report.repaired) == [
        "number taken as text; turns before the first user turn removed; "
        "turns after the last answer removed"
    ]


def test_a_broken_line_does_not_hide_the_others(tmp_path):
    path = tmp_path / "x.jsonl"
    good = json.dumps(chat_row("Hi", "Teal.")).encode()
    path.write_bytes(good + b"\n{oops\n\n\xff\n" + good.replace(b"Teal", b"Zinc"))
    rows, report = load_conversations_file(path, make_chat())
    assert len(rows) == 2
    assert report.dropped["not valid JSON in UTF-8"].locations == (f"{path}:2", f"{path}:4")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"text": "a b"},\n {"text": 3 4}]', ":2: not valid JSON: "),
        ('[{"text": "a b"}\n {"text": "c d"}]', ":2: not valid JSON: expected ',' or ']'"),
        ('[{"text": "a b"}]\n]', ":2: not valid JSON: text after the array"),
        ("{\n'text'", ":2: not valid JSON: "),
    ],
)
def test_a_broken_array_is_refused_with_its_line(tmp_path, text, message):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        load_conversations_file(path, make_chat(None))
    assert str(caught.value).startswith(f"{path}{message}")


def test_an_array_names_the_lines_of_its_rows(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('[{"text": "a b"},\n\n {"text": 1}, {"text": 2},\n{"text":\n 3}]')
    _, report = load_conversations_file(path, make_chat(None))
    [reason] = report.dropped.values()
    assert reason.locations == (f"{path}:3", f"{path}:3", f"{path}:4")


def test_one_object_over_several_lines_is_one_row(tmp_path):
    path = tmp_path / "x.json"
    path.write_text(json.dumps(chat_row("Hi", "Teal."), indent=2))
    assert len(load_conversations_file(path, make_chat())[0]) == 1


def test_lists_of_turns_are_rows(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", chat_row("Hi", "Teal.")["messages"])
    assert len(load_conversations_file(path, make_chat())[0]) == 1


def test_parquet(tmp_path):
    path = tmp_path / "x.parquet"
    rows = [chat_row("Hi", "Teal."), {"messages": []}, chat_row("Hi", "Zinc.")]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    chat = make_chat()
    found, report = load_conversations_file(path, chat)
    assert answers(chat, found) == [["Teal.<|im_end|>"], ["Zinc.<|im_end|>"]]
    assert report.dropped["no turns"].locations == (f"{path}:2",)
    path.write_bytes(b"no parquet")
    with pytest.raises(InputError, match="not a Parquet file"):
        load_conversations_file(path, chat)


def test_plain_text_needs_no_template(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("Teal is a colour.\n\nZinc is a metal.")
    chat = make_chat(None)
    [row], report = load_conversations_file(path, chat)
    assert chat.tokenizer.decode(row.input_ids) == "<s>Teal is a colour.\n\nZinc is a metal."
    assert row.messages == ()
    assert row.finish_reasons == ("given",)
    assert report.notes == {}


def test_chats_need_a_template(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", {"text": "Teal."}, chat_row("Hi", "Teal."))
    with pytest.raises(InputError, match=r"x\.jsonl:2: the row is a chat.*--chat-template"):
        load_conversations_file(path, make_chat(None))


def test_rewritten_history_is_noted_and_stays_on_one_side(tmp_path):
    row = chat_row("Hi", "<think>\na\n</think>\n\nTeal.", "And?", "Zinc.")
    rows, report = load_conversations_file(
        write_lines(tmp_path / "x.jsonl", row), make_chat(CHATML_THINK)
    )
    assert len(rows) == 2
    assert [len(row.messages) for row in rows] == [2, 4]
    assert report.rows() == [("kept", "", 1), ("all rows", "", 1)]
    assert report.notes == {
        "rows made one per answer, since the template rewrites earlier turns": 2
    }
    assert len({split_of(row, eval_fraction=0.5) for row in rows}) == 1


def test_what_the_template_refuses_is_dropped_with_its_words(tmp_path):
    bad = {"messages": [*chat_row("Hi", "Teal.")["messages"], {"role": "tool", "content": "x"}]}
    bad["messages"].append({"role": "assistant", "content": "y"})
    path = write_lines(tmp_path / "x.jsonl", chat_row("Hi", "Teal."), bad)
    rows, report = load_conversations_file(path, make_chat(MISTRAL, eos=EOS))
    assert len(rows) == 1
    assert report.dropped["refused by the chat template"].locations == (
        f"{path}:2 (roles must alternate user/assistant)",
    )


def test_notes_are_no_repairs(tmp_path):
    row = {
        "messages": [
            {"role": "system", "content": "Be kind."},
            *chat_row("Hi", "Teal.")["messages"],
        ]
    }
    path = write_lines(tmp_path / "x.jsonl", row)
    tokenizer = make_tokenizer(template=MISTRAL, eos=EOS)
    other_stop = ChatTokenizer(tokenizer, stop_ids=[tokenizer.pad_token_id])
    _, report = load_conversations_file(path, other_stop, strict=True)
    assert report.num_kept == 1
    assert report.notes == {
        "answers whose template gives no end-of-turn token": 1,
        "system turns put before the first user turn's text": 1,
    }


def test_rows_that_come_again_much_later_are_dropped_too(tmp_path):
    many = [chat_row("Hi", f"Teal {i % 90}.") for i in range(300)]
    rows, report = load_conversations_file(write_lines(tmp_path / "x.jsonl", *many), make_chat())
    assert len(rows) == 90
    assert report.rows() == [
        ("kept", "", 90),
        ("dropped", "same as an earlier row", 210),
        ("all rows", "", 300),
    ]


def test_equal_rows_are_taken_once(tmp_path):
    path = write_lines(tmp_path / "x.jsonl", *[chat_row("Hi", "Teal.")] * 3)
    rows, report = load_conversations_file(path, make_chat())
    assert len(rows) == 1
    assert report.dropped["same as an earlier row"].count == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [("no.jsonl", "no such file"), ("x.csv", "unknown kind of file '.csv'"), (".", "not a file")],
)
def test_files_that_cannot_be_read(tmp_path, name, message):
    (tmp_path / "x.csv").write_text("a,b")
    with pytest.raises(InputError, match=message):
        load_conversations_file(tmp_path / name, make_chat())


@pytest.mark.parametrize("arguments", ["[" * 100_000, "1" * 5000, "{", '{"a": 1}'])
def test_arguments_of_calls_may_be_any_text(tmp_path, arguments):
    row = _call([{"function": {"name": "f", "arguments": arguments}}])
    rows, _ = load_conversations_file(write_lines(tmp_path / "x.jsonl", row), make_chat())
    assert len(rows) == 1


def test_no_tools_may_be_an_empty_text(tmp_path):
    row = {**chat_row("Hi", "Teal."), "tools": ""}
    rows, report = load_conversations_file(write_lines(tmp_path / "x.jsonl", row), make_chat())
    assert (len(rows), report.num_dropped) == (1, 0)


def test_tools_are_shown_to_the_model(tmp_path):
    template = "{{ tools | tojson if tools else '' }}" + CHATML_TOOLS
    chat = make_chat(template)
    row = {**chat_row("Hi", "Teal."), "tools": json.dumps([{"name": "weather"}])}
    [row], _ = load_conversations_file(write_lines(tmp_path / "x.jsonl", row), chat)
    assert chat.tokenizer.decode(row.input_ids).startswith('[{"name": "weather"}]<s>')


@pytest.mark.parametrize("code", ["1 // 0", "[1][messages | length + 9].x", "messages.x()"])
def test_a_template_may_fail_in_any_way(tmp_path, code):
    template = CHATML_TOOLS + "{% if messages | length > 2 %}{{ " + code + " }}{% endif %}"
    rows = [chat_row("Hi", "Teal."), chat_row("a", "b", "c", "d")]
    path = write_lines(tmp_path / "x.jsonl", *rows)
    rows, report = load_conversations_file(path, make_chat(template))
    assert (len(rows), list(report.dropped)) == (1, ["refused by the chat template"])
