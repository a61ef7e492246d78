"""``medusa-train export``, ``verify`` and ``import`` on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from medusa_train.cli.export import Layout, Target
from medusa_train.cli.train import app
from medusa_train.export.verify import TARGETS
from tests.exports_for_tests import base_directory, heads_directory


def _call(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        app([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


def test_targets_of_the_command_are_those_of_the_package() -> None:
    assert tuple(target.value for target in Target) == TARGETS
    assert {layout.value for layout in Layout} == {"full", "shared"}


def test_export_verify_and_import(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heads, out = heads_directory(), tmp_path / "out"
    code, shown, err = _call("export", "vllm", heads, out, "--dtype", "bfloat16", capsys=capsys)
    assert code == 0
    assert f"{out}: 3 files, read back as vllm does" in shown
    assert "vllm serve" in shown
    assert "warning: vLLM runs only the chain" in err
    code, shown, _ = _call("verify", "vllm", out, "--heads", heads, capsys=capsys)
    assert code == 0
    assert f"{out}: vLLM loads 3 heads of 1 layers, the logits are those of the heads" in shown
    code, shown, _ = _call("import", out, tmp_path / "back", "--json", capsys=capsys)
    assert code == 0
    assert json.loads(shown.splitlines()[-1]) == {
        "output": str(tmp_path / "back"),
        "names": "vllm",
        "files": ["model.safetensors"],
        "num_heads": 3,
        "num_layers": 1,
        "layout": "full",
        "base": str(base_directory()),
    }


def test_verify_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    code, _, _ = _call("export", "vllm", heads_directory(), out, "--json", capsys=capsys)
    assert code == 0
    path = out / "config.json"
    config = json.loads(path.read_text())
    del config["medusa_fc_bias"]
    path.write_text(json.dumps(config))
    code, shown, _ = _call("verify", "vllm", out, "--json", capsys=capsys)
    assert code == 1
    result = json.loads(shown.splitlines()[-1])
    assert result["ok"] is False
    assert result["logits_compared"] is False
    assert result["findings"][0]["severity"] == "error"
    assert "drops the biases" in result["findings"][0]["text"]
    code, shown, _ = _call("verify", "vllm", out, capsys=capsys)
    assert code == 1
    assert "error: medusa_fc_bias is not in config.json" in shown
    assert shown.endswith(f"{out}: vLLM does not load these heads\n")


def test_refusals_end_with_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heads = heads_directory(layout="shared")
    code, out, err = _call("export", "mlc", heads, tmp_path / "out", capsys=capsys)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == (
        "error: MLC-LLM cannot load these heads: they share the base's lm_head, but the engine "
        "reads one of each head; give --layout full, which writes a copy of it for each head"
    )
    code, _, err = _call("import", tmp_path, tmp_path / "back", capsys=capsys)
    assert code == 2
    assert "no heads in it" in err
    code, _, err = _call("verify", "sglang", tmp_path, capsys=capsys)
    assert code == 2
    assert "'sglang' is not one of" in err


@pytest.mark.parametrize("command", ["export", "import", "verify"])
def test_help_loads_no_torch(command: str) -> None:
    script = (
        "import sys; from medusa_train.cli.train import app\n"
        f"try: app([{command!r}, '--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "Usage" in result.stdout
