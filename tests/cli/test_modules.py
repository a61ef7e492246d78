"""The commands as modules, and what an environment can do to them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MODULES = ("train", "distill", "evaluate")


def _run(module: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"medusa_train.cli.{module}", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **variables}
    )


@pytest.mark.parametrize("module", MODULES)
def test_a_command_runs_as_a_module(module: str) -> None:
    done = _run(module, "--help")
    assert done.returncode == 0
    assert "Usage: " in done.stdout


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_ranks_that_are_no_numbers_are_refused(module: str, name: str) -> None:
    done = _run(module, "--version", **{name: "x"})
    assert done.returncode == 2
    assert done.stderr == (
        f"error: {name}: the environment says 'x', and launchers such as torchrun set whole "
        "numbers; unset it\n"
    )
    assert not done.stdout
