"""Heads of every form come back bit for bit, and what is not clear is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa_train.errors import InputError, InputErrors
from medusa_train.heads.checkpoint import load_heads, save_heads
from medusa_train.importing import import_heads
from tests.exports_for_tests import (
    TARGETS,
    base_directory,
    base_lm_head,
    export,
    heads_directory,
)

A_FILE, PICKLE = "medusa_lm_head.safetensors", "medusa_lm_head.pt"


def _same(first: Path, second: Path) -> None:
    ours, base = load_heads(first)
    theirs, other_base = load_heads(second)
    assert ours.config == theirs.config
    assert base.fingerprint == other_base.fingerprint
    wanted = ours.state_dict()
    got = theirs.state_dict()
    assert wanted.keys() == got.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"num_layers": 2},
        {"num_heads": 1, "tied": True},
        {"num_heads": 5},
        {"layout": "shared"},
        {"layout": "shared", "truncated": True, "tied": True},
        {"layout": "shared", "num_layers": 2},
    ],
)
def test_every_form_comes_back_bit_for_bit(
    tmp_path: Path, target: str, shape: dict[str, object]
) -> None:
    heads = heads_directory(**shape)  # type: ignore[arg-type]
    try:
        export(target, heads, tmp_path / "out")
    except InputError as error:
        assert "cannot load these heads" in str(error)  # noqa: PT017 — the others are tested apart
        return
    import_heads(
        tmp_path / "out",
        tmp_path / "back",
        base_model=str(base_directory(tied=bool(shape.get("tied", False)))),
    )
    _same(heads, tmp_path / "back")


def test_bf16_comes_back_in_bf16(tmp_path: Path) -> None:
    export("vllm", heads_directory(), tmp_path / "one", dtype="bfloat16")
    import_heads(tmp_path / "one", tmp_path / "back")
    export("nxd", tmp_path / "back", tmp_path / "two")
    base = str(base_directory())
    import_heads(tmp_path / "two", tmp_path / "again", base_model=base)
    _same(tmp_path / "back", tmp_path / "again")
    heads, _ = load_heads(tmp_path / "again")
    assert {p.dtype for p in heads.parameters()} == {torch.bfloat16}


def test_vllms_form_with_fasterdecodings_names_is_shared(tmp_path: Path) -> None:
    heads = heads_directory(layout="shared")
    export("vllm", heads, tmp_path / "out", min_version="0.25")
    import_heads(tmp_path / "out", tmp_path / "back")
    _same(heads, tmp_path / "back")


@pytest.mark.parametrize("layout", ["full", "shared"])
def test_a_folded_scale_is_taken_out_again(tmp_path: Path, layout: str) -> None:
    heads = heads_directory(architecture="cohere", layout=layout)
    export("vllm", heads, tmp_path / "out")
    import_heads(tmp_path / "out", tmp_path / "back")
    _same(heads, tmp_path / "back")


def test_a_tree_comes_along(tmp_path: Path) -> None:
    tree = tmp_path / "tree.json"
    tree.write_text("[[0], [1], [0, 0]]")
    export("fasterdecoding", heads_directory(), tmp_path / "out", tree_file=tree)
    import_heads(tmp_path / "out", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "medusa_choices.json").read_text()) == [[0], [1], [0, 0]]
    assert (tmp_path / "back" / "tokenizer.json").exists()
    (tmp_path / "out" / "medusa_choices.json").write_text("[[0], [0,0], [0,0,0], [0,0,0,0]]")
    with pytest.raises(InputError, match="has depth 4, but there are 3 heads; give a tree that"):
        import_heads(tmp_path / "out", tmp_path / "other")


def test_heads_in_the_bases_directory(tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(base_directory(), base)
    export("nxd", heads_directory(), base)
    result = import_heads(base, tmp_path / "back")
    assert result.convention == "nxd"
    _same(heads_directory(), tmp_path / "back")


def test_files_of_the_original_implementation(tmp_path: Path) -> None:
    """A config of transformers that speaks of two heads where there are five, beside the pickle."""
    export("fasterdecoding", heads_directory(num_heads=5), tmp_path / "out")
    (tmp_path / "out" / A_FILE).unlink()
    config = {
        "base_model_name_or_path": str(base_directory()),
        "medusa_num_heads": 2,
        "medusa_num_layers": 1,
        "transformers_version": "4.31.0",
    }
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputErrors) as failure:
        import_heads(tmp_path / "out", tmp_path / "back")
    assert list(failure.value.lines) == [
        f"{tmp_path}/out/config.json: medusa_num_heads is 2, but the tensors have 5 heads; "
        "--trust-tensors takes the tensors"
    ]
    import_heads(tmp_path / "out", tmp_path / "back", trust_tensors=True)
    _same(heads_directory(num_heads=5), tmp_path / "back")


def test_all_contradictions_are_named(tmp_path: Path) -> None:
    export("vllm", heads_directory(), tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    config |= {
        "num_heads": 4,
        "num_hidden_layers": 2,
        "hidden_size": 31,
        "vocab_size": 452,
        "medusa_fc_bias": False,
        "original_lm_head": True,
    }
    path.write_text(json.dumps(config))
    with pytest.raises(InputErrors) as failure:
        import_heads(tmp_path / "out", tmp_path / "back")
    texts = "\n".join(failure.value.lines)
    for text in (
        "num_heads is 4, but the tensors have 3 heads",
        "num_hidden_layers is 2, but the tensors have 1 layers",
        "hidden_size is 31, but the tensors have 32",
        "vocab_size is 452, but the tensors have 453 rows",
        "medusa_fc_bias is false, but the tensors have biases",
        "original_lm_head is true, but each head has a matrix of its own",
    ):
        assert text in texts
    import_heads(tmp_path / "out", tmp_path / "back", trust_tensors=True)
    _same(heads_directory(), tmp_path / "back")


def test_several_conventions_in_one_directory(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export("tensorrt-llm", heads_directory(), out)
    export("vllm", heads_directory(), tmp_path / "vllm")
    shutil.copyfile(tmp_path / "vllm" / "model.safetensors", out / "model.safetensors")
    result = import_heads(out, tmp_path / "back")
    assert result.convention == "fasterdecoding"
    _same(heads_directory(), tmp_path / "back")
    tensors = load_file(out / "model.safetensors")
    tensors["blocks.1.layers.0.bias"] += 1
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(InputError, match=r"hold heads that differ \(1\.0\.linear\.bias\)"):
        import_heads(out, tmp_path / "other")
    import_heads(out, tmp_path / "other", file=PICKLE)
    _same(heads_directory(), tmp_path / "other")


@pytest.mark.parametrize("target", ["tgi", "tensorrt-llm", "vllm", "mlc", "nxd"])
def test_a_tensor_too_many_or_too_few_is_an_error(tmp_path: Path, target: str) -> None:
    files = {
        "tgi": A_FILE,
        "tensorrt-llm": PICKLE,
        "vllm": "model.safetensors",
        "mlc": "model.safetensors",
        "nxd": "medusa_heads.pt",
    }
    surplus = {
        "tgi": "0.2.weight",
        "tensorrt-llm": "0.2.weight",
        "vllm": "lm_heads.3.weight",
        "mlc": "medusa_head.0.2.weight",
        "nxd": "medusa_head_0.2.weight",
    }
    export(target, heads_directory(), tmp_path / "out")
    path = tmp_path / "out" / files[target]
    is_pickle = path.suffix == ".pt"
    whole = torch.load(path, weights_only=True) if is_pickle else load_file(path)

    def refused(tensors: dict[str, torch.Tensor], message: str) -> None:
        if is_pickle:
            torch.save(tensors, path)
        else:
            save_file(tensors, path)
        with pytest.raises(InputErrors, match=message):
            import_heads(
                path.parent,
                tmp_path / "back",
                base_model=str(base_directory()),
                trust_tensors=True,
                file=path.name,
            )
        assert not (tmp_path / "back").exists()

    refused({**whole, surplus[target]: torch.zeros(453, 32)}, "surplus tensor")
    last = sorted(whole)[-1]
    refused({name: value for name, value in whole.items() if name != last}, "missing tensor")
    refused({**whole, last: torch.zeros(3, 32)}, "shape .* but the others say")


def test_names_of_something_else(tmp_path: Path) -> None:
    export("tgi", heads_directory(), tmp_path / "out")
    tensors = load_file(tmp_path / "out" / A_FILE)
    save_file({**tensors, "optimizer.step": torch.zeros(1)}, tmp_path / "out" / A_FILE)
    with pytest.raises(InputError, match=r"optimizer\.step: no tensor of heads by the names of"):
        import_heads(tmp_path / "out", tmp_path / "back")
    with pytest.raises(InputError, match="no heads in it"):
        import_heads(base_directory(), tmp_path / "back", base_model=str(base_directory()))


def test_blocks_without_biases_get_zeros(tmp_path: Path) -> None:
    export("vllm", heads_directory(), tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    save_file({n: t for n, t in load_file(path).items() if not n.endswith(".bias")}, path)
    config = json.loads((path.parent / "config.json").read_text())
    (path.parent / "config.json").write_text(json.dumps({**config, "medusa_fc_bias": False}))
    import_heads(tmp_path / "out", tmp_path / "back")
    heads, _ = load_heads(tmp_path / "back")
    assert not any(bool(t.any()) for n, t in heads.named_parameters() if n.endswith("bias"))


def test_a_token_map_in_another_order(tmp_path: Path) -> None:
    heads = heads_directory(layout="shared", truncated=True)
    export("vllm", heads, tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    order = torch.randperm(13, generator=torch.Generator().manual_seed(0))
    for name in ("token_map", "lm_head.weight"):
        tensors[name] = tensors[name][order].contiguous()
    save_file(tensors, path)
    import_heads(tmp_path / "out", tmp_path / "back")
    _same(heads, tmp_path / "back")


def test_layouts_change_where_nothing_is_lost(tmp_path: Path) -> None:
    export("tgi", heads_directory(layout="shared"), tmp_path / "out")
    import_heads(tmp_path / "out", tmp_path / "full", layout="full")
    heads, _ = load_heads(tmp_path / "full")
    for head in range(3):
        assert torch.equal(
            heads.output_weight(head, lm_head_weight=None)[0], base_lm_head(base_directory())
        )
    export("tgi", tmp_path / "full", tmp_path / "full-out")
    import_heads(tmp_path / "full-out", tmp_path / "shared", layout="shared")
    _same(heads_directory(layout="shared"), tmp_path / "shared")
    export("mlc", heads_directory(), tmp_path / "trained")
    with pytest.raises(InputError, match="lm_head of head 1 was trained and is not the base's"):
        import_heads(tmp_path / "trained", tmp_path / "other", layout="shared")


def test_an_lm_head_that_is_not_the_bases(tmp_path: Path) -> None:
    """Shared heads with a trained matrix: it would be lost, and may be kept in each head."""
    export("vllm", heads_directory(layout="shared"), tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] += 1
    save_file(tensors, path)
    with pytest.raises(InputError, match="its lm_head is not the base's, so it would be lost"):
        import_heads(tmp_path / "out", tmp_path / "back")
    import_heads(tmp_path / "out", tmp_path / "back", layout="full")
    heads, _ = load_heads(tmp_path / "back")
    assert torch.equal(heads.output_weight(2, lm_head_weight=None)[0], tensors["lm_head.weight"])


def test_bases_that_do_not_fit(tmp_path: Path) -> None:
    export("nxd", heads_directory(), tmp_path / "out")
    with pytest.raises(InputError, match="names no base model; give it with --base-model"):
        import_heads(tmp_path / "out", tmp_path / "back")
    with pytest.raises(InputError, match=r"no such directory.*--base-model says where"):
        import_heads(tmp_path / "out", tmp_path / "back", base_model=str(tmp_path / "absent"))
    other = tmp_path / "other"
    from tests.models_for_tests import save_base

    save_base(other, hidden_size=64)
    with pytest.raises(InputError, match=r"heads for 32 hidden size, but .* has 64"):
        import_heads(tmp_path / "out", tmp_path / "back", base_model=str(other))


def test_a_heads_directory_is_not_written_over(tmp_path: Path) -> None:
    export("tgi", heads_directory(), tmp_path / "out")
    heads, identity = load_heads(heads_directory())
    save_heads(heads, tmp_path / "back", base=identity)
    with pytest.raises(InputError, match="is there already; give another directory or remove it"):
        import_heads(tmp_path / "out", tmp_path / "back")
