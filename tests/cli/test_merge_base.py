"""``medusa-train merge``: a plain model of a base that was trained with its heads."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from medusa_train.base_model.adapters import load_adapters
from medusa_train.cli.train import app
from medusa_train.heads.checkpoint import read_spec
from medusa_train.medusa_model import MedusaModel
from medusa_train.pipeline import run_pipeline
from tests.models_for_tests import save_base
from tests.training_for_tests import cyclic_rows, write_recipe

# Another process that knows nothing of this package.
SCRIPT = """
import sys
sys.modules["medusa_train"] = None
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
directory, output = sys.argv[1:]
AutoTokenizer.from_pretrained(directory)
model = AutoModelForCausalLM.from_pretrained(directory)
with torch.no_grad():
    save_file({"logits": model(torch.arange(5, 45)[None]).logits.contiguous()}, output)
"""
IDS = torch.arange(5, 45)[None]


def _run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as ended:
        app([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


@pytest.fixture(scope="module", params=["lora", "full"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory; the base lies beside it."""
    directory = tmp_path_factory.mktemp("merge")
    base = save_base(directory / "base")
    kinds = {"lora": ["train.medusa2.lora.rank=4"]}
    full = ["train.medusa2={trained: full, teacher: frozen_copy}"]
    loaded = write_recipe(
        directory,
        base=base,
        rows=cyclic_rows(16),
        overrides=[
            "train.method=medusa2",
            "train.hidden_states=online",
            "train.trainer.learning_rate=0.01",
            *kinds.get(request.param, full),
        ],
    )
    return run_pipeline(loaded, only="train").root


def test_a_fresh_process_gives_the_logits_of_the_trained_base(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "merged"
    assert _run("merge", trained, output, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    _, identity = read_spec(trained / "heads")
    assert said["fingerprint"] == identity.fingerprint
    result = tmp_path / "logits.safetensors"
    subprocess.run([sys.executable, "-c", SCRIPT, str(output), str(result)], check=True)
    logits = load_file(result)["logits"]
    if said["kind"] == "adapters":
        model = AutoModelForCausalLM.from_pretrained(trained.parent / "base")
        load_adapters(model.eval(), trained / "adapters")
    else:
        model = AutoModelForCausalLM.from_pretrained(trained / "base")
    with torch.no_grad():
        torch.testing.assert_close(logits, model(IDS).logits, rtol=0, atol=1e-4)
    original = AutoModelForCausalLM.from_pretrained(trained.parent / "base")
    assert (original(IDS).logits - logits).abs().max() > 1e-2


def test_heads_take_the_merged_base_and_refuse_others(trained: Path, tmp_path: Path) -> None:
    output = tmp_path / "merged"
    assert _run("merge", trained, output) == 0
    model = MedusaModel.from_pretrained(trained / "heads", str(output))
    beside = MedusaModel.from_pretrained(trained / "heads")
    options: dict[str, Any] = {"max_new_tokens": 12, "attention_mask": torch.ones_like(IDS)}
    texts: list[Any] = [one.generate(IDS, **options) for one in (model, beside)]
    assert torch.equal(*texts)
    copy = tmp_path / "copy"
    shutil.copytree(output, copy)
    MedusaModel.from_pretrained(trained / "heads", str(copy))
    weights = copy / "model.safetensors"
    tensors = load_file(weights)
    save_file({**tensors, "lm_head.weight": tensors["lm_head.weight"] * 1.1}, weights)
    from medusa_train.errors import InputError

    with pytest.raises(InputError, match="but this base model has"):
        MedusaModel.from_pretrained(trained / "heads", str(copy))
    with pytest.raises(InputError, match="as it was before"):
        MedusaModel.from_pretrained(trained / "heads", str(trained.parent / "base"))


def test_an_export_takes_the_merged_base(trained: Path, tmp_path: Path) -> None:
    merged, export = tmp_path / "merged", tmp_path / "export"
    assert _run("merge", trained, merged) == 0
    heads = trained / "heads"
    assert _run("export", "transformers", heads, export, "--base-model", merged) == 0
    other = trained.parent / "base"
    assert _run("export", "transformers", heads, tmp_path / "x", "--base-model", other) == 2


def test_what_cannot_be_merged(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    assert _run("merge", trained, tmp_path / "there") == 2
    assert "is there already" in capsys.readouterr().err
    plain = tmp_path / "plain"
    shutil.copytree(trained / "heads", plain)
    spec = json.loads((plain / "heads_spec.json").read_text())
    del spec["base_model"]["trained"]
    (plain / "heads_spec.json").write_text(json.dumps(spec))
    assert _run("merge", plain, tmp_path / "out") == 2
    assert "its base model was not trained (method: medusa1)" in capsys.readouterr().err
    assert _run("merge", tmp_path / "nowhere", tmp_path / "out") == 2
    other = save_base(tmp_path / "other", seed=1)
    if (trained / "adapters").exists():
        assert _run("merge", trained, tmp_path / "out", "--base-model", other) == 2
        assert "give the original (--base-model)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
