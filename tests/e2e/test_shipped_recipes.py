"""Every shipped recipe runs through all its stages, on a tiny base of its architecture and kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from medusa_train.cli.train import app
from medusa_train.medusa_model import MedusaModel
from medusa_train.recipe.load import load_recipe
from tests.e2e.processes import finish
from tests.models_for_tests import save_base
from tests.tokenizers_for_tests import CHATML, EOS, MISTRAL

ROOT = Path(__file__).parents[2]
SENTENCEPIECE = {"metaspace": True, "eos": EOS}

# Each recipe's base: architecture, and the kind of tokenizer and template that it comes with.
BASES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {"architecture": "llama", "tied": True, "adds_bos": False},
    "smollm2-135m-hour": {"architecture": "llama", "tied": True, "adds_bos": False},
    "vicuna7b": {"architecture": "llama", "template": None, **SENTENCEPIECE},
    "vicuna13b": {"architecture": "llama", "template": None, **SENTENCEPIECE},
    "vicuna33b": {"architecture": "llama", "template": None, **SENTENCEPIECE},
    "zephyr7b": {"architecture": "mistral", "template": CHATML, **SENTENCEPIECE},
    "mistral7b": {"architecture": "mistral", "template": MISTRAL, **SENTENCEPIECE},
    "llama3.1-8b": {"architecture": "llama"},
    "qwen3-8b": {"architecture": "qwen3", "adds_bos": False},
}

# The same bases for base and heads together.
BASES |= {
    f"{name}-medusa2": BASES[name]
    for name in (
        "smollm2-135m",
        "vicuna7b",
        "vicuna13b",
        "vicuna33b",
        "zephyr7b",
        "llama3.1-8b",
        "qwen3-8b",
    )
}

# 4-bit weights come in blocks of 64.
for name in ("vicuna7b-medusa2", "vicuna13b-medusa2"):
    BASES[name] = {**BASES[name], "hidden_size": 64, "intermediate_size": 128}


def test_every_recipe_is_here() -> None:
    assert sorted(BASES) == sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("name", BASES)
def test_recipe_runs_all_its_stages(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    options = dict(BASES[name])
    base = save_base(tmp_path / "base", options.pop("architecture"), **options)
    prompts = tmp_path / "prompts.jsonl"
    rows = ({"messages": [{"role": "user", "content": f"Name a metal {n}."}]} for n in range(24))
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "base_model.name_or_path": base,
        "train.trainer.max_steps": 4,
        "train.trainer.use_cpu": "true",
        "run_dir": tmp_path / "run",
        # The tiny base's own: its random answers are short and loop.
        "heads.vocab_size": 40 if name.startswith("smollm2") else "null",
        "data.distill.prompts": prompts,
        "data.distill.num_prompts": 24,
        "data.distill.max_new_tokens": 12,
        "data.distill.loop_ngram": 0,
        "data.eval_fraction": 0.3,
        "evaluate.num_bootstrap": 20,
    }
    recipe = load_recipe(Path(f"recipes/{name}.yaml")).recipe
    joint = recipe.train.joint
    if joint is not None and joint.warm_up is not None:
        settings["train.medusa2.warm_up.trainer.max_steps"] = 3
    if recipe.deepspeed is not None:
        # On two processes; DeepSpeed has no option for the CPU.
        del settings["train.trainer.use_cpu"]
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    if recipe.deepspeed is not None:
        arguments = ["run", f"recipes/{name}.yaml", "--devices", "2", *sets]
        finish("train", arguments, log=tmp_path / "log")
    else:
        _ends_well("run", f"recipes/{name}.yaml", *sets)
        assert "Acceptance length of the top-1 chain" in capsys.readouterr().out
    if joint is not None:
        _ends_well("merge", str(tmp_path / "run"), str(tmp_path / "merged"))
        MedusaModel.from_pretrained(tmp_path / "run" / "heads", str(tmp_path / "merged"))
    report = json.loads((tmp_path / "run" / "report" / "heads_accuracy.json").read_text())
    assert len(report["heads"]) == (4 if name.startswith("smollm2") else 5)
    assert report["num_conversations"] > 0
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert all(record["finished"] for record in manifest["stages"].values())
    assert {"distill", "train", "accuracy"} <= set(manifest["stages"])


def _ends_well(*arguments: str) -> None:
    with pytest.raises(SystemExit) as ended:
        app(list(arguments))
    assert ended.value.code == 0


def test_prompts_from_nothing_through_a_whole_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick start's recipe as it is: the tiny base writes its own prompts."""
    monkeypatch.chdir(ROOT)
    base = save_base(tmp_path / "base", tied=True, adds_bos=False)
    settings = {
        "base_model.name_or_path": base,
        "train.trainer.max_steps": 4,
        "train.trainer.use_cpu": "true",
        "run_dir": tmp_path / "run",
        "heads.vocab_size": 40,
        "data.distill.num_prompts": 40,
        "data.distill.max_prompt_tokens": 400,
        "data.distill.max_new_tokens": 8,
        "data.distill.loop_ngram": 0,
        "data.eval_fraction": 0.3,
        "evaluate.num_bootstrap": 20,
    }
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    with pytest.raises(SystemExit) as ended:
        app(["run", "recipes/smollm2-135m.yaml", *sets])
    assert ended.value.code == 0
    data = (tmp_path / "run" / "data" / "conversations.jsonl").read_text().splitlines()
    assert {json.loads(line)["source"] for line in data} == {"magpie"}
