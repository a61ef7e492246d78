"""``medusa-train run`` of a recipe with ``export.push_to_hub``, against a local stand-in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_push import REPO, TOKEN, run_at
from tests.hub_for_tests import COMMIT, Hub, Repository
from tests.models_for_tests import save_base
from tests.training_for_tests import cyclic_rows, write_recipe

JOINT = (
    "train.method=medusa2", "train.hidden_states=online", "train.medusa2.lora.rank=4",
    "train.trainer.learning_rate=0.01",
)  # fmt: skip


def _recipe(directory: Path, *overrides: str, export: str) -> tuple[Path, list[str]]:
    """A recipe of few steps, and the options of the command."""
    base = save_base(directory / "base")
    write_recipe(directory, base=base, rows=cyclic_rows(12))
    settings = ["train.trainer.max_steps=2", "data.eval_fraction=0.0", f"export={export}"]
    return directory / "recipe.yaml", [f"--set={text}" for text in (*settings, *overrides)]


def _files(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_each_export_goes_to_its_repository(tmp_path: Path) -> None:
    recipe, options = _recipe(
        tmp_path, export=f"{{targets: [vllm, fasterdecoding], push_to_hub: {REPO}}}"
    )
    with Hub(TOKEN) as hub:
        dry = run_at("run", recipe, "--dry-run", *options, hub=hub)
        assert (dry.returncode, hub.requests) == (0, [])
        result = run_at("run", recipe, *options, hub=hub)
        assert result.returncode == 0, result.stderr
        hub.requests.clear()
        again = run_at("run", recipe, *options, hub=hub, token=None)
        assert (again.returncode, hub.requests) == (0, [])
    assert "export: up to date" in again.stderr
    assert set(hub.repositories) == {f"{REPO}-vllm", f"{REPO}-fasterdecoding"}
    for target in ("vllm", "fasterdecoding"):
        repository = hub.repositories[f"{REPO}-{target}"]
        assert repository.private
        assert repository.files == _files(tmp_path / "run" / "exports" / target)
        card = repository.files["README.md"].decode()
        assert f"DIRECTORY is what `hf download {REPO}-{target}` prints." in card
        assert str(tmp_path) not in card
        assert f"sent to {hub.url}/{REPO}-{target} (private), commit {COMMIT}" in result.stderr
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["stages"]["export"]["hub"] == {
        target: f"{hub.url}/{REPO}-{target}" for target in ("vllm", "fasterdecoding")
    }
    assert TOKEN not in json.dumps(manifest)


def test_a_trained_base_goes_with_its_heads(tmp_path: Path) -> None:
    recipe, options = _recipe(
        tmp_path, *JOINT, export=f"{{targets: [tgi], push_to_hub: {REPO}, public: true}}"
    )
    with Hub(TOKEN) as hub:
        result = run_at("run", recipe, *options, hub=hub)
        assert result.returncode == 0, result.stderr
    repository = hub.repositories[REPO]
    assert not repository.private
    names = {"README.md", "base/model.safetensors", "heads/medusa_lm_head.safetensors"}
    assert names <= set(repository.files)
    assert repository.files == _files(tmp_path / "run" / "exports" / "tgi")
    assert sorted(path.name for path in (tmp_path / "run" / "exports").iterdir()) == [
        "exports.json",
        "tgi",
    ]


@pytest.mark.parametrize("fault", ["no token", "public", "offline"])
def test_what_cannot_be_sent_is_found_out_before_the_run(tmp_path: Path, fault: str) -> None:
    recipe, options = _recipe(tmp_path, export=f"{{targets: [vllm], push_to_hub: {REPO}}}")
    with Hub(TOKEN) as hub:
        if fault == "public":
            hub.repositories[REPO] = Repository(private=False)
        environment = {"HF_HUB_OFFLINE": "1"} if fault == "offline" else {}
        token = None if fault == "no token" else TOKEN
        result = run_at("run", recipe, *options, hub=hub, token=token, **environment)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith(f"error: {REPO}: ")
    assert not (tmp_path / "run").exists()
