"""`medusa-distill inspect` and `convert`: exact exit codes, and what is said of each row."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from medusa_train.cli.distill import app
from medusa_train.data.conversations import read_conversations, read_manifest
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
        assert outcome("convert", "ds", name) == (0, "", "")
        again = ("convert", name, f"{name}.ds", "--base-model", base, "--to", "dataset")
        assert outcome(*again, "--strict")[0] == 0
        rows = read_conversations(tmp_path / f"{name}.ds")
        assert [row.input_ids for row in rows] == [
            row.input_ids for row in read_conversations(tmp_path / "ds")
        ]


def test_convert_between_files_needs_no_model(dirty, tmp_path, outcome):
    code, _, stderr = outcome("convert", dirty.name, "x.json", "--to", "sharegpt")
    assert (code, stderr) == (0, "")
    lines = (tmp_path / "x.json").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[0]) == {
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
        "error: x.jsonl: 0 supervised tokens; every conversation needs an answer of the assistant "
        "within the maximal length\n"
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
def test_bad_input_is_one_line(base, dirty, args, message, outcome):
    assert dirty.exists()
    given = [str(base) if arg == "BASE" else arg for arg in args]
    assert outcome(*given) == (2, "", f"error: {message}\n")
