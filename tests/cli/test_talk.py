"""``medusa-eval generate`` and ``chat``, and ``MedusaModel``, as a user calls them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import medusa_train
from medusa_train.cli.evaluate import app as evaluate
from medusa_train.errors import ArgumentError
from tests.decoding_for_tests import save_heads_directory
from tests.models_for_tests import save_base


def _call(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        evaluate([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def heads(base: Path) -> Path:
    return save_heads_directory(base.parent / "heads", base=base)


def _plain(base: Path, prompt: str, *, max_new_tokens: int) -> tuple[str, list[int]]:
    """What the base says greedily, by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt"
    )["input_ids"]
    whole = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False
    )
    written = whole[0, ids.shape[1] :]
    return tokenizer.decode(written, skip_special_tokens=True), written.tolist()


def test_generate_streams_what_the_base_says(
    base: Path, heads: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, written = _plain(base, "Name a metal.", max_new_tokens=20)
    arguments = ("generate", heads, "Name a metal.", "--max-new-tokens", 20)
    code, out, err = _call(*arguments, capsys=capsys)
    assert code == 0
    assert out == text + "\n"
    assert f"{len(written)} tokens in " in err
    assert "tokens/s), acceptance length 1." in err
    code, out, _ = _call(*arguments, "--json", capsys=capsys)
    facts = json.loads(out)
    assert (facts["text"], facts["num_tokens"]) == (text, len(written))
    assert facts["tokens_per_second"] > 0
    code, out, _ = _call(*arguments, "--raw", "--temperature", 0.8, "--seed", 1, capsys=capsys)
    assert code == 0
    assert (code, out) == _call(
        *arguments, "--raw", "--temperature", 0.8, "--seed", 1, capsys=capsys
    )[:2]


def test_generate_says_what_is_wrong(
    heads: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*arguments: object) -> str:
        code, out, err = _call(*arguments, capsys=capsys)
        assert (code, out) == (2, "")
        return err

    assert "no such heads directory" in error("generate", tmp_path / "none", "hello")
    for option in (["--typical"], ["--top-p", 0.9], ["--top-k", 5], ["--seed", 1]):
        assert error("generate", heads, "x", *option) == error("chat", heads, *option)
        assert f"error: {option[0]}: is for sampling, and temperature 0 is greedy; give a" in error(
            "generate", heads, "x", *option
        )
    sampled = ("generate", heads, "x", "--temperature", 1)
    cold = error("generate", heads, "x", "--temperature", 1e-300)
    assert "--temperature: must be 0, which is greedy, or at least 0.001; got 1e-300" in cold
    assert "--top-p: must be above 0 and at most 1, got 0" in error(*sampled, "--top-p", 0)
    for option, value in (("--top-p", 1.5), ("--top-k", -1), ("--temperature", 101)):
        assert f"Invalid value for '{option}': " in error(*sampled, option, value)
    tree = tmp_path / "tree.json"
    tree.write_text("[[0], [0, 0, 0]]")
    assert "its prefix [0, 0] is not in the tree" in error("generate", heads, "x", "--tree", tree)
    tree.write_text("[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]")
    assert "has depth 4, but there are 3 heads" in error("generate", heads, "x", "--tree", tree)
    assert "has 512 positions; shorten it" in error("generate", heads, "a b " * 600)
    assert "PROMPT: is not valid UTF-8" in error("generate", heads, "\udcff\udcfe abc")
    assert "--system: is not valid UTF-8" in error("chat", heads, "--system", "\udcff")


def test_chat_goes_on_after_a_line_that_is_no_text(
    heads: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\udcff\udcfe\nName a metal.\n/exit\n"))
    code, out, err = _call("chat", heads, "--max-new-tokens", 4, "--json", capsys=capsys)
    assert code == 0
    assert len(out.splitlines()) == 1
    assert "that line is not valid UTF-8" in err


def test_chat_keeps_the_conversation(
    heads: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Name a metal.\n\nAnother.\n/exit\nnever\n"))
    code, out, err = _call(
        "chat", heads, "--max-new-tokens", 8, "--json", "--system", "Be brief.", capsys=capsys
    )
    assert code == 0
    answers = [json.loads(line) for line in out.splitlines()]
    assert len(answers) == 2
    assert all(1 <= answer["num_tokens"] <= 8 for answer in answers)
    assert err.startswith("/exit leaves, /help lists the commands; Ctrl-C ends an answer")


def test_chat_knows_its_commands(
    heads: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["/help", "/quit now", " /quit", "/etc/hosts: what is it?", "/ ?", "/exit", "never"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    code, out, err = _call("chat", heads, "--max-new-tokens", 2, "--json", capsys=capsys)
    assert code == 0
    # The three lines that are no commands are answered.
    assert len(out.splitlines()) == 3
    shown = err.splitlines()
    assert "/exit  leave; the end of the input does too (Ctrl-D)" in shown
    assert "/help  list the commands" in shown
    assert "/quit: unknown command; /help lists the commands" in shown
    assert sum("unknown command" in line for line in shown) == 1


def test_ctrl_c_ends_the_answer_and_not_the_chat(heads: Path) -> None:
    terminal, other = pty.openpty()
    # A job in the background of a shell is started without Ctrl-C; one in a terminal is not.
    command = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    command += "from medusa_train.cli.evaluate import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", command, "chat", str(heads), "--max-new-tokens", "490"],
        stdin=other,
        stdout=other,
        stderr=other,
        start_new_session=True,
    )
    os.close(other)
    try:
        _read_until(terminal, b"> ")
        os.write(terminal, b"Name a metal.\n")
        # The line that was typed, and then the first words of the answer.
        _read_until(terminal, b"metal.\r\n", more=1)
        process.send_signal(signal.SIGINT)
        shown = _read_until(terminal, b"acceptance length")
        assert b"interrupted: ending the answer" in shown
        num_tokens = int(shown.split(b" tokens in")[0].split()[-1])
        assert num_tokens < 480
        if b"> " not in shown.split(b"acceptance length")[1]:
            _read_until(terminal, b"> ")
        # At the prompt it gives a new one. A signal that comes in the moment between the prompt and
        # the reading of the line is seen only after the line, and takes what was typed with it. So
        # both are sent again, as a person would.
        for _ in range(30):
            process.send_signal(signal.SIGINT)
            if select.select([terminal], [], [], 2)[0]:
                break
        _read_until(terminal, b"\n")
        assert _leaves(process, terminal)
    finally:
        process.kill()
        process.wait(60)
        os.close(terminal)


def _leaves(process: subprocess.Popen[bytes], terminal: int) -> bool:
    """Whether /exit ends the program, and without an error."""
    for _ in range(30):
        with contextlib.suppress(OSError):  # its side of the terminal is closed
            os.write(terminal, b"/exit\n")
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(5) == 0
    return False


def _read_until(terminal: int, wanted: bytes, *, more: int = 0) -> bytes:
    shown = b""
    end = time.monotonic() + 300
    while wanted not in shown or len(shown.split(wanted, 1)[1]) < more:
        assert time.monotonic() < end, shown
        if select.select([terminal], [], [], 1)[0]:
            shown += os.read(terminal, 1000)
    return shown


def test_medusa_model_writes_what_its_base_writes(base: Path, heads: Path) -> None:
    model = medusa_train.MedusaModel.from_pretrained(heads)
    assert model.tree.paths == ((0,), (0, 0), (0, 0, 0))
    inputs = model.tokenizer("hello there", return_tensors="pt")
    options = {"max_new_tokens": 16, "do_sample": False}
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    plain = model.base.model.generate(ids, attention_mask=mask, **options)
    for tree in (None, [], [[0], [1], [1, 1]]):
        assert torch.equal(model.generate(ids, attention_mask=mask, tree=tree, **options), plain)
    (heads / "medusa_choices.json").write_text("[[0], [1]]")
    again = medusa_train.MedusaModel.from_pretrained(heads, str(base), dtype="float32")
    assert again.tree.paths == ((0,), (1,))
    (heads / "medusa_choices.json").unlink()
    with pytest.raises(ArgumentError, match=r"tree: path \[0, 0\]: its prefix"):
        model.generate(ids, tree=[[0, 0]])
    with pytest.raises(ArgumentError, match=r"tree: must be a list of paths such as .* got 5"):
        model.generate(ids, tree=5)
    with pytest.raises(ArgumentError, match="input_ids: has no tokens"):
        model.generate(ids[:, :0])
    with pytest.raises(AttributeError, match="has no attribute 'Medusa'"):
        medusa_train.Medusa  # noqa: B018


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 5}, "heads: must be a heads directory, such as RUN/heads, got 5"),
        ({"dtype": "float31"}, "dtype: must be one of auto, float32, .*; got 'float31'"),
        ({"dtype": torch.int64}, "dtype: must be one of auto, float32, .*; got torch.int64"),
        ({"device": "abacus"}, "device: 'abacus' cannot be used: "),
        ({"device": "cpu:x"}, "device: 'cpu:x' cannot be used: "),
        ({"tree": 5}, r"tree: must be a list of paths such as \[\[0\], \[0, 0\]\], got 5"),
        ({"tree": [[0], [0, 0, 0]]}, r"tree: path \[0, 0, 0\]: its prefix"),
        ({"tree": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]}, "has depth 4, but there are 3 heads"),
    ],
)
def test_medusa_model_says_which_argument_is_wrong(
    heads: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        medusa_train.MedusaModel.from_pretrained(**{"heads": heads, **options})


def test_medusa_model_takes_the_dtypes_of_torch(base: Path, heads: Path) -> None:
    model = medusa_train.MedusaModel.from_pretrained(
        heads, base, dtype=torch.bfloat16, device="cpu"
    )
    assert model.base.model.dtype == torch.bfloat16
