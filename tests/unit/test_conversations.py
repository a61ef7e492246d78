"""The data set directory: one form, read strictly."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from medusa_train.data.conversations import (
    Conversation,
    check_supervised,
    check_token_ids,
    from_line,
    is_dataset,
    iterate_conversations,
    read_conversations,
    read_manifest,
    split_of,
    to_line,
    truncate,
    write_dataset,
)
from medusa_train.errors import InputError, InputErrors

ROW = Conversation(
    id="a",
    source="x.jsonl",
    messages=({"role": "user", "content": "Hé ✓"}, {"role": "assistant", "content": "Teal."}),
    input_ids=(1, 2, 3, 4, 5, 6),
    assistant_spans=((2, 4), (5, 6)),
    finish_reasons=("stop", "given"),
    sampling={"temperature": 0.7},
)


def test_rows_come_back_and_equal_rows_are_equal_bytes(tmp_path):
    rows = [ROW, replace(ROW, id="b", messages=(), sampling=None, retokenised=True)]
    for name in ("one", "two"):
        assert write_dataset(tmp_path / name, iter(rows), manifest={"seed": 0}) == 2
    assert read_conversations(tmp_path / "one") == rows
    assert list(iterate_conversations(tmp_path / "one" / "conversations.jsonl")) == rows
    for file in ("conversations.jsonl", "manifest.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    assert read_manifest(tmp_path / "one") == {
        "schema_version": 1,
        "seed": 0,
        "num_conversations": 2,
        "num_supervised_tokens": 6,
    }
    assert is_dataset(tmp_path / "one")
    assert not is_dataset(tmp_path)


def test_the_order_of_role_and_content_does_not_matter():
    messages = tuple(dict(reversed(message.items())) for message in ROW.messages)
    assert to_line(replace(ROW, messages=messages)) == to_line(ROW)


def test_the_order_of_a_calls_fields_is_kept():
    """A template renders them in the order that they have."""
    call = {"name": "weather", "arguments": {"when": "now", "city": "Oslo"}}
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}
    [again] = from_line(to_line(replace(ROW, messages=(message,))).encode()).messages
    assert list(again["tool_calls"][0]["function"]) == ["name", "arguments"]
    assert list(again["tool_calls"][0]["function"]["arguments"]) == ["when", "city"]


def test_a_line_comes_back():
    assert from_line(to_line(ROW).encode()) == ROW


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra": 1}, "unknown key 'extra'"),
        ({"id": 3}, "id: wrong type int"),
        ({"input_ids": []}, "input_ids: must be a list of one or more token ids"),
        ({"input_ids": [1, -2]}, "input_ids: must be a list of one or more token ids"),
        ({"input_ids": [1, 2.0]}, "input_ids: must be a list of one or more token ids"),
        ({"input_ids": [True]}, "input_ids: must be a list of one or more token ids"),
        ({"assistant_spans": [[2, 9]]}, "assistant_spans: must be ascending"),
        ({"assistant_spans": [[2, 2]]}, "assistant_spans: must be ascending"),
        ({"assistant_spans": [[2, 4], [3, 5]]}, "assistant_spans: must be ascending"),
        ({"assistant_spans": [[2]]}, "assistant_spans: must be pairs"),
        ({"finish_reasons": ["stop"]}, "finish_reasons: must have one of stop, length, given"),
        ({"finish_reasons": ["stop", "eos"]}, "finish_reasons: must have one of"),
        ({"messages": ["hello"]}, "messages: each must be a JSON object"),
    ],
)
def test_a_row_that_is_none_is_named_by_its_line(tmp_path, change, message):
    good = json.loads(to_line(ROW))
    path = tmp_path / "conversations.jsonl"
    path.write_text(to_line(ROW) + json.dumps({**good, "id": "b", **change}) + "\n")
    with pytest.raises(InputErrors) as caught:
        read_conversations(tmp_path)
    [line] = caught.value.lines
    assert line.startswith(f"{path}:2: {message}")
    with pytest.raises(InputError):
        list(iterate_conversations(path))


def test_every_bad_line_is_named(tmp_path):
    path = tmp_path / "conversations.jsonl"
    path.write_text("{\n" + to_line(ROW) + "[]\n{}\n" + to_line(ROW))
    with pytest.raises(InputErrors) as caught:
        read_conversations(tmp_path)
    assert [line.removeprefix(f"{path}:") for line in caught.value.lines][1:] == [
        "3: a row must be a JSON object, got list",
        "4: missing key 'assistant_spans'",
        "5: id 'a' is also the id of line 2",
    ]
    path.write_text("{\n" * 50)
    with pytest.raises(InputErrors) as caught:
        read_conversations(tmp_path)
    assert caught.value.lines[-1] == f"{path}: 30 more errors like these"


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(InputError, match=r"conversations\.jsonl: cannot be read"):
        read_conversations(tmp_path)
    with pytest.raises(InputError, match=r"manifest\.json: no such file"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text('{"schema_version": 7}')
    with pytest.raises(InputError, match=r"schema_version: must be 1, got 7"):
        read_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(InputError, match="must be a JSON object, got list"):
        read_manifest(tmp_path)


def test_truncation_three_tokens_into_an_answer():
    row = Conversation("a", "s", (), tuple(range(10)), ((4, 9),), ("stop",))
    cut = truncate(row, 7)
    assert cut is not None
    assert cut.input_ids == tuple(range(7))
    assert cut.assistant_spans == ((4, 7),)
    assert cut.finish_reasons == ("length",)
    assert cut.num_supervised == 3


@pytest.mark.parametrize(
    ("max_length", "spans", "reasons"),
    [
        (6, ((2, 4), (5, 6)), ("stop", "given")),
        (5, ((2, 4),), ("stop",)),
        (3, ((2, 3),), ("length",)),
        (2, None, None),
    ],
)
def test_truncation_between_and_before_answers(max_length, spans, reasons):
    cut = truncate(ROW, max_length)
    assert (cut and cut.assistant_spans, cut and cut.finish_reasons) == (spans, reasons)


def test_truncation_of_a_row_without_answers_leaves_nothing():
    assert truncate(replace(ROW, assistant_spans=(), finish_reasons=()), 100) is None
    with pytest.raises(ValueError, match="max_length"):
        truncate(ROW, 0)


def test_the_split_is_by_the_first_user_turn():
    def row(text: str, number: int = 0) -> Conversation:
        messages = ({"role": "system", "content": str(number)}, {"role": "user", "content": text})
        return replace(ROW, id=str(number), messages=messages)

    sides = [split_of(row(f"question {number}"), eval_fraction=0.25) for number in range(2000)]
    assert 440 < sides.count("eval") < 560
    for number in range(20):
        assert split_of(row(f" Question  {number}\n", 7), eval_fraction=0.25) == sides[number]
    assert split_of(ROW, eval_fraction=0.0) == "train"


def test_the_split_of_plain_text_is_by_its_ids():
    rows = [replace(ROW, messages=(), input_ids=(number, 2)) for number in range(200)]
    sides = [split_of(row, eval_fraction=0.5) for row in rows]
    assert {"train", "eval"} == set(sides)
    assert sides == [split_of(replace(row, id="other"), eval_fraction=0.5) for row in rows]


def test_an_id_beyond_the_vocabulary_is_refused_by_row_number(tmp_path):
    rows = [ROW, replace(ROW, id="b", input_ids=(1, 2, 3, 4, 5, 1024))]
    path = tmp_path / "conversations.jsonl"
    with pytest.raises(InputErrors) as caught:
        check_token_ids(rows, vocab_size=1000, path=path)
    assert list(caught.value.lines) == [
        f"{path}:2: row 2 (id b): token id 1024 is not in the base model's vocabulary of 1000; "
        "make the data with its tokenizer"
    ]
    check_token_ids(rows, vocab_size=1025, path=path)


def test_nothing_supervised_is_refused():
    empty = replace(ROW, assistant_spans=(), finish_reasons=())
    check_supervised([empty, ROW], where="data")
    with pytest.raises(InputError, match="data: 0 supervised tokens; every conversation needs"):
        check_supervised([empty], where="data")
