"""Bases that come with code of their own: refused, or their code runs where the user says so."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from medusa_train.errors import InputError
from medusa_train.verifying import verify_directory
from tests.exports_for_tests import base_directory, export, heads_directory

CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

open({mark!r}, "w").close()

class OwnConfig(LlamaConfig):
    model_type = {kind!r}

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""
WHY = "it comes with code of its own, which runs only where base_model.trust_remote_code or"


def _own(directory: Path, *, mark: Path, kind: str = "own") -> Path:
    """A base like that of the tests, whose classes are in its own file."""
    shutil.copytree(base_directory(), directory)
    config = json.loads((directory / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (directory / "config.json").write_text(json.dumps({**config, "model_type": kind}))
    (directory / "own.py").write_text(CODE.format(mark=str(mark), kind=kind))
    return directory


def _call(*arguments: object, cache: Path) -> subprocess.CompletedProcess[str]:
    """The command, in a process that keeps copies of models' code to itself."""
    return subprocess.run(
        [sys.executable, "-m", "medusa_train.cli.train", *map(str, arguments)],
        env={**os.environ, "HF_MODULES_CACHE": str(cache), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_its_code_runs_only_where_the_user_says_so(tmp_path: Path) -> None:
    mark, cache, heads = tmp_path / "ran", tmp_path / "modules", tmp_path / "heads"
    base = _own(tmp_path / "base", mark=mark)
    export("vllm", heads_directory(), tmp_path / "vllm")
    imported = ("import", tmp_path / "vllm", heads, "--base-model", base)
    refused = _call(*imported, cache=cache)
    assert refused.returncode == 2
    assert f"error: {base}: its config cannot be loaded: {WHY}" in refused.stderr
    assert "Traceback" not in refused.stderr
    with pytest.raises(InputError, match=WHY):
        verify_directory("vllm", tmp_path / "vllm", base_model=str(base))
    assert not mark.exists()
    result = _call(*imported, "--trust-remote-code", cache=cache)
    assert result.returncode == 0, result.stderr
    assert mark.exists()
    with pytest.raises(InputError, match=WHY):
        export("vllm", heads, tmp_path / "out")
    exported = _call("export", "vllm", heads, tmp_path / "out", "--trust-remote-code", cache=cache)
    assert exported.returncode == 0, exported.stderr
    assert "the base comes with code of its own: what loads it runs that only" in exported.stderr
    assert "The base comes with code of its own" in (tmp_path / "out" / "README.md").read_text()
    own = ("transformers", heads, tmp_path / "own", "--trust-remote-code")
    assert _call("export", *own, cache=cache).returncode == 0


def test_one_directory_would_lose_the_code(tmp_path: Path) -> None:
    """A base that says it is a Llama, and has classes of its own all the same."""
    base = _own(tmp_path / "base", mark=tmp_path / "ran", kind="llama")
    heads, cache, trusted = tmp_path / "heads", tmp_path / "modules", "--trust-remote-code"
    export("vllm", heads_directory(), tmp_path / "vllm")
    made = _call("import", tmp_path / "vllm", heads, "--base-model", base, trusted, cache=cache)
    assert made.returncode == 0, made.stderr
    result = _call("export", "combined", heads, tmp_path / "out", trusted, cache=cache)
    assert result.returncode == 2
    assert "comes with code of its own, which the engine does not run" in result.stderr
    assert not (tmp_path / "out").exists()
