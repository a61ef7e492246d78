"""An export in a virtual environment that has torch and transformers, and what they require.

Installing torch takes minutes, so the environment's packages are links to the installed ones.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import venv
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from medusa_train.exporting import export_heads
from tests.decoding_for_tests import save_heads_directory
from tests.models_for_tests import save_base

WANTED = ("torch", "transformers")

SCRIPT = """
import importlib.util, json, sys
import torch
from transformers import AutoModelForCausalLM
base, other, export, both, resized = sys.argv[1:6]
absent = json.loads(sys.argv[6])
found = [name for name in absent if importlib.util.find_spec(name) is not None]
assert not found, f"in the environment: {found}"
ids = torch.tensor([[0, 5, 9, 12], [5, 7, 8, 9]])
options = {"input_ids": ids, "attention_mask": (ids > 0).long(), "max_new_tokens": 24,
           "do_sample": False, "pad_token_id": 0}

def decode(model, directory, **heads):
    plain = model.generate(**options)
    result = model.generate(**options, custom_generate=directory, trust_remote_code=True,
                            return_dict_in_generate=True, **heads)
    assert torch.equal(result.sequences, plain)
    return result.statistics.num_steps

def refused(model, **heads):
    try:
        decode(model, export, **heads)
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        assert "InputError" in kinds, repr(error)
        return str(error)
    raise AssertionError("not refused")

model = AutoModelForCausalLM.from_pretrained(base)
print(json.dumps({
    "steps": decode(model, export, heads=export),
    "own": decode(AutoModelForCausalLM.from_pretrained(both), both),
    "no_heads": refused(model),
    "other": refused(AutoModelForCausalLM.from_pretrained(other), heads=export),
    "asked_for": decode(AutoModelForCausalLM.from_pretrained(other), export, heads=export,
                        other_base=True),
    "resized": refused(AutoModelForCausalLM.from_pretrained(resized), heads=export),
    "in_memory": decode(AutoModelForCausalLM.from_config(model.config), export, heads=export),
}))
"""


def required_by(names: Iterable[str]) -> dict[str, metadata.Distribution]:
    """These packages and all that they require without extras, where it is installed."""
    found: dict[str, metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            assert name not in names
            continue  # another platform's
        needs = [Requirement(text) for text in found[name].requires or ()]
        waiting += [r.name for r in needs if not r.marker or r.marker.evaluate({"extra": ""})]
    return found


def bare_environment(directory: Path) -> tuple[Path, list[str]]:
    """The interpreter of a new environment, and the installed modules that it does not have."""
    venv.create(directory, symlinks=True, with_pip=False)
    (packages,) = directory.glob("lib/python*/site-packages")
    kept = required_by(WANTED)
    for distribution in kept.values():
        root = Path(str(distribution.locate_file("")))
        tops = {file.parts[0] for file in distribution.files or () if ".." not in file.parts}
        for top in tops - {"__pycache__"}:
            if not (packages / top).exists() and not top.endswith(".pth"):
                (packages / top).symlink_to(root / top)
    absent = [
        module
        for module, owners in metadata.packages_distributions().items()
        if not {owner.lower().replace("_", "-") for owner in owners} & kept.keys()
    ]
    return directory / "bin" / "python", sorted({*absent, "medusa_train"})


@pytest.mark.skipif(os.name == "nt", reason="environments of links")
def test_an_export_runs_where_only_torch_and_transformers_are(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    other = save_base(tmp_path / "other", seed=1)
    resized = save_base(tmp_path / "resized", extra_rows=8)
    heads = save_heads_directory(tmp_path / "heads", base=base, layout="full")
    export, both = tmp_path / "export", tmp_path / "both"
    export_heads("transformers", heads, export)
    shutil.copytree(base, both)
    export_heads("transformers", heads, both)
    python, absent = bare_environment(tmp_path / "environment")
    assert {"medusa_train", "datasets", "accelerate", "pytest"} <= set(absent)
    paths = map(str, (base, other, export, both, resized))
    result = subprocess.run(
        [python, "-I", "-c", SCRIPT, *paths, json.dumps(absent)],
        env={
            "PATH": os.environ["PATH"],
            "OMP_NUM_THREADS": "1",
            "HF_HOME": str(tmp_path / "hub"),
            "HF_HUB_OFFLINE": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    shown = json.loads(result.stdout.splitlines()[-1])
    assert min(shown["steps"], shown["own"], shown["asked_for"], shown["in_memory"]) > 0
    assert shown["steps"] == shown["own"]
    assert f"{base}: has no heads_spec.json; give the exported directory" in shown["no_heads"]
    assert f"the files of this one ({other}) have" in shown["other"]
    assert "give other_base=True" in shown["other"]
    assert "rows of lm_head" in shown["resized"]
