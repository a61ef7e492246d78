"""`medusa-distill inspect` and `convert`: exact exit codes, and what is said of each row."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from medusa_train.cli.distill import app
from medusa_train.data.conversations import (
    Conversation,
    read_conversations,
    read_manifest,
    write_dataset,
)
from tests.models_for_tests import make_model
from tests.tokenizers_for_tests import CHATML_TOOLS, make_tokenizer

DIRTY = Path(__file__).parents[1] / "data" / "dirty_sharegpt.json"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("base")
    tokenizer = make_tokenizer(template=CHATML_TOOLS)
    make_model(vocab_size=len(tokenizer)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def dirty(tmp_path) -> Path:
    return Path(shutil.copy(DIRTY, tmp_path / "dirty.json"))


@pytest.fixture
def outcome(tmp_path, monkeypatch, capfd):
    """Runs the command in ``tmp_path``, in this process: its imports take seconds."""

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(SystemExit) as caught:
            app([str(arg) for arg in args])
        captured = capfd.readouterr()
        return caught.value.code, captured.out, captured.err

    return run


def counts(table: str) -> dict[str, str]:
    rows = [line.strip("│").rsplit("│", 1) for line in table.splitlines() if line.startswith("│")]
    return {label.strip(): count.strip() for label, count in rows}


def test_inspect_a_file_as_json_lines_and_as_an_array(base, dirty, outcome):
    code, stdout, stderr = outcome("inspect", "dirty.json", "--base-model", base)
    assert (code, stderr) == (0, "")
    found = counts(stdout)
    fates = {key: int(found[key]) for key in found if key.startswith(("kept", "rep", "dropped"))}
    assert fates.pop("kept") == 5
    assert set(fates.values()) == {1}
    assert len(fates) == 9
    assert found["all rows"] == "14"
    assert found["answers with an end of turn ('<|im_end|>')"] == "10"
    assert found["rows with two BOS"] == "0"
    assert "dropped: unknown role: dirty.json:10 ('narrator')" in stdout
    assert "⟦Teal.<|im_end|>⟧" in stdout

    lines = dirty.read_text(encoding="utf-8-sig").splitlines()
    dirty.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    code, array_stdout, _ = outcome("inspect", "dirty.json", "--base-model", base)
    assert code == 0
    assert array_stdout.split("┘")[0] == stdout.split("┘")[0]


def test_strict_is_exit_2_and_one_line_per_row(base, dirty, outcome):
    code, stdout, stderr = outcome("inspect", dirty.name, "--base-model", base, "--strict")
    assert (code, stdout) == (2, "")
    assert len(stderr.splitlines()) == 9
    assert stderr.splitlines()[0] == (
        "error: dirty.json:3: the row needs a repair: turns before the first user turn removed "
        "(strict)"
    )


def test_convert_to_a_data_set_and_inspect_it(base, dirty, tmp_path, outcome):
    code, stdout, stderr = outcome("convert", dirty.name, "ds", "--base-model", base)
    assert (code, stderr) == (0, "")
    assert counts(stdout)["all rows"] == "14"
    assert len(read_conversations(tmp_path / "ds")) == 9
    manifest = read_manifest(tmp_path / "ds")
    assert manifest["base_model"] == str(base)
    assert manifest["end_of_turn"] == {"id": 4, "with": 10, "without": 0}
    # The tokenizer is the one that the manifest names.
    code, stdout, stderr = outcome("inspect", "ds", "--json")
    assert (code, stderr) == (0, "")
    found = json.loads(stdout)
    assert found["num_conversations"] == 9
    assert found["manifest"] == manifest
    assert found["rows"]["num_rows"] == 9
    assert outcome("inspect", "ds")[0] == 0

    for name in ("back.jsonl", "back.parquet"):
        form = "parquet" if name.endswith(".parquet") else "messages"
        assert outcome("convert", "ds", name) == (0, f"{name}: 9 rows ({form})\n", "")
        again = ("convert", name, f"{name}.ds", "--base-model", base, "--to", "dataset")
        assert outcome(*again, "--strict")[0] == 0
        rows = read_conversations(tmp_path / f"{name}.ds")
        assert [row.input_ids for row in rows] == [
            row.input_ids for row in read_conversations(tmp_path / "ds")
        ]


def test_convert_between_files_needs_no_model(dirty, tmp_path, outcome):
    code, _, stderr = outcome("convert", dirty.name, "x.json", "--to", "sharegpt")
    assert (code, stderr) == (0, "")
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))[0] == {
        "conversations": [
            {"from": "human", "value": "Name a colour."},
            {"from": "gpt", "value": "Teal."},
        ]
    }
    code, _, stderr = outcome("convert", dirty.name, "y.json", "--to", "sharegpt", "--strict")
    assert (code, len(stderr.splitlines())) == (2, 9)
    assert not (tmp_path / "y.json").exists()


def test_nothing_to_learn_is_shown_and_refused(base, tmp_path, outcome):
    row = {"conversations": [{"from": "human", "value": "Is anyone there?"}]}
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    code, stdout, stderr = outcome("inspect", "x.jsonl", "--base-model", base)
    assert code == 2
    assert counts(stdout)["dropped: no assistant turn"] == "1"
    assert stderr == (
        "error: x.jsonl: 0 supervised tokens: 1 of 1 rows were dropped (no assistant turn: 1); "
        "every conversation needs an answer of the assistant within the maximal length\n"
    )


def test_chats_without_a_template(base, dirty, tmp_path, outcome):
    plain = tmp_path / "plain"
    shutil.copytree(base, plain)
    (plain / "chat_template.jinja").unlink()
    args = ("inspect", dirty.name, "--base-model", "plain")
    assert outcome(*args) == (
        2,
        "",
        "error: dirty.json:1: the row is a chat, and the base model's tokenizer has no chat "
        "template; give one (data.chat_template in a recipe, --chat-template on the command "
        "line), or use plain text\n",
    )
    (tmp_path / "own.jinja").write_text(CHATML_TOOLS)
    assert outcome(*args, "--chat-template", "own.jinja")[0] == 0
    (tmp_path / "book.txt").write_text("Teal is a colour between blue and green.")
    assert outcome("inspect", "book.txt", "--base-model", "plain")[0] == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ("inspect", "dirty.json"),
            "dirty.json: give the base model whose tokenizer is used with --base-model",
        ),
        (("inspect", "no.json", "--base-model", "BASE"), "no.json: no such file"),
        (
            ("inspect", "some_directory"),
            "some_directory: not a data set directory: it has no conversations.jsonl; "
            "give a data set directory or a file",
        ),
        (
            ("convert", "unfinished", "x.jsonl"),
            "unfinished: an unfinished generation, or a shard of one; run the same generate "
            "command again, which goes on where it stopped, or merge the shards",
        ),
        (
            ("inspect", "without_manifest"),
            "without_manifest: an incomplete data set: it has no manifest.json, which is written "
            "last; make it again",
        ),
        (
            ("inspect", "empty.jsonl", "--base-model", "BASE", "--json"),
            "empty.jsonl: 0 supervised tokens: there are no rows; every conversation needs an "
            "answer of the assistant within the maximal length",
        ),
        (
            ("convert", "empty.jsonl", "x.jsonl"),
            "empty.jsonl: no rows to write: there are no rows",
        ),
        (
            ("convert", "junk.jsonl", "x.parquet"),
            "junk.jsonl: no rows to write: 1 of 1 rows were dropped (not valid JSON in UTF-8: 1)",
        ),
        (
            ("convert", "junk.json", "x.jsonl"),
            "junk.json:1: not UTF-8 text: byte 1; save it as UTF-8",
        ),
        (
            ("convert", "junk.txt", "x.jsonl"),
            "junk.txt:1: not UTF-8 text: byte 1; save it as UTF-8",
        ),
        (
            ("convert", "deep.json", "x.jsonl"),
            "deep.json: not valid JSON: nested too deeply",
        ),
        (
            ("convert", "dirty.json", "x.txt", "--to", "text"),
            "x.txt: would not be read back as text; give a name with .jsonl",
        ),
        (
            ("convert", "dirty.json", "x.jsonl", "--to", "parquet"),
            "x.jsonl: would not be read back as parquet; give a name with .parquet",
        ),
        (
            ("convert", "dirty.json", "x.json", "--to", "dataset"),
            "x.json: a data set is a directory; give a name without .json",
        ),
        (
            ("convert", "some_dataset", "some_dataset/x.jsonl"),
            "some_dataset/x.jsonl: lies inside some_dataset; give a place outside it",
        ),
        (
            ("convert", "some_dataset", "again"),
            "some_dataset: is a data set already; copy the directory",
        ),
        (
            ("convert", "dirty.json", "junk.txt/x.jsonl"),
            "junk.txt/x.jsonl: cannot be made: TMP/junk.txt is not a directory",
        ),
        (
            ("convert", "some_dataset", "x.jsonl", "--to", "text"),
            "row 1: is a chat, which has no one text; use messages or sharegpt",
        ),
        (
            ("convert", "dirty.json", "x.csv"),
            "x.csv: unknown kind of file '.csv'; say what it is with --to",
        ),
        (
            ("convert", "dirty.json", "dirty.json"),
            "dirty.json: is already there; remove it, or give another name",
        ),
        (
            ("convert", "dirty.json", "x.json", "--max-length", "3"),
            "--max-length: only a data set has token ids to cut",
        ),
        (
            ("inspect", "dirty.json", "--base-model", "BASE", "--chat-template-kwargs", "[1]"),
            "--chat-template-kwargs: must be a JSON object, got '[1]'",
        ),
        (
            ("inspect", "dirty.json", "--base-model", "BASE", "--chat-template", "x.jinja"),
            "x.jinja: no such file",
        ),
    ],
)
def test_bad_input_is_one_line(base, hostile, args, message, outcome):
    before = sorted(path.name for path in hostile.rglob("*"))
    given = [str(base) if arg == "BASE" else arg for arg in args]
    code, stdout, stderr = outcome(*given)
    assert (code, stderr) == (2, f"error: {message}\n".replace("TMP", str(hostile)))
    assert ("--json" in args) == bool(stdout)
    assert sorted(path.name for path in hostile.rglob("*")) == before


@pytest.fixture
def hostile(dirty, tmp_path) -> Path:
    assert dirty.exists()
    (tmp_path / "some_directory").mkdir()
    (tmp_path / "unfinished" / "generation").mkdir(parents=True)
    (tmp_path / "without_manifest").mkdir()
    (tmp_path / "without_manifest" / "conversations.jsonl").touch()
    (tmp_path / "empty.jsonl").touch()
    for suffix in (".jsonl", ".json", ".txt"):
        (tmp_path / f"junk{suffix}").write_bytes(b"\x7f\x8fELF\x00\xff")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    write_dataset(tmp_path / "some_dataset", [row_with()], manifest={})
    return tmp_path


def row_with(**changes) -> Conversation:
    messages = ({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Teal."})
    row = Conversation("1", "x", messages, (5, 6, 7, 8), ((2, 4),), ("given",))
    return replace(row, **changes)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ((), "0 supervised tokens: 2 of 2 rows were dropped (no supervised token: 2); every"),
        (((0, 4),), "every token of every row is supervised, the prompts too; make the data again"),
    ],
)
def test_a_data_set_whose_mask_says_nothing(base, tmp_path, outcome, spans, message):
    reasons = ("given",) * len(spans)
    rows = [row_with(id=i, assistant_spans=spans, finish_reasons=reasons) for i in ("1", "2")]
    write_dataset(tmp_path / "ds", rows, manifest={"base_model": str(base)})
    for more in ((), ("--json",)):
        code, stdout, stderr = outcome("inspect", "ds", *more)
        assert code == 2
        assert stdout
        assert stderr.startswith(f"error: ds: {message}")
        assert len(stderr.splitlines()) == 1


def test_a_file_whose_template_shows_only_answers(base, dirty, tmp_path, outcome):
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}"
    )
    args = ("inspect", dirty.name, "--base-model", base, "--chat-template", "own.jinja")
    code, stdout, stderr = outcome(*args)
    assert code == 2
    assert counts(stdout)["all rows"] == "14"
    assert "every token of every row is supervised" in stderr


def test_ids_beyond_the_vocabulary_are_refused(base, tmp_path, outcome):
    rows = [row_with(input_ids=(5, 6, 7, 10**30))]
    write_dataset(tmp_path / "ds", rows, manifest={"base_model": str(base)})
    code, _, stderr = outcome("inspect", "ds")
    assert code == 2
    assert stderr.startswith("error: ds/conversations.jsonl:1: row 1 (id 1): token id 1000")


def test_another_tokenizer_is_said(base, tmp_path, outcome):
    manifest = {"base_model": str(base), "tokenizer_hash": "0" * 16}
    write_dataset(tmp_path / "ds", [row_with()], manifest=manifest)
    code, _, stderr = outcome("inspect", "ds")
    assert code == 0
    assert stderr == (
        "warning: ds: made with another tokenizer; what is decoded may not be what was written\n"
    )


def test_convert_says_as_json_what_it_did(base, dirty, outcome):
    code, stdout, stderr = outcome("convert", dirty.name, "ds", "--base-model", base, "--json")
    assert (code, stderr) == (0, "")
    found = json.loads(stdout)
    assert found["rows"]["num_rows"] == 14
    del found["rows"]
    assert found == {"in": "dirty.json", "out": "ds", "form": "dataset", "num_rows": 9}
    code, stdout, _ = outcome("convert", "ds", "x.json", "--to", "sharegpt", "--json")
    assert json.loads(stdout) == {
        "in": "ds",
        "out": "x.json",
        "form": "sharegpt",
        "num_rows": 9,
        "rows": None,
    }
    code, stdout, _ = outcome("convert", "x.json", "y.parquet", "--json")
    assert json.loads(stdout)["rows"]["num_kept"] == 9


def test_a_text_data_set_goes_to_every_form_and_back(base, tmp_path, outcome):
    (tmp_path / "x.jsonl").write_text('{"text": "Teal is a colour."}\n{"text": "Zinc."}\n')
    assert outcome("convert", "x.jsonl", "ds", "--base-model", base)[0] == 0
    for form, name in (
        ("text", "t.jsonl"),
        ("text", "t.json"),
        ("messages", "m.jsonl"),
        ("sharegpt", "s.json"),
        ("parquet", "p.parquet"),
    ):
        assert outcome("convert", "ds", name, "--to", form)[::2] == (0, "")
        again = f"{name}.ds"
        args = ("convert", name, again, "--base-model", base, "--to", "dataset")
        assert outcome(*args)[0] == 0
        assert [row.input_ids for row in read_conversations(tmp_path / again)] == [
            row.input_ids for row in read_conversations(tmp_path / "ds")
        ]


def test_the_table_of_many_dirty_rows_adds_up(base, dirty, tmp_path, outcome):
    lines = dirty.read_text(encoding="utf-8-sig").splitlines()
    many = [lines[i % len(lines)] for i in range(20_000)]
    Random(0).shuffle(many)
    # Every second one differs from all others, so that not all of them are dropped as known.
    many = [
        line.replace("Name a", f"{i}: name a") if i % 2 else line for i, line in enumerate(many)
    ]
    (tmp_path / "many.json").write_text("\ufeff" + "\n".join(many), encoding="utf-8")
    code, stdout, stderr = outcome("inspect", "many.json", "--base-model", base, "--report", "page")
    assert (code, stderr) == (0, "")
    found = counts(stdout.split("tokens and mask")[0])
    fates = [int(count) for fate, count in found.items() if fate.startswith(("kept", "rep", "dr"))]
    assert sum(fates) == int(found["all rows"]) == 20_000
    assert int(found["dropped: unknown role"]) in {1428, 1429}
    rows = int(counts(stdout)["conversations"])
    histogram = stdout.split("tokens per row: ")[1].split("tokens per answer: ")[0]
    bars = [line.split() for line in histogram.splitlines()[2:] if line.strip()]
    assert sum(int(bar[1]) for bar in bars) == rows
    page = (tmp_path / "page" / "inspect.html").read_text(encoding="utf-8")
    assert '<th scope="row">all rows</th><td>20,000</td>' in page
