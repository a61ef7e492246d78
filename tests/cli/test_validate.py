"""`medusa-train validate` and what all commands share: exact exit codes and exact output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from medusa_train import __version__

ROOT = Path(__file__).parents[2]
COMMANDS = {
    "medusa-train": "medusa_train.cli.train",
    "medusa-distill": "medusa_train.cli.distill",
    "medusa-eval": "medusa_train.cli.evaluate",
}


def run(command: str, *args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    script = Path(sys.executable).parent / command
    return subprocess.run([script, *args], cwd=cwd, capture_output=True, text=True, check=False)


def outcome(command: str, *args: str, cwd: Path = ROOT) -> tuple[int, str, str]:
    result = run(command, *args, cwd=cwd)
    return result.returncode, result.stdout, result.stderr


def test_the_shipped_recipes():
    paths = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "recipes").glob("*.yaml"))
    code, stdout, stderr = outcome("medusa-train", "validate", *paths)
    assert (code, stderr) == (0, "")
    assert [line.split(": ok")[0] for line in stdout.splitlines()] == paths
    assert len(paths) == 16


def test_three_mistakes_are_three_lines(tmp_path):
    (tmp_path / "x.yaml").write_text(
        "base_model:\n  name_or_path: m\nheads:\n  num_head: 3\n  layout: half\n"
        "data:\n  path: p\n  max_length: long\n"
    )
    (tmp_path / "good.yaml").write_text("base_model: {name_or_path: m}\ndata: {path: x.yaml}\n")
    assert outcome("medusa-train", "validate", "x.yaml", "good.yaml", cwd=tmp_path) == (
        2,
        "good.yaml: ok\n",
        "error: x.yaml:4: heads.num_head: unknown key; did you mean 'num_heads'?\n"
        "error: x.yaml:5: heads.layout: must be one of full, shared; got 'half'\n"
        "error: x.yaml:8: data.max_length: must be a whole number; got 'long'\n",
    )


def test_a_recipe_that_is_not_there():
    assert outcome("medusa-train", "validate", "no.yaml") == (
        2,
        "",
        "error: no.yaml: no such file\n",
    )


def test_files_that_are_not_here_are_said(tmp_path):
    (tmp_path / "x.yaml").write_text("base_model: {name_or_path: m}\ndata: {path: p}\n")
    expected = (0, "x.yaml: ok (1 of its files not here)\n", "")
    assert outcome("medusa-train", "validate", "x.yaml", cwd=tmp_path) == expected


def test_an_override():
    assert outcome(
        "medusa-train", "validate", "recipes/zephyr7b.yaml", "--set", "heads.num_heads=3"
    ) == (0, "recipes/zephyr7b.yaml: ok\n", "")
    assert outcome(
        "medusa-train", "validate", "recipes/zephyr7b.yaml", "--set", "heads.num_head=3"
    ) == (
        2,
        "",
        "error: --set heads.num_head=3: heads.num_head: unknown key; did you mean 'num_heads'?\n",
    )


@pytest.mark.parametrize(
    ("args", "stderr"),
    [
        ((), "error: medusa-train: Missing command; see `medusa-train --help`\n"),
        (
            ("validate",),
            "error: medusa-train validate: Missing argument 'RECIPE'; "
            "see `medusa-train validate --help`\n",
        ),
        (
            ("run", "no.yaml", "--only", "nap"),
            "error: medusa-train run: Invalid value for '--only': 'nap' is not one of "
            "'data', 'distill', 'hidden-states', 'train', 'accuracy', 'tree', 'quality', "
            "'export', 'card'; see `medusa-train run --help`\n",
        ),
        (
            ("run", "no.yaml", "--only", "train", "--from", "train"),
            "error: --only and --from: give one of them, not both\n",
        ),
        (("run", "no.yaml"), "error: no.yaml: no such file\n"),
    ],
)
def test_bad_usage_is_one_line(args, stderr):
    assert outcome("medusa-train", *args) == (2, "", stderr)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_command_or_option_is_one_line(command):
    for args in (("nothing",), ("--nothing",)):
        code, stdout, stderr = outcome(command, *args)
        assert (code, stdout) == (2, "")
        assert stderr.startswith(f"error: {command}: No such ")
        assert stderr.count("\n") == 1


@pytest.mark.parametrize("command", COMMANDS)
def test_version_and_help(command):
    assert outcome(command, "--version") == (0, f"medusa-train {__version__}\n", "")
    code, stdout, stderr = outcome(command, "--help")
    assert (code, stderr) == (0, "")
    assert stdout.startswith(f"Usage: {command} [OPTIONS] COMMAND [ARGS]...\n")


@pytest.mark.parametrize(
    ("module", "args"),
    [
        *((module, ["--help"]) for module in COMMANDS.values()),
        ("medusa_train.cli.train", ["validate", "recipes/smollm2-135m.yaml"]),
        ("medusa_train.cli.train", ["run", "--help"]),
    ],
)
def test_no_torch_is_imported(module, args):
    code = (
        "import importlib, sys\n"
        f"app = importlib.import_module({module!r}).app\n"
        f"try:\n    app({args!r}, prog_name='x')\n"
        "except SystemExit as end:\n    assert end.code == 0, end.code\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
