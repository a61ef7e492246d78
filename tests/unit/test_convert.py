"""Data set → files of other tools → the same data set."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from medusa_train.data.convert import dataset_rows, file_rows, import_manifest, write_plain
from medusa_train.data.report import Tally
from medusa_train.data.sources import load_conversations_file, usable_turns
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
    assert write_plain(path, dataset_rows(rows, None), form=form, source=DIRTY) == len(rows)
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
    write_plain(path, dataset_rows(rows, chat), form=form, source=DIRTY)
    again, _ = load_conversations_file(path, chat)
    assert [row.input_ids for row in again] == [row.input_ids for row in rows]


def test_a_json_file_is_one_array(tmp_path):
    path = tmp_path / "x.json"
    rows = [{"text": "Teal."}, {"text": "Zinc."}]
    write_plain(path, rows, form="text", source=DIRTY)
    assert json.loads(path.read_text(encoding="utf-8")) == rows
    assert path.read_text(encoding="utf-8").count("\n") == 4


@pytest.mark.parametrize("form", ["messages", "parquet"])
def test_no_rows_are_no_file(tmp_path, form):
    path = tmp_path / "out"
    with pytest.raises(InputError, match=r"^x: no rows to write: there are no rows$"):
        write_plain(path, [], form=form, source=Path("x"))
    assert not list(tmp_path.iterdir())


def test_parquet_keeps_fields_that_are_no_text_as_json(tmp_path):
    path = tmp_path / "x.parquet"
    turns = [
        {"role": "user", "content": "Hi", "name": 5},
        {"role": "assistant", "content": "Teal.", "thinking": ["so"]},
    ]
    write_plain(path, [{"messages": turns}], form="parquet", source=DIRTY)
    [turns] = usable_turns(path, Tally())
    assert turns.messages[0]["name"] == "5"
    assert turns.messages[1]["thinking"] == '["so"]'


def test_a_chat_has_no_one_text(tmp_path):
    rows, _ = load_conversations_file(DIRTY, make_chat())
    with pytest.raises(InputError, match="is a chat, which has no one text"):
        write_plain(tmp_path / "x.jsonl", dataset_rows(rows, None), form="text", source=DIRTY)
    assert not list(tmp_path.iterdir())


def test_a_file_is_repaired_without_a_tokenizer(tmp_path):
    path, tally = tmp_path / "x.jsonl", Tally()
    write_plain(path, file_rows(DIRTY, tally), form="messages", source=DIRTY)
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
