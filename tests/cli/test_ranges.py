"""Numbers that mean nothing, given to every option of every command that takes one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
from typer.models import OptionInfo

from medusa_train.cli.distill import app as distill
from medusa_train.cli.evaluate import app as evaluate
from medusa_train.cli.train import app as train

APPS = {"medusa-train": train, "medusa-distill": distill, "medusa-eval": evaluate}
# What a command has to be given besides; nothing of it is there.
NEEDED: dict[str, list[str]] = {
    "medusa-train run": ["absent.yaml"],
    "medusa-train plan": ["absent.yaml"],
    "medusa-train export": ["vllm", "absent", "out"],
    "medusa-train verify": ["vllm", "absent"],
    "medusa-distill generate": [
        "-o",
        "out",
        "--base-model",
        "absent/base/model",
        "--num-prompts=3",
    ],
    "medusa-distill inspect": ["absent.jsonl", "--base-model", "absent/base/model"],
    "medusa-distill convert": ["absent.jsonl", "out.jsonl"],
    "medusa-eval heads-accuracy": ["absent"],
    "medusa-eval tree": ["absent"],
    "medusa-eval speedup": ["absent"],
    "medusa-eval quality": ["--prompts", "absent.txt"],
    "medusa-eval generate": ["absent", "hello"],
    "medusa-eval chat": ["absent"],
}
FLOATS = ("nan", "inf", "-inf", "-1", "1e999", "much")
INTEGERS = ("-1", "nan", "1.5", "many", "9" * 5000)
LISTS = ("0", "-1", "1,,2", "nan", "", "9" * 5000)


def _options() -> list[tuple[str, str, str]]:
    """(command, option, value) of every numeric option, as the commands declare them."""
    found = []
    for name, app in APPS.items():
        for command in app.registered_commands:
            callback = command.callback
            assert callback is not None
            full_name = f"{name} {command.name or callback.__name__}"
            for parameter, hint in get_type_hints(callback, include_extras=True).items():
                if get_origin(hint) is not Annotated:
                    continue
                kind, info = get_args(hint)
                if isinstance(info, OptionInfo):
                    option = _option_name(info, parameter)
                    values = _values(option, {kind, *get_args(kind)})
                    found += [(full_name, option, value) for value in values]
    return found


def _option_name(info: OptionInfo, parameter: str) -> str:
    names = [name for name in info.param_decls or () if name.startswith("--")]
    return names[0] if names else "--" + parameter.replace("_", "-")


def _values(option: str, kinds: set[Any]) -> tuple[str, ...]:
    if float in kinds:
        return FLOATS
    if int in kinds:
        return INTEGERS
    return LISTS if option in {"--per-depth", "--batch-sizes", "--shard"} else ()


OPTIONS = _options()


def test_every_command_with_numbers_is_tried() -> None:
    assert {command for command, _, _ in OPTIONS} == set(NEEDED)
    assert len({(command, option) for command, option, _ in OPTIONS}) >= 45


@pytest.mark.parametrize("command", NEEDED)
def test_numbers_that_mean_nothing_are_refused_by_name(
    command: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    name, subcommand = command.split()
    for tried, option, value in OPTIONS:
        if tried != command:
            continue
        arguments = [subcommand, *NEEDED[command], f"{option}={value}"]
        with pytest.raises(SystemExit) as ended:
            APPS[name](arguments)
        shown = capsys.readouterr()
        assert (ended.value.code, shown.out) == (2, ""), (arguments, shown)
        lines = shown.err.splitlines()
        assert lines, arguments
        assert all(line.startswith("error: ") for line in lines), (arguments, lines)
        # By its own name, or by that of the key that it sets.
        key = option.removeprefix("--").replace("-", "_")
        assert key in shown.err.replace("-", "_"), (arguments, shown.err)
    assert list(tmp_path.iterdir()) == []


def test_more_turns_than_a_conversation_can_have(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", *NEEDED["medusa-distill generate"], "--turns=1001"]
    with pytest.raises(SystemExit) as ended:
        distill(command)
    assert ended.value.code == 2
    assert "data.distill.turns: must be at most 1000; got 1001" in capsys.readouterr().err
