"""``medusa-train export transformers``, used in a process without this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from medusa_train.cli.train import app as train
from tests.decoding_for_tests import save_heads_directory
from tests.models_for_tests import save_base

# The process refuses to import this package, and its working directory is elsewhere.
SCRIPT = """
import sys
sys.modules["medusa_train"] = None
import torch
from transformers import AutoModelForCausalLM
base, export = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base)
ids = torch.tensor([[5, 9, 12], [7, 8, 9]])
options = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 12,
           "do_sample": False, "pad_token_id": 0}
plain = model.generate(**options)
again = {"custom_generate": export, "trust_remote_code": True}
for heads in ({"heads": export}, {"heads": export, "tree": [[0], [1], [1, 0]]}):
    assert torch.equal(model.generate(**options, **again, **heads), plain)
for wrong, text in (
    ({}, "give the exported directory with heads="),
    ({"heads": 5}, "heads: must be the exported directory, got 5"),
    ({"heads": export, "tree": 5}, "tree: must be a list of paths"),
    ({"heads": export, "typical": 0.1}, "typical: must be (epsilon, delta)"),
    ({"heads": export, "typical": (0.1, -1)}, "typical: delta must be a number above 0, got -1"),
):
    try:
        model.generate(**options, **again, **wrong)
    except ValueError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"taken: {wrong}")
model.config.name_or_path = export
result = model.generate(**options, **again, return_dict_in_generate=True)
assert torch.equal(result.sequences, plain)
print(result.statistics.num_steps, any(n.startswith("medusa_train.") for n in sys.modules))
"""


def _call(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        train([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


def test_an_export_runs_without_this_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_base(tmp_path / "base")
    heads = save_heads_directory(tmp_path / "heads", base=base, layout="full")
    out = tmp_path / "export"
    code, shown, _ = _call("export", "transformers", heads, out, "--json", capsys=capsys)
    assert code == 0
    files = json.loads(shown.splitlines()[-1])["files"]  # a library may have logged before
    assert {"medusa_lm_head.safetensors", "heads_spec.json", "medusa_generate.json"} <= set(files)
    for path in (out / "custom_generate").iterdir():
        assert "from medusa_train" not in path.read_text()
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(base), str(out)],
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[1] == "False"
    code, _, err = _call("export", "transformers", heads, out, capsys=capsys)
    assert code == 2
    assert "custom_generate: is there already" in err
    tree = tmp_path / "tree.json"
    tree.write_text("[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]")
    code, _, err = _call(
        "export", "transformers", heads, tmp_path / "other", "--tree", tree, capsys=capsys
    )
    assert code == 2
    assert "has depth 4, but there are 3 heads" in err
