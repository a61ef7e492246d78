"""Every export gives its engine the heads that it was made from, or is refused with a reason."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from medusa_train.errors import InputError, MedusaTrainError
from medusa_train.heads.checkpoint import load_heads, read_spec, save_heads
from medusa_train.verifying import verify_directory
from tests.exports_for_tests import (
    TARGETS,
    base_directory,
    base_lm_head,
    export,
    heads_directory,
)

SHAPES = list(product((1, 3, 5), (1, 2), ("full", "shared"), (False, True), (False, True)))


def _reason(target: str, *, num_layers: int, layout: str, truncated: bool) -> str | None:
    """Why an engine does not load such heads (of a Llama base); None where it does."""
    if target == "transformers":
        return None
    if target == "vllm":
        return "token_map works with the shared lm_head alone" if _own(layout, truncated) else None
    if truncated:
        return "takes row i of a head for token i"
    if target == "tgi":
        alone = layout == "shared" and num_layers == 2
        return "shared form has one (medusa_num_layers)" if alone else None
    if layout == "shared":
        return "reads one of each head; give --layout full"
    if num_layers == 2 and target in {"fasterdecoding", "combined"}:
        return "makes one ResBlock and uses it for all layers"
    if num_layers == 2 and target == "nxd":
        return "they have 2 layers each, but the engine's heads have one"
    return None


def _own(layout: str, truncated: bool) -> bool:
    return layout == "full" and truncated


@pytest.mark.parametrize("target", TARGETS)
def test_an_export_verifies_or_is_refused_with_the_engines_reason(
    target: str, tmp_path: Path
) -> None:
    outcomes = set()
    for number, (num_heads, num_layers, layout, truncated, tied) in enumerate(SHAPES):
        heads = heads_directory(
            num_heads=num_heads,
            num_layers=num_layers,
            layout=layout,
            truncated=truncated,
            tied=tied,
        )
        output = tmp_path / str(number)
        reason = _reason(target, num_layers=num_layers, layout=layout, truncated=truncated)
        outcomes.add(reason is None)
        if reason is not None:
            with pytest.raises(InputError) as failure:
                export(target, heads, output)
            assert reason in str(failure.value)
            assert not output.exists()
            continue
        result = export(target, heads, output)
        assert result.verification.is_good
        assert result.verification.is_compared
        assert "README.md" in result.files
        assert sorted(result.files) == sorted(
            str(p.relative_to(output)) for p in output.rglob("*") if p.is_file()
        )
    assert True in outcomes


def _filled(directory: Path, *, num_heads: int, base: Path) -> Path:
    """A copy of heads with every bias at 3."""
    heads, identity = load_heads(
        heads_directory(num_heads=num_heads, tied=base == base_directory(tied=True))
    )
    with torch.no_grad():
        for name, parameter in heads.named_parameters():
            if name.endswith("linear.bias"):
                parameter.fill_(3.0)
    save_heads(heads, directory, base=identity)
    return directory


@pytest.mark.parametrize("tied", [False, True])
def test_vllms_form_keeps_biases_and_counts(tmp_path: Path, tied: bool) -> None:
    """Its forward written out here, from the file's own names; the base has 4 attention heads."""
    base = base_directory(tied=tied)
    assert json.loads((base / "config.json").read_text())["num_attention_heads"] == 4
    heads = _filled(tmp_path / "heads", num_heads=3, base=base)
    export("vllm", heads, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    counts = {k: v for k, v in config.items() if "num" in k}
    assert counts == {"num_heads": 3, "num_hidden_layers": 1}
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert len(tensors) == 9
    states = torch.randn(5, 32)
    loaded, _ = load_heads(heads)
    expected = loaded.logits(states, lm_head_weight=base_lm_head(base))
    for head in range(3):
        bias = tensors[f"blocks.{head}.layers.0.bias"]
        assert bool((bias == 3.0).all())
        block = F.linear(states, tensors[f"blocks.{head}.layers.0.weight"], bias)
        logits = (states + F.silu(block)) @ tensors[f"lm_heads.{head}.weight"].T
        torch.testing.assert_close(logits, expected[head], rtol=1e-5, atol=1e-5)


def test_vllms_shared_form_brings_the_lm_head_and_the_token_map(tmp_path: Path) -> None:
    heads = heads_directory(layout="shared", truncated=True, tied=True)
    export("vllm", heads, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    token_map = tensors["token_map"]
    assert token_map.dtype == torch.int64
    assert config["original_lm_head"] is True
    assert config["truncated_vocab_size"] == len(token_map) == 13
    assert torch.equal(
        tensors["lm_head.weight"], base_lm_head(base_directory(tied=True))[token_map]
    )


def test_more_speculative_tokens_than_heads_are_refused(tmp_path: Path) -> None:
    for target in ("vllm", "tgi", "mlc"):
        with pytest.raises(InputError, match=r"--num-speculative-tokens: must be from 1 to 3.*5"):
            export(target, heads_directory(), tmp_path / "out", num_speculative_tokens=5)
    with pytest.raises(InputError, match="it must be 3; got 2: give --num-heads 2 instead"):
        export("mlc", heads_directory(), tmp_path / "out", num_speculative_tokens=2)
    result = export("vllm", heads_directory(), tmp_path / "out", num_speculative_tokens=2)
    assert '"num_speculative_tokens": 2' in result.start
    with pytest.raises(InputError, match="nxd takes a tree; give --tree instead"):
        export("nxd", heads_directory(), tmp_path / "other", num_speculative_tokens=2)


@pytest.mark.parametrize(
    ("version", "layout", "num_heads", "file"),
    [
        (None, "full", 3, "model.safetensors"),
        ("0.24", "full", 3, "model.safetensors"),
        ("0.25", "full", 3, "medusa_lm_head.safetensors"),
        ("v0.32.0", "shared", 3, "medusa_lm_head.safetensors"),
        ("0.32", "shared", 1, "model.safetensors"),
    ],
)
def test_vllm_gets_fasterdecodings_names_where_they_suffice(
    tmp_path: Path, version: str | None, layout: str, num_heads: int, file: str
) -> None:
    heads = heads_directory(layout=layout, num_heads=num_heads)
    result = export("vllm", heads, tmp_path / "out", min_version=version)
    assert file in result.files
    if layout == "shared" and file.startswith("medusa"):
        tensors = load_file(tmp_path / "out" / file)
        assert torch.equal(tensors["0.1.weight"], base_lm_head(base_directory()))
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config["original_lm_head"] is True


def test_versions_and_names_that_vllm_does_not_take(tmp_path: Path) -> None:
    heads = heads_directory()
    with pytest.raises(InputError, match=r"vLLM 0\.33 removed Medusa; got 0\.33"):
        export("vllm", heads, tmp_path / "out", min_version="0.33")
    with pytest.raises(InputError, match=r"must be a version such as 0\.25, got 'new'"):
        export("vllm", heads, tmp_path / "out", min_version="new")
    with pytest.raises(InputError, match="--min-version: is for vllm alone"):
        export("tgi", heads, tmp_path / "out", min_version="0.25")
    with pytest.raises(InputError, match="'eagle-' in its path"):
        export("vllm", heads, tmp_path / "eagle-heads")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("num_heads", [1, 8])
def test_one_head_and_eight(tmp_path: Path, target: str, num_heads: int) -> None:
    heads = heads_directory(num_heads=num_heads)
    if target == "fasterdecoding" and num_heads == 8:
        with pytest.raises(InputError, match="there are 8, but the engine builds 5"):
            export(target, heads, tmp_path / "out")
        result = export(target, heads, tmp_path / "out", num_heads=5)
        assert result.verification.is_compared
        return
    result = export(target, heads, tmp_path / "out")
    assert result.verification.num_heads == (5 if target == "fasterdecoding" else num_heads)


def test_heads_can_be_left_out(tmp_path: Path) -> None:
    export("transformers", heads_directory(), tmp_path / "out", num_heads=2)
    config, _ = read_spec(tmp_path / "out")
    assert config.num_heads == 2
    kept, _ = load_heads(tmp_path / "out")
    whole, _ = load_heads(heads_directory())
    for name, tensor in kept.state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[name])
    with pytest.raises(InputError, match="--num-heads: must be from 1 to 3"):
        export("tgi", heads_directory(), tmp_path / "other", num_heads=4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_of_an_export(tmp_path: Path, dtype: str) -> None:
    export("tgi", heads_directory(), tmp_path / "out", dtype=dtype)
    tensors = load_file(tmp_path / "out" / "medusa_lm_head.safetensors")
    heads, _ = load_heads(heads_directory())
    for name, tensor in heads.state_dict().items():
        assert torch.equal(tensors[name], tensor.to(getattr(torch, dtype)))


def test_values_beyond_a_dtype_are_refused(tmp_path: Path) -> None:
    heads, identity = load_heads(heads_directory())
    with torch.no_grad():
        heads.block(0, layer=0).linear.bias[0] = 1e6
    save_heads(heads, tmp_path / "heads", base=identity)
    message = r"--dtype: 0\.0\.linear\.bias has values that float16 cannot hold"
    with pytest.raises(InputError, match=message):
        export("tgi", tmp_path / "heads", tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("architecture", "scale"), [("cohere", 0.25), ("granite", 0.25), ("llama", 1.0)]
)
@pytest.mark.parametrize("layout", ["full", "shared"])
def test_a_logit_scale_is_folded_in(
    tmp_path: Path, architecture: str, scale: float, layout: str
) -> None:
    heads = heads_directory(architecture=architecture, layout=layout)
    result = export("vllm", heads, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    base = base_directory(architecture)
    if layout == "full":
        own, _ = load_heads(heads)
        weights = [own.output_weight(head, lm_head_weight=None)[0] for head in range(3)]
        pairs = [(tensors[f"lm_heads.{h}.weight"], weights[h]) for h in range(3)]
    else:
        pairs = [(tensors["lm_head.weight"], base_lm_head(base))]
    for got, weight in pairs:
        assert torch.equal(got, weight * scale)
    assert any("logit scale of 0.25" in w for w in result.warnings) == (scale != 1.0)


def test_a_soft_cap_is_left_out_and_said(tmp_path: Path) -> None:
    heads = heads_directory(architecture="gemma2")
    result = export("vllm", heads, tmp_path / "out")
    assert any("soft-caps its logits at 3" in warning for warning in result.warnings)
    assert "Soft-caps" not in (tmp_path / "out" / "README.md").read_text()
    assert "soft-caps its logits at 3" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("target", [t for t in TARGETS if t != "transformers"])
def test_a_biased_lm_head_is_refused(tmp_path: Path, target: str) -> None:
    heads = heads_directory(architecture="phi")
    others = target in {"fasterdecoding", "combined"}
    message = "the base is of the kind 'phi'" if others else "the base's lm_head has a bias"
    with pytest.raises(InputError, match=message):
        export(target, heads, tmp_path / "out")


def test_a_biased_lm_head_decodes_with_transformers(tmp_path: Path) -> None:
    heads = heads_directory(architecture="phi")
    assert export("transformers", heads, tmp_path / "out").verification.is_good


def test_shared_heads_get_copies_of_the_lm_head(tmp_path: Path) -> None:
    heads = heads_directory(layout="shared", tied=True)
    export("mlc", heads, tmp_path / "out", layout="full")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    for head in range(3):
        weight = tensors[f"medusa_head.{head}.1.weight"]
        assert torch.equal(weight, base_lm_head(base_directory(tied=True)))


def test_full_heads_are_shared_only_where_nothing_is_lost(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="lm_head of head 1 was trained and is not the base's"):
        export("tgi", heads_directory(), tmp_path / "out", layout="shared")
    heads, identity = load_heads(heads_directory())
    heads.init_from_base(base_lm_head(base_directory()))
    save_heads(heads, tmp_path / "untrained", base=identity)
    export("tgi", tmp_path / "untrained", tmp_path / "out", layout="shared")
    names = load_file(tmp_path / "out" / "medusa_lm_head.safetensors").keys()
    assert sorted(names) == [f"{h}.0.linear.{p}" for h in range(3) for p in ("bias", "weight")]
    read_back = verify_directory("tgi", tmp_path / "out", heads=tmp_path / "untrained")
    assert read_back.errors == ()
    trained = verify_directory("tgi", tmp_path / "out", heads=heads_directory())
    assert "TGI uses the base's lm_head, but head 1 has its own" in trained.errors


@pytest.mark.parametrize("target", ["fasterdecoding", "tensorrt-llm", "nxd", "combined"])
def test_trees_go_where_the_engine_takes_one(tmp_path: Path, target: str) -> None:
    tree = tmp_path / "tree.json"
    tree.write_text("[[1], [0], [0, 1], [0, 0]]")
    export(target, heads_directory(), tmp_path / "out", tree_file=tree)
    written = json.loads((tmp_path / "out" / "medusa_choices.json").read_text())
    assert written == [[0], [1], [0, 0], [0, 1]]


@pytest.mark.parametrize("target", ["tgi", "vllm", "mlc"])
def test_engines_with_a_chain_alone_say_so(tmp_path: Path, target: str) -> None:
    result = export(target, heads_directory(), tmp_path / "out")
    assert any("runs only the chain" in warning for warning in result.warnings)
    assert "medusa_choices.json" not in result.files
    tree = tmp_path / "tree.json"
    tree.write_text("[[0]]")
    with pytest.raises(InputError, match=f"--tree: {target} runs only a chain"):
        export(target, heads_directory(), tmp_path / "other", tree_file=tree)


def test_trees_that_an_engine_has_no_room_for(tmp_path: Path) -> None:
    tree = tmp_path / "tree.json"
    tree.write_text(json.dumps([[rank] for rank in range(64)]))
    with pytest.raises(InputError, match="takes at most 63 nodes, but the tree has 64"):
        export("tensorrt-llm", heads_directory(), tmp_path / "out", tree_file=tree)
    tree.write_text(json.dumps([[rank] for rank in range(11)]))
    with pytest.raises(InputError, match=r"10 most likely tokens.*but the tree has rank 10"):
        export("fasterdecoding", heads_directory(), tmp_path / "out", tree_file=tree)


def test_the_heads_own_tree_is_cut_with_them(tmp_path: Path) -> None:
    heads, identity = load_heads(heads_directory())
    save_heads(heads, tmp_path / "heads", base=identity)
    (tmp_path / "heads" / "medusa_choices.json").write_text("[[0], [0, 0], [0, 0, 0], [1]]")
    export("nxd", tmp_path / "heads", tmp_path / "out", num_heads=2)
    written = json.loads((tmp_path / "out" / "medusa_choices.json").read_text())
    assert written == [[0], [1], [0, 0]]


def test_nothing_is_written_over(tmp_path: Path) -> None:
    export("tgi", heads_directory(), tmp_path / "out")
    with pytest.raises(InputError, match="is there already; give another directory"):
        export("tgi", heads_directory(), tmp_path / "out")


def test_another_base_is_refused(tmp_path: Path) -> None:
    other = base_directory(tied=True)
    with pytest.raises(InputError, match=r"heads of the base model .* but .* has"):
        export("tgi", heads_directory(), tmp_path / "out", base_model=str(other))
    small = base_directory("gpt_neox")
    with pytest.raises(InputError, match=r"heads of the base model .* but .* has"):
        export("tgi", heads_directory(), tmp_path / "out", base_model=str(small))


def test_an_export_that_reads_back_wrong_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer with a fault: it leaves out the flag of the biases."""
    from medusa_train.export import vllm

    whole = vllm.format_b_config

    def without_flag(heads: object) -> dict[str, object]:
        config = whole(heads)  # type: ignore[arg-type]
        del config["medusa_fc_bias"]
        return config

    monkeypatch.setattr(vllm, "format_b_config", without_flag)
    with pytest.raises(MedusaTrainError, match="not exported: read back as vLLM does") as failure:
        export("vllm", heads_directory(), tmp_path / "out")
    assert failure.value.exit_code == 1
    assert list(tmp_path.iterdir()) == []


def test_readmes_have_the_start_command(tmp_path: Path) -> None:
    wanted = {
        "fasterdecoding": "Medusa@e2a5d20",
        "tgi": "text-generation-launcher --model-id",
        "vllm": "vllm serve",
        "tensorrt-llm": "--max_medusa_token_len 3",
        "mlc": "--speculative-mode medusa",
        "nxd": "--medusa-speculation-length 4",
        "combined": "Medusa@e2a5d20",
        "transformers": "trust_remote_code=True",
    }
    for target in TARGETS:
        output = tmp_path / target
        export(target, heads_directory(), output)
        text = (output / "README.md").read_text()
        assert wanted[target] in text
        assert str(output) in text


def test_exports_beside_the_base_leave_its_files_alone(tmp_path: Path) -> None:
    import shutil

    from tests.models_for_tests import file_hashes

    base = tmp_path / "base"
    shutil.copytree(base_directory(), base)
    (base / "README.md").write_text("the base's own")
    before = file_hashes(base)
    result = export("nxd", heads_directory(), base)
    assert set(result.files) == {"medusa_heads.pt", "medusa_choices.json", "README.medusa.md"}
    after = file_hashes(base)
    assert {name: after[name] for name in before} == before


def _names_and_shapes(tensors: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def test_one_directory_has_base_and_heads(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base = base_directory(tied=True)
    export("combined", heads_directory(tied=True), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (3, 1)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert "medusa_head.0.1.weight" in index["weight_map"]
    before = AutoModelForCausalLM.from_pretrained(base).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert _names_and_shapes(before) == _names_and_shapes(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
