"""Data set → files of other tools → the same data set."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from medusa_train.data.convert import dataset_rows, file_rows, import_manifest, write_plain
from medusa_train.data.inspect import check_mask, decoded_segments, inspect_rows
from medusa_train.data.report import Tally
from medusa_train.data.sources import load_conversations_file
from medusa_train.errors import InputError
from tests.tokenizers_for_tests import CHATML, CHATML_TOOLS, make_chat

DIRTY = Path(__file__).parents[1] / "data" / "dirty_sharegpt.json"


@pytest.mark.parametrize(
    ("form", "suffix"),
    [("sharegpt", ".json"), ("messages", ".jsonl"), ("parquet", ".parquet")],
)
def test_a_data_set_survives_the_way_out_and_back(tmp_path, form, suffix):
    chat = make_chat(CHATML_TOOLS)
    rows, _ = load_conversations_file(DIRTY, chat)
    path = tmp_path / f"out{suffix}"
    assert write_plain(path, dataset_rows(rows, None), form=form) == len(rows)
    again, report = load_conversations_file(path, chat, strict=True)
    assert [row.input_ids for row in again] == [row.input_ids for row in rows]
    assert [row.assistant_spans for row in again] == [row.assistant_spans for row in rows]
    assert [list(row.messages) for row in again] == [list(row.messages) for row in rows]
    assert report.num_kept == len(rows)


@pytest.mark.parametrize(("form", "suffix"), [("text", ".jsonl"), ("parquet", ".parquet")])
def test_plain_text_is_decoded(tmp_path, form, suffix):
    source = tmp_path / "x.jsonl"
    source.write_text('{"text": "Teal is a colour."}\n{"text": "Zinc."}\n')
    chat = make_chat(None)
    rows, _ = load_conversations_file(source, chat)
    with pytest.raises(InputError, match="--base-model"):
        list(dataset_rows(rows, None))
    path = tmp_path / f"out{suffix}"
    write_plain(path, dataset_rows(rows, chat), form=form)
    again, _ = load_conversations_file(path, chat)
    assert [row.input_ids for row in again] == [row.input_ids for row in rows]


def test_a_chat_has_no_one_text(tmp_path):
    rows, _ = load_conversations_file(DIRTY, make_chat())
    with pytest.raises(InputError, match="is a chat, which has no one text"):
        write_plain(tmp_path / "x.jsonl", dataset_rows(rows, None), form="text")
    assert not list(tmp_path.iterdir())


def test_a_file_is_repaired_without_a_tokenizer(tmp_path):
    path, tally = tmp_path / "x.jsonl", Tally()
    write_plain(path, file_rows(DIRTY, tally), form="messages")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 9
    assert lines[7]["messages"][0] == {"role": "user", "content": "7"}
    report = tally.report()
    assert (report.num_kept, report.num_repaired, report.num_dropped) == (5, 4, 5)


def test_the_manifest_of_imported_rows():
    chat = make_chat(CHATML)
    rows, report = load_conversations_file(DIRTY, chat)
    manifest = import_manifest(rows, report, chat)
    assert manifest["end_of_turn"] == {"id": 4, "with": 9, "without": 0}
    assert sum(manifest["num_dropped"].values()) == 5
    assert sum(manifest["num_repaired"].values()) == 4
    assert manifest["rows"]["notes"] == {
        "calls and answers that the template leaves out (not supervised)": 1
    }
    json.dumps(manifest)


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
