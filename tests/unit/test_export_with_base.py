"""Heads whose base was trained with them are exported with that base."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from medusa_train.card.metadata import card_metadata
from medusa_train.card.of_run import card_sources
from medusa_train.card.usage import Use
from medusa_train.errors import InputError
from medusa_train.export.verify import Target
from medusa_train.export_options import ExportChoices
from medusa_train.export_with_base import export_with_base
from medusa_train.exporting import export_heads
from medusa_train.heads.checkpoint import load_heads, read_spec
from medusa_train.importing import import_heads
from medusa_train.medusa_model import MedusaModel
from medusa_train.merging import merge_run
from medusa_train.pipeline import run_pipeline
from medusa_train.recipe.load import load_recipe
from medusa_train.verifying import verify_directory
from tests.models_for_tests import save_base
from tests.training_for_tests import cyclic_rows, write_recipe

OVERRIDES = [
    "train.method=medusa2",
    "train.hidden_states=online",
    "train.trainer.learning_rate=0.01",
    "train.medusa2.lora.rank=4",
    "heads.layout=shared",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory; recipe and base lie beside it."""
    directory = tmp_path_factory.mktemp("joint")
    base = save_base(directory / "base")
    loaded = write_recipe(directory, base=base, rows=cyclic_rows(16), overrides=OVERRIDES)
    return run_pipeline(loaded, only="train").root


def test_two_directories_fit_together(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = export_with_base("vllm", run / "heads", out)
    assert {"base/config.json", "heads/model.safetensors", "heads/README.md"} <= set(result.files)
    trained = AutoModelForCausalLM.from_pretrained(out / "base").get_output_embeddings().weight
    assert torch.equal(load_file(out / "heads" / "model.safetensors")["lm_head.weight"], trained)
    assert str(out / "base") in (out / "heads" / "README.md").read_text()
    assert any(f"serve {out / 'base'}, not" in warning for warning in result.warnings)
    base = str(out / "base")
    assert verify_directory("vllm", out / "heads", heads=run / "heads", base_model=base).is_good
    import_heads(out / "heads", tmp_path / "back")
    ours, identity = load_heads(run / "heads")
    theirs, named = load_heads(tmp_path / "back")
    assert named.fingerprint == identity.fingerprint
    for name, tensor in ours.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], tensor)
    MedusaModel.from_pretrained(tmp_path / "back")


def test_a_card_of_both(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = export_with_base("tgi", run / "heads", out, choices=ExportChoices(num_heads=2))
    assert "README.md" in result.files
    card = ModelCard.load(out / "README.md")
    assert card.text.strip().startswith("# Medusa heads for `base`")
    assert "With 2 small heads beside it" in card.text
    assert "The model itself is among these files." in card.text
    assert (
        "`base` is the model, which was trained together with its heads, and `heads`" in card.text
    )
    start = result.start.strip()
    assert f"--model-id {out / 'heads'}" in start
    assert start in card.text
    assert start in (out / "heads" / "README.md").read_text()
    assert "tgi" in (card.data.to_dict()["tags"])


@pytest.mark.parametrize("target", ["vllm", "tgi", "transformers"])
def test_on_the_hub_no_card_names_a_directory_of_this_machine(
    run: Path, tmp_path: Path, target: Target
) -> None:
    out = tmp_path / "out"
    export_with_base(target, run / "heads", out, choices=ExportChoices(repo="someone/both"))
    for card in (out / "README.md", out / "heads" / "README.md"):
        text = card.read_text()
        assert str(tmp_path) not in text
        assert str(run.parent) not in text
        assert "DIRECTORY is what `hf download someone/both` prints." in text
        assert "DIRECTORY/heads" in text
        assert "DIRECTORY/base" in text


def test_a_base_that_is_among_the_files_is_a_finetune(run: Path) -> None:
    sources = card_sources(run / "heads", base_model_id="someone/base")
    assert card_metadata(sources).to_dict()["base_model_relation"] == "adapter"
    both = card_metadata(sources, use=Use("Start it so.", holds_base=True))
    assert both.to_dict()["base_model_relation"] == "finetune"


def test_an_export_for_transformers_names_the_trained_base(run: Path, tmp_path: Path) -> None:
    export_with_base("transformers", run / "heads", tmp_path / "out")
    _, identity = read_spec(tmp_path / "out" / "heads")
    assert identity.trained is None
    assert identity.name_or_path == str(tmp_path / "out" / "base")
    MedusaModel.from_pretrained(tmp_path / "out" / "heads")


def test_one_directory_has_the_trained_base(run: Path, tmp_path: Path) -> None:
    choices = ExportChoices(layout="full")
    export_with_base("combined", run / "heads", tmp_path / "out", choices=choices)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "out")
    merge_run(run, tmp_path / "merged")
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    got = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merged", "out"]


def test_a_trained_base_may_be_given(run: Path, tmp_path: Path) -> None:
    merge_run(run, tmp_path / "merged")
    choices = ExportChoices(base_model=str(tmp_path / "merged"))
    result = export_with_base("tgi", run / "heads", tmp_path / "out", choices=choices)
    assert "medusa_lm_head.safetensors" in result.files
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "merged")
    original = ExportChoices(base_model=str(run.parent / "base"))
    with pytest.raises(InputError, match=r"heads of the base model .* with fingerprint"):
        export_with_base("tgi", run / "heads", tmp_path / "other", choices=original)
    with pytest.raises(InputError, match="give the trained base that medusa-train merge wrote"):
        export_heads("tgi", run / "heads", tmp_path / "other")


def test_refusals_come_before_the_base_is_written(run: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="reads one of each head; give --layout full"):
        export_with_base("nxd", run / "heads", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(InputError, match="is there already; give another directory or remove it"):
        export_with_base("vllm", run / "heads", tmp_path / "out")
    assert (tmp_path / "out" / "mine").exists()


def test_the_stage_writes_the_base_once(run: Path) -> None:
    overrides = [*OVERRIDES, "export.targets=[vllm, tgi]"]
    run_pipeline(load_recipe(run.parent / "recipe.yaml", overrides), only="export")
    names = sorted(path.name for path in (run / "exports").iterdir())
    assert names == ["base", "exports.json", "tgi", "vllm"]
    for target in ("vllm", "tgi"):
        config = json.loads((run / "exports" / target / "config.json").read_text())
        assert config["base_model_name_or_path"] == str(run / "exports" / "base")
