"""`medusa-distill generate` and `merge`: exact exit codes, with servers too."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from medusa_train.cli.distill import app
from medusa_train.data.conversations import Conversation, read_conversations, read_manifest
from tests.models_for_tests import save_base
from tests.scripted_server import ScriptedServer

Outcome = Callable[..., tuple[int, str, str]]
NUM_PROMPTS = 24
KEY = "sk-very-secret"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Outcome:
    """Runs the command in ``tmp_path``, in this process."""
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("".join(f"Question {n}: why?\n" for n in range(NUM_PROMPTS)))

    def run(*args: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            app([str(arg) for arg in args])
        captured = capfd.readouterr()
        return int(str(caught.value.code)), captured.out, captured.err

    return run


@pytest.fixture
def server(base: Path) -> Iterator[Callable[..., ScriptedServer]]:
    tokenizer = AutoTokenizer.from_pretrained(base)
    started: list[ScriptedServer] = []

    def start(**options: Any) -> ScriptedServer:
        started.append(ScriptedServer(tokenizer, stop_id=tokenizer.eos_token_id, **options))
        started[-1].start()
        return started[-1]

    yield start
    for one in started:
        one.stop()


def _arguments(base: Path, *servers: ScriptedServer, **settings: object) -> list[object]:
    sets = {
        "temperature": 0, "loop_ngram": 0, "max_new_tokens": 20, "server.timeout": 2.0,
        "server.max_retries": 3, "server.concurrency": 4, **settings,
    }  # fmt: skip
    if not servers:
        sets = {key: value for key, value in sets.items() if not key.startswith("server.")}
    urls = [option for one in servers for option in ("--server", one.url)]
    options = [f"--set=data.distill.{key}={json.dumps(value)}" for key, value in sets.items()]
    return ["generate", "--base-model", base, "--prompts", "prompts.txt", *urls, *options]


def _check_rows(rows: list[Conversation], server: ScriptedServer, numbers: list[int]) -> None:
    """The rows of these prompts, in this order, each with the server's own answer."""
    asked = [row.messages[0]["content"] for row in rows]
    assert asked == [f"Question {n}: why?" for n in numbers]
    for row in rows:
        [(start, end)] = row.assistant_spans
        expected = server.answer_ids(row.input_ids[:start])
        if row.finish_reasons == ("length",):
            expected = expected[:2]
        assert row.input_ids[start:end] == expected
        assert end > start


