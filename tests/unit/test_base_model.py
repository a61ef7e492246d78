from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import PreTrainedModel

from medusa_train.base_model.features import LogitRule, check_features, hidden_states
from medusa_train.base_model.fingerprint import base_fingerprint
from medusa_train.base_model.load import (
    load_base_model,
    load_dtype,
    load_max_length,
    load_stop_ids,
    load_tokenizer,
)
from medusa_train.base_model.naming import check_name
from medusa_train.errors import InputError
from medusa_train.plan.model_shape import load_config
from tests.models_for_tests import ARCHITECTURES, make_model, save_base
from tests.tokenizers_for_tests import END, make_tokenizer


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rule_reproduces_the_models_logits(architecture: str) -> None:
    expected = {
        "gemma2": LogitRule(soft_cap=3.0),
        "cohere": LogitRule(scale=0.25),
        "granite": LogitRule(scale=0.25),
    }
    assert check_features(make_model(architecture)) == expected.get(architecture, LogitRule())


class _OddLogits(torch.nn.Module):
    """Stands in for an architecture whose forward does something that no config key names."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.weight = inner.weight
        self.bias = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) ** 3


def _with_head(model: PreTrainedModel) -> PreTrainedModel:
    model.set_output_embeddings(_OddLogits(model.get_output_embeddings()))
    return model


def test_unknown_post_processing_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"LlamaForCausalLM.*its logits are neither"):
        check_features(_with_head(make_model("llama")))


class _Scaled(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: object) -> object:
        output = self.inner(**inputs)
        output.last_hidden_state = output.last_hidden_state * 2
        return output


def test_features_that_are_not_lm_heads_input_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    monkeypatch.setattr(type(model), "base_model", property(lambda self: _Scaled(self.model)))
    with pytest.raises(InputError, match="the input of its lm_head is not"):
        check_features(model)


def test_right_padding_does_not_change_the_states_of_real_tokens() -> None:
    for architecture in ARCHITECTURES:
        model = make_model(architecture, dtype=torch.float64)
        ids = torch.randint(0, 64, (1, 20), generator=torch.Generator().manual_seed(0))
        padded = torch.cat([ids, torch.zeros(1, 9, dtype=torch.int64)], dim=1)
        alone, beside = hidden_states(model, ids), hidden_states(model, padded)[:, :20]
        torch.testing.assert_close(alone, beside, atol=1e-9, rtol=1e-9)


def test_load_from_a_directory(tmp_path: Path) -> None:
    directory = save_base(tmp_path / "m", tied=True)
    base = load_base_model(str(directory), dtype="bfloat16", device="cpu")
    assert base.model.dtype == torch.bfloat16
    assert not base.model.training
    assert not any(parameter.requires_grad for parameter in base.model.parameters())
    assert base.stop_ids == (base.tokenizer.convert_tokens_to_ids(END),)
    assert load_stop_ids(str(directory), tokenizer=base.tokenizer) == base.stop_ids
    assert base.num_tokens == len(make_tokenizer())


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.json", "no config.json in it"),
        ("model.safetensors", "no model.safetensors or pytorch_model.bin in it"),
    ],
)
def test_missing_files_are_named(tmp_path: Path, missing: str, message: str) -> None:
    directory = save_base(tmp_path / "m")
    (directory / missing).unlink()
    with pytest.raises(InputError, match=message):
        load_base_model(str(directory))


@pytest.mark.parametrize(
    "name",
    ["./base", "../base", "~/base", "/no/base", "no/such/base", "here/base", "no\\base"],
)
@pytest.mark.parametrize(
    "read",
    [
        base_fingerprint,
        load_base_model,
        load_tokenizer,
        load_max_length,
        load_config,
        partial(load_dtype, dtype="auto"),
        partial(load_stop_ids, tokenizer=None),
    ],
)
def test_the_hub_is_not_asked_for_a_path(
    name: str, read: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(
        InputError, match=r"no such directory[;,] (give a model's|and the directory)"
    ):
        read(name)


def test_a_model_of_the_hub_may_have_its_owners_directory_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(InputError, match="the directory owner is here; for a model of the hub by"):
        check_name("owner/name")
    (tmp_path / "cache" / "models--owner--name").mkdir(parents=True)
    check_name("owner/name")
    check_name("other/name")
    check_name("name")
    (tmp_path / "owner" / "other").mkdir()
    check_name("./owner/other")


def test_a_name_that_is_no_directory_may_be_one_that_the_hub_does_not_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Without a network the same error comes after several tries.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"no-such-model: .*hub"):
        load_base_model("no-such-model")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.json", lambda _: b"{", r"config.json: not valid JSON"),
        ("config.json", lambda _: b"[]", r"config.json: must be a JSON object, got list"),
        ("model.safetensors", lambda b: b[:-3], r"has [\d,]+ of its [\d,]+ bytes; fetch it again"),
        ("model.safetensors", lambda b: b[:4], r"model.safetensors: not a safetensors file"),
        ("model.safetensors", lambda b: b[:8] + b"x" * len(b), r"not a safetensors file"),
    ],
)
def test_damaged_files_are_named(
    tmp_path: Path, name: str, change: Callable[[bytes], bytes], message: str
) -> None:
    path = save_base(tmp_path / "m") / name
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(InputError, match=message):
        load_base_model(str(tmp_path / "m"))


def test_an_unknown_architecture_is_an_input_error(tmp_path: Path) -> None:
    directory = save_base(tmp_path / "m")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "no-such-type"}))
    with pytest.raises(InputError, match="cannot be loaded"):
        load_base_model(str(directory))


def test_code_in_a_checkpoint_is_not_run_unless_asked(tmp_path: Path) -> None:
    directory = save_base(tmp_path / "m")
    config = json.loads((directory / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "evil.EvilConfig",
        "AutoModelForCausalLM": "evil.EvilModel",
    }
    config["model_type"] = "evil"
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    with pytest.raises(InputError, match="cannot be loaded"):
        load_base_model(str(directory))
    assert not (tmp_path / "ran").exists()


def test_fingerprint_follows_the_model_and_not_its_place(tmp_path: Path) -> None:
    first = save_base(tmp_path / "a")
    original = base_fingerprint(str(first))
    shutil.copytree(first, tmp_path / "b")
    assert base_fingerprint(str(tmp_path / "b")) == original
    assert base_fingerprint(str(save_base(tmp_path / "c", seed=1))) != original
    assert base_fingerprint(str(save_base(tmp_path / "d", hidden_size=64))) != original


def test_fingerprint_of_sharded_weights(tmp_path: Path) -> None:
    directory = save_base(tmp_path / "m")
    single = base_fingerprint(str(directory))
    model = load_base_model(str(directory), device="cpu").model
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory, max_shard_size="50KB")
    shards = sorted(directory.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert base_fingerprint(str(directory)) != single
    shards[-1].unlink()
    with pytest.raises(InputError, match=f"the weights file {shards[-1].name} is missing"):
        base_fingerprint(str(directory))


@pytest.mark.parametrize(("quantization", "least"), [("8bit", 0.99), ("4bit", 0.8)])
def test_quantised_base(tmp_path: Path, quantization: str, least: float) -> None:
    directory = save_base(tmp_path / "base", hidden_size=128, intermediate_size=256)
    whole = load_base_model(str(directory), dtype="float32")
    small = load_base_model(str(directory), dtype="float32", quantization=quantization)  # type: ignore[arg-type]
    size = {
        name: sum(p.numel() * p.element_size() for p in base.model.model.layers.parameters())
        for name, base in (("whole", whole), ("small", small))
    }
    assert size["small"] < size["whole"] / 3
    ids = torch.arange(20)[None]
    ours, theirs = (hidden_states(base.model, ids).flatten() for base in (small, whole))
    assert not torch.equal(ours, theirs)
    assert torch.cosine_similarity(ours.float(), theirs.float(), dim=0) > least
    # The heads begin as the base's own lm_head, which stays as it is.
    assert torch.equal(small.model.lm_head.weight, whole.model.lm_head.weight)