def test_exactly_what_can_succeed_is_there(
    base: Path,
    outcome: Outcome,
    server: Callable[..., ScriptedServer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each fault of a server once, and two prompts that it never answers."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    one = server(
        faults={
            "Question 1:": ["500"],
            "Question 2:": ["429"],
            "Question 3:": ["hang"],
            "Question 4:": ["cut"],
            "Question 5:": ["no ids"],
            "Question 6:": itertools.repeat("empty"),
            "Question 7:": ["length"],
            "Question 8:": ["malformed"],
            "Question 9:": itertools.repeat("400"),
            "Question 10:": itertools.repeat("500"),
        },
        retry_after="0.1",
        hang_seconds=5.0,
        api_key=KEY,
    )
    code, _, stderr = outcome(*_arguments(base, one), "--output", "out")
    assert code == 1
    assert f"2 of {NUM_PROMPTS} prompts have no answer" in stderr
    assert KEY not in stderr
    rows = read_conversations(Path("out"))
    missing = {6, 9, 10}
    _check_rows(rows, one, [n for n in range(NUM_PROMPTS) if n not in missing])
    assert [row.retokenised for row in rows].count(True) == 1
    manifest = read_manifest(Path("out"))
    assert manifest["num_dropped"] == {"empty answer": 1}
    assert manifest["num_failed"] == {"refused by the server": 1, "server error": 1}
    assert manifest["num_retokenised"] == 1
    failures = [json.loads(line) for line in Path("out/failures.jsonl").read_text().splitlines()]
    assert [failure["index"] for failure in failures] == [9, 10]
    assert all(KEY not in path.read_text() for path in Path("out").rglob("*.json*"))

    # What failed is asked again, and nothing else.
    good = server(api_key=KEY)
    assert outcome(*_arguments(base, good), "--output", "out")[0] == 0
    assert len(good.prompts) == 2
    _check_rows(read_conversations(Path("out")), good, [n for n in range(NUM_PROMPTS) if n != 6])
    assert not Path("out/failures.jsonl").exists()


def test_what_servers_said_is_kept_when_not_one_prompt_has_an_answer(
    base: Path, outcome: Outcome, server: Callable[..., ScriptedServer]
) -> None:
    one = server(faults={"Question": itertools.repeat("400")})
    code, stdout, stderr = outcome(*_arguments(base, one), "--output", "out")
    assert (code, stdout) == (1, "")
    assert "refused by the server: 24; see out/failures.jsonl" in stderr
    failures = [json.loads(line) for line in Path("out/failures.jsonl").read_text().splitlines()]
    assert {failure["detail"] for failure in failures} == {f"{one.url}: HTTP 400: scripted 400"}


def test_prompts_that_servers_did_not_write_say_nothing_about_the_model(
    base: Path, outcome: Outcome, server: Callable[..., ScriptedServer]
) -> None:
    bad, good = server(faults={"user": itertools.repeat("400")}), server()

    def run(one: ScriptedServer) -> tuple[int, str, str]:
        options = ["--num-prompts", 70, "--temperature", 0, "--output", "out"]
        return outcome("generate", "--base-model", base, "--server", one.url, *options)

    code, _, stderr = run(bad)
    assert code == 1
    assert "refused by the server: 70" in stderr
    assert "give a file of prompts" not in stderr
    assert run(good)[0] == 0
    assert read_manifest(Path("out"))["prompts_of_the_model"]["drawn"] == 70


def test_a_tolerated_share_of_failures_is_no_error(
    base: Path, outcome: Outcome, server: Callable[..., ScriptedServer]
) -> None:
    one = server(faults={"Question 9:": itertools.repeat("400")})
    arguments = _arguments(base, one, **{"server.max_failed": 0.1})
    code, stdout, _ = outcome(*arguments, "--output", "out", "--json")
    assert code == 0
    assert json.loads(stdout)["num_failed"] == {"refused by the server": 1}


def test_a_server_that_dies_halfway_and_comes_back(
    base: Path, outcome: Outcome, server: Callable[..., ScriptedServer]
) -> None:
    one = server(faults={"Question 11:": ["die"]}, delay=0.01)
    alive = threading.Event()

    def revive() -> None:
        one.stopping.wait(30)
        time.sleep(0.5)
        one.start()
        alive.set()

    thread = threading.Thread(target=revive)
    thread.start()
    code, _, stderr = outcome(*_arguments(base, one), "--output", "out")
    thread.join()
    assert code == 0, stderr
    assert alive.is_set()
    assert "leaves the pool" in stderr
    assert "in the pool again" in stderr
    _check_rows(read_conversations(Path("out")), one, list(range(NUM_PROMPTS)))


def test_two_servers_and_shards_give_the_bytes_of_one(
    base: Path, outcome: Outcome, server: Callable[..., ScriptedServer]
) -> None:
    a, b = server(delay=0.005), server()
    # Time enough for a machine that does other things too: nothing here is about slow servers.
    settings = {"temperature": 1.0, "server.timeout": 60.0}
    arguments = [*_arguments(base, a, b, **settings), "--teacher-top-n", 3]
    assert outcome(*arguments, "--output", "whole")[0] == 0
    assert a.prompts
    assert b.prompts
    for i in range(3):
        code, stdout, _ = outcome(*arguments, "--output", f"part-{i}", "--shard", f"{i}/3")
        assert (code, stdout) == (0, f"part-{i}: 8 conversations\n")
    code, stdout, _ = outcome("merge", "part-0", "part-1", "part-2", "merged")
    assert (code, stdout) == (0, "merged: 24 conversations\n")
    for name in ("conversations.jsonl", "teacher_logprobs/index.json",
                 "teacher_logprobs/00000.safetensors"):  # fmt: skip
        assert Path("merged", name).read_bytes() == Path("whole", name).read_bytes()


def test_text_servers_are_refused_where_exact_ids_are_asked_for(
    base: Path, outcome: Outcome, server: Callable[..., ScriptedServer]
) -> None:
    one = server(style="text")
    code, _, stderr = outcome(*_arguments(base, one), "--exact-ids", "--output", "out")
    assert code == 2
    assert "takes no token ids" in stderr
    assert outcome(*_arguments(base, one), "--output", "out")[0] == 0
    manifest = read_manifest(Path("out"))
    assert manifest["num_retokenised"] == NUM_PROMPTS, manifest


def test_turns_are_asked_one_after_the_other(
    base: Path, outcome: Outcome, server: Callable[..., ScriptedServer]
) -> None:
    one = server()
    arguments = _arguments(base, one, write_user_turns=True)
    assert outcome(*arguments, "--turns", 2, "--output", "out")[0] == 0
    rows = read_conversations(Path("out"))
    assert max(len(row.messages) for row in rows) == 4
    for row in rows:
        for start, end in row.assistant_spans:
            assert row.input_ids[start:end] == one.answer_ids(row.input_ids[:start])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shard", "3/3"], "error: --shard: must be I/N with 0 <= I < N, such as 0/4; got '3/3'"),
        (["--shard", "x"], "error: --shard: must be I/N with 0 <= I < N, such as 0/4; got 'x'"),
        (
            ["--teacher-top-n", "2", "--teacher-samples", "2"],
            "error: --set data.distill.teacher_samples=2: data.distill.teacher_samples: "
            "excludes teacher_top_n; set one of them to null",
        ),
        (
            ["--set", "data.distill.server={urls: [http://h], concurrency: 10000, timeout: 1e12}"],
            "error: --set data.distill.server={urls: [http://h], concurrency: 10000, timeout: "
            "1e12}: data.distill.server.concurrency: must be at most 4096; got 10000\n"
            "error: --set data.distill.server={urls: [http://h], concurrency: 10000, timeout: "
            "1e12}: data.distill.server.timeout: must be at most 1000000; got 1000000000000.0",
        ),
        (["--turns", "0"], "error: --set data.distill.turns=0: data.distill.turns: "
         "must be at least 1; got 0"),
        (
            ["--set", "data.distill.sources=[{source: dataset}]"],
            "error: --set data.distill.sources=[{source: dataset}]: data.distill.sources: "
            "excludes data.distill.prompts; set one of them to null\n"
            "error: --set data.distill.sources=[{source: dataset}]: data.distill.sources.0.path: "
            "missing; a source of the kind 'dataset' needs one",
        ),
    ],
)  # fmt: skip
def test_bad_options_are_refused(
    base: Path, outcome: Outcome, options: list[str], message: str
) -> None:
    code, stdout, stderr = outcome(*_arguments(base), "--output", "out", *options)
    assert (code, stdout, stderr) == (2, "", f"{message}\n")
    assert not Path("out").exists()


def test_what_an_unfinished_run_has_becomes_a_data_set(base: Path, outcome: Outcome) -> None:
    arguments = _arguments(base, block_size=8)
    assert outcome(*arguments, "--output", "part", "--shard", "0/2")[0] == 0
    code, _, stderr = outcome("merge", "part", "so-far")
    assert code == 2
    assert "shard 1/2: not among the directories" in stderr
    code, stdout, stderr = outcome("merge", "--allow-missing", "part", "so-far")
    assert (code, stdout) == (0, "so-far: 16 conversations\n")
    assert "1 of 3 units are not finished" in stderr
    assert outcome("inspect", "so-far", "--base-model", base)[0] == 0


def test_what_is_wrong_is_said_before_weights_are_read(base: Path, outcome: Outcome) -> None:
    arguments = _arguments(base)
    assert outcome(*arguments, "--output", "out")[0] == 0
    for more in (["--output", "out", "--seed", "1"], ["--output", "new", "--prompts", "empty.txt"]):
        Path("empty.txt").write_text("\n\n", encoding="utf-8")
        code, _, stderr = outcome(*arguments, *more)
        assert code == 2, stderr
        assert "error: " in stderr
        assert "loading" not in stderr
