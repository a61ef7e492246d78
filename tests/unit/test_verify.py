"""Each trap of the formats, planted in a good export, is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa_train.errors import InputError
from medusa_train.export.verify import Verification
from medusa_train.export.vllm import OTHER_METHODS
from medusa_train.heads.checkpoint import load_heads, save_heads
from medusa_train.verifying import verify_directory
from tests.exports_for_tests import TARGETS, base_directory, copy_of_export, export, heads_directory

Change = Callable[[Path], None]

A_FILE, B_FILE, PICKLE = "medusa_lm_head.safetensors", "model.safetensors", "medusa_lm_head.pt"


def config(**changes: Any) -> Change:
    """Set keys of config.json, behind the others; None removes one."""

    def change(directory: Path) -> None:
        path = directory / "config.json"
        value = json.loads(path.read_text())
        for key, new in changes.items():
            value.pop(key, None)
            if new is not None:
                value[key] = new
        path.write_text(json.dumps(value))

    return change


def drop(file: str, *names: str) -> Change:
    """Take tensors out of a file."""
    return _edit(file, lambda tensors: [tensors.pop(name) for name in names])


def put(file: str, **tensors: torch.Tensor) -> Change:
    """Put tensors into a file; ``_`` stands for the dot in their names."""
    renamed = {name.replace("_dot_", "."): value for name, value in tensors.items()}
    return _edit(file, lambda old: old.update(renamed))


def _edit(file: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def edit(directory: Path) -> None:
        path = directory / file
        if file.endswith(".pt"):
            tensors = torch.load(path, weights_only=True)
            change(tensors)
            torch.save(tensors, path)
        else:
            tensors = load_file(path)
            change(tensors)
            save_file(tensors, path)

    return edit


def rename(old: str, new: str) -> Change:
    return lambda directory: (directory / old).rename(directory / new)  # type: ignore[return-value]


def remove(name: str) -> Change:
    return lambda directory: (directory / name).unlink()


def write(name: str, text: str) -> Change:
    return lambda directory: (directory / name).write_text(text)  # type: ignore[return-value]


def _check(
    target: str, tmp_path: Path, change: Change | None, *, heads: Path, **options: Any
) -> Verification:
    output = tmp_path / "out"
    if not output.exists():
        copy_of_export(target, heads, output, min_version=options.pop("exported_for", None))
    if change is not None:
        change(output)
    return verify_directory(target, output, heads=heads, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("target", TARGETS)
def test_a_good_export_has_no_error(tmp_path: Path, target: str) -> None:
    result = _check(target, tmp_path, None, heads=heads_directory())
    assert result.errors == ()
    assert result.is_compared


ROWS = torch.zeros(452, 32)

VLLM: list[tuple[Change, str]] = [
    (config(medusa_fc_bias=None), "medusa_fc_bias is not in config.json: vLLM drops the biases"),
    (config(medusa_fc_bias=False), "medusa_fc_bias is false: vLLM drops the biases"),
    (config(hidden_size=None), "no hidden_size: vLLM takes 4096, but the tensors have 32"),
    (config(vocab_size=None), "no vocab_size: vLLM takes 32001, but the tensors have 453"),
    (config(num_heads=None), "no num_heads: vLLM takes 5, but the tensors have 3"),
    (
        config(num_attention_heads=4),
        "takes num_heads = 4 from 'num_attention_heads' (of all keys with 'num' and 'heads' the "
        "last one wins), but the tensors have 3",
    ),
    (config(num_key_value_heads=2), "takes num_heads = 2 from 'num_key_value_heads'"),
    (config(base_num_hidden_layers=2), "takes num_hidden_layers = 2 from 'base_num_hidden_layers'"),
    (
        config(original_lm_head=True),
        "lm_heads.1.weight, lm_heads.2.weight: vLLM ignores such names",
    ),
    (config(truncated_vocab_size=9), "truncated_vocab_size is below vocab_size, but there is no"),
    (config(model_type="llama"), "model_type 'llama': vLLM takes the directory for that model"),
    (config(model_type=None), "no model_type: vLLM does not know the directory as Medusa"),
    (config(vocab_size=452), "truncated_vocab_size is 453, more than vocab_size"),
    (config(vocab_size=452, truncated_vocab_size=None), "but vLLM builds [452, 32]"),
    (
        drop(B_FILE, "lm_heads.1.weight"),
        "lm_heads.1.weight is missing: vLLM does not report it, and the lm_head of that head would "
        "keep random values",
    ),
    (drop(B_FILE, "blocks.1.layers.0.weight"), "vLLM fails while it loads"),
    (put(B_FILE, extra=torch.zeros(1)), "extra: vLLM ignores such names without a word"),
    (put(B_FILE, lm_heads_dot_2_dot_weight=ROWS), "shape [452, 32], but vLLM builds [453, 32]"),
    (rename(B_FILE, "weights.gguf"), "there is no weights file"),
    (
        put(B_FILE, blocks_dot_0_dot_layers_dot_0_dot_bias=torch.ones(32)),
        "the logits of head 1 are not those of the heads",
    ),
]


@pytest.mark.parametrize(("change", "message"), VLLM)
def test_vllm(tmp_path: Path, change: Change, message: str) -> None:
    result = _check("vllm", tmp_path, change, heads=heads_directory())
    assert any(message in error for error in result.errors), result.errors


SHARED_VLLM: list[tuple[Change, str]] = [
    (drop(B_FILE, "lm_head.weight"), "vLLM never borrows the target's, and does not report it"),
    (config(original_lm_head=False), "token_map works only with original_lm_head: true"),
    (
        config(truncated_vocab_size=None),
        "vLLM ignores the map, and rows stand for the wrong tokens",
    ),
    (drop(B_FILE, "token_map"), "truncated_vocab_size is below vocab_size, but there is no"),
    (
        put(B_FILE, token_map=torch.arange(13)),
        "the tokens of the truncated vocabulary are not those of the heads",
    ),
    (put(B_FILE, lm_head_dot_weight=torch.ones(13, 32)), "logits of head 1 are not those"),
]


@pytest.mark.parametrize(("change", "message"), SHARED_VLLM)
def test_vllm_with_one_lm_head(tmp_path: Path, change: Change, message: str) -> None:
    heads = heads_directory(layout="shared", truncated=True)
    result = _check("vllm", tmp_path, change, heads=heads)
    assert any(message in error for error in result.errors), result.errors


def test_vllms_versions_requests_and_names(tmp_path: Path) -> None:
    heads = heads_directory()
    first = {"heads": heads, "exported_for": "0.25"}
    assert _check("vllm", tmp_path, None, min_version="0.25", **first).is_good  # type: ignore[arg-type]
    old = _check("vllm", tmp_path, None, min_version="0.24", heads=heads)
    assert any("which vLLM before 0.25 ignores" in error for error in old.errors)
    new = _check("vllm", tmp_path, None, min_version="0.33", heads=heads)
    assert any("0.33 removed Medusa" in error for error in new.errors)
    many = _check("vllm", tmp_path, None, num_speculative_tokens=5, heads=heads)
    assert "5 speculative tokens are asked for, but there are 3 heads" in many.errors
    for name in OTHER_METHODS:
        directory = tmp_path / f"my-{name}-heads"
        shutil.copytree(tmp_path / "out", directory)
        named = verify_directory("vllm", directory)
        assert any(f"contains '{name}'" in error for error in named.errors), name


def test_vllm_reads_every_safetensors_file(tmp_path: Path) -> None:
    """Two conventions in one directory, whose heads differ."""
    heads = heads_directory()

    def second(directory: Path) -> None:
        other = load_file(directory / B_FILE)
        names = {
            "0.0.linear.weight": other["blocks.0.layers.0.weight"] + 1,
            "0.0.linear.bias": other["blocks.0.layers.0.bias"],
        }
        save_file(names, directory / A_FILE)

    result = _check("vllm", tmp_path, second, heads=heads)
    assert set(result.files) == {A_FILE, B_FILE}
    assert any("is there several times with other values" in e for e in result.errors), (
        result.errors
    )


def test_a_base_with_other_rows_is_named(tmp_path: Path) -> None:
    _check("vllm", tmp_path, None, heads=heads_directory())
    base = tmp_path / "base"
    shutil.copytree(base_directory(), base)
    config(vocab_size=500)(base)
    result = verify_directory("vllm", tmp_path / "out", base_model=str(base))
    assert any("but the base's is 500: they must be equal" in e for e in result.errors)


TGI: list[tuple[Change, str]] = [
    (config(architectures=["MedusaModel"]), "architectures: TGI turns speculation off"),
    (config(model_type="medusa"), "model_type: TGI then needs the base's tokenizer"),
    (config(base_model_name_or_path=None), "TGI does not find the base"),
    (config(medusa_num_heads=None), "no medusa_num_heads: TGI does not load without it"),
    (
        drop(A_FILE, "1.1.weight"),
        "1.1.weight is missing: TGI falls back to the base's lm_head for all heads, and their own "
        "matrices (0.1.weight, …) are not used",
    ),
    (config(medusa_num_layers=2), "TGI falls back to the base's lm_head for all heads"),
    (config(medusa_num_heads=2), "2.0.linear.bias, 2.0.linear.weight, 2.1.weight: TGI ignores"),
    (rename(A_FILE, B_FILE), "there is no medusa_lm_head.safetensors: TGI reads no other file"),
]


@pytest.mark.parametrize(("change", "message"), TGI)
def test_tgi(tmp_path: Path, change: Change, message: str) -> None:
    result = _check("tgi", tmp_path, change, heads=heads_directory())
    assert any(message in error for error in result.errors), result.errors


def test_tgis_shared_form_has_one_layer(tmp_path: Path) -> None:
    heads = heads_directory(layout="shared")
    result = _check("tgi", tmp_path, config(medusa_num_layers=2), heads=heads)
    assert any("TGI has that form with one layer alone" in error for error in result.errors)
    fewer = tmp_path / "fewer"
    export("tgi", heads_directory(), fewer, num_speculative_tokens=2)
    assert verify_directory("tgi", fewer, num_speculative_tokens=2).is_good
    many = verify_directory("tgi", fewer, num_speculative_tokens=4)
    assert "4 speculative tokens are asked for, but there are 3 heads" in many.errors


FASTERDECODING: list[tuple[Change, str]] = [
    (remove(PICKLE), "there is no medusa_lm_head.pt: the engine reads no other file"),
    (
        drop(PICKLE, "0.1.weight"),
        "0.1.weight is missing: the engine does not report it, and that part of the head keeps",
    ),
    (put(PICKLE, token_map=torch.arange(3)), "token_map: the engine ignores such tensors"),
    (config(base_model_name_or_path=None), "the engine takes lmsys/vicuna-7b-v1.3"),
    (write("medusa_choices.json", "[[0], [0, 10]]"), "rank 10, but the engine lists 10 tokens"),
    (write("medusa_choices.json", "[[0, 0]]"), "[0, 0] is there without its prefix [0]"),
    (write("medusa_choices.json", "[[0], [0,0], [0,0,0], [0,0,0,0]]"), "but there are 3 heads"),
    (write("medusa_choices.json", "[0]"), "must be a list of lists of ranks"),
]


@pytest.mark.parametrize(("change", "message"), FASTERDECODING)
def test_fasterdecoding(tmp_path: Path, change: Change, message: str) -> None:
    result = _check("fasterdecoding", tmp_path, change, heads=heads_directory())
    assert any(message in error for error in result.errors), result.errors


def test_fasterdecoding_builds_five_heads_and_one_block(tmp_path: Path) -> None:
    result = _check("fasterdecoding", tmp_path, None, heads=heads_directory())
    texts = [f.text for f in result.findings if f.severity == "warning"]
    assert any("always builds 5 heads: those after head 3 keep random values" in t for t in texts)
    eight = tmp_path / "eight"
    export("tensorrt-llm", heads_directory(num_heads=8), eight)
    found = verify_directory("fasterdecoding", eight)
    assert any("there are 8 heads, but the engine builds 5" in error for error in found.errors)
    two = tmp_path / "two"
    export("tensorrt-llm", heads_directory(num_layers=2), two)
    found = verify_directory("fasterdecoding", two)
    assert any("one ResBlock and uses it for all layers" in error for error in found.errors)
    base = base_directory("qwen2")
    found = verify_directory("fasterdecoding", tmp_path / "out", base_model=str(base))
    assert any("has Llama and Mistral alone" in error for error in found.errors)


TENSORRT: list[tuple[Change, str]] = [
    (put(PICKLE, **{"0_dot_0_dot_linear_dot_bias": torch.ones(32)}), "differ: the converter reads"),
    (config(medusa_num_heads=None), "no medusa_num_heads: TensorRT-LLM takes 4"),
    (config(medusa_num_layers=2), "0.1.linear.weight is missing: the converter fails"),
    (config(medusa_num_heads=2), "2.1.weight: the converter ignores such tensors"),
    (
        write("medusa_choices.json", json.dumps([[rank] for rank in range(64)])),
        "has 64 nodes, but the engine takes 63 at most",
    ),
]


@pytest.mark.parametrize(("change", "message"), TENSORRT)
def test_tensorrt_llm(tmp_path: Path, change: Change, message: str) -> None:
    result = _check("tensorrt-llm", tmp_path, change, heads=heads_directory())
    assert any(message in error for error in result.errors), result.errors


def test_tensorrt_llm_has_no_shared_form(tmp_path: Path) -> None:
    export("tgi", heads_directory(layout="shared"), tmp_path / "out")
    result = verify_directory("tensorrt-llm", tmp_path / "out")
    assert any("0.1.weight is missing: the converter fails" in error for error in result.errors)


MLC: list[tuple[Change, str]] = [
    (config(model_type="llama"), "model_type 'llama': MLC-LLM knows Medusa by 'medusa'"),
    (config(hidden_size=None), "no hidden_size: MLC-LLM does not load without it"),
    (drop(B_FILE, "medusa_head.2.1.weight"), "medusa_head.2.1.weight is missing"),
    (put(B_FILE, other=torch.zeros(1)), "other: MLC-LLM leaves such tensors out"),
    (config(vocab_size=450), "shape [453, 32], but MLC-LLM builds [450, 32]"),
    (rename(B_FILE, A_FILE), "there is no model.safetensors: MLC-LLM finds no weights"),
]


@pytest.mark.parametrize(("change", "message"), MLC)
def test_mlc(tmp_path: Path, change: Change, message: str) -> None:
    result = _check("mlc", tmp_path, change, heads=heads_directory())
    assert any(message in error for error in result.errors), result.errors


def test_mlc_drafts_with_all_heads(tmp_path: Path) -> None:
    result = _check("mlc", tmp_path, None, heads=heads_directory(), num_speculative_tokens=2)
    assert "the draft length is 2, but MLC-LLM needs that of all 3 heads" in result.errors


NXD: list[tuple[Change, str]] = [
    (remove("medusa_heads.pt"), "there is no medusa_heads.pt"),
    (put("medusa_heads.pt", medusa_head_0_dot_2_dot_weight=ROWS), "the engine has heads of one"),
    (drop("medusa_heads.pt", "medusa_head_1.1.weight"), "that part keeps random values"),
]


@pytest.mark.parametrize(("change", "message"), NXD)
def test_nxd(tmp_path: Path, change: Change, message: str) -> None:
    result = _check("nxd", tmp_path, change, heads=heads_directory())
    assert any(message in error for error in result.errors), result.errors


def _leave_a_single_file(directory: Path) -> None:
    """What a base's own file does beside an index: transformers reads it alone."""
    shutil.copyfile(base_directory() / B_FILE, directory / B_FILE)


COMBINED: list[tuple[Change, str]] = [
    (_leave_a_single_file, "has heads in it, but the engine reads model.safetensors"),
    (config(medusa_num_heads=None), "no medusa_num_heads"),
    (config(model_type="qwen2"), "has Llama and Mistral alone"),
    (remove("model.safetensors.index.json"), "there is neither model.safetensors nor"),
    (
        drop("model-00002-of-00002.safetensors", "medusa_head.0.1.weight"),
        "medusa_head.0.1.weight is missing",
    ),
]


@pytest.mark.parametrize(("change", "message"), COMBINED)
def test_combined(tmp_path: Path, change: Change, message: str) -> None:
    result = _check("combined", tmp_path, change, heads=heads_directory())
    assert any(message in error for error in result.errors), result.errors


@pytest.mark.parametrize("target", ["tgi", "vllm", "tensorrt-llm"])
def test_base_and_heads_in_one_directory_fail_elsewhere(tmp_path: Path, target: str) -> None:
    export("combined", heads_directory(), tmp_path / "out")
    assert verify_directory(target, tmp_path / "out").errors  # type: ignore[arg-type]


TRANSFORMERS: list[tuple[Change, str]] = [
    (remove("medusa_generate.json"), "there is no medusa_generate.json"),
    (write("medusa_generate.json", '{"tree": [[0, 0]]}'), "its prefix [0] is not in the tree"),
    (drop(A_FILE, "0.1.weight"), "missing tensor '0.1.weight'"),
]


@pytest.mark.parametrize(("change", "message"), TRANSFORMERS)
def test_transformers(tmp_path: Path, change: Change, message: str) -> None:
    result = _check("transformers", tmp_path, change, heads=heads_directory())
    assert any(message in error for error in result.errors), result.errors


def test_heads_of_another_shape_are_named(tmp_path: Path) -> None:
    export("tgi", heads_directory(), tmp_path / "out")
    more = verify_directory("tgi", tmp_path / "out", heads=heads_directory(num_heads=5))
    assert "TGI gets 3 heads, but there are 5" in more.errors
    part = verify_directory(
        "tgi", tmp_path / "out", heads=heads_directory(num_heads=5), num_heads=3
    )
    assert part.is_compared
    shared = verify_directory("tgi", tmp_path / "out", heads=heads_directory(layout="shared"))
    assert shared.is_compared
    with pytest.raises(InputError, match="--num-heads: is for comparing"):
        verify_directory("tgi", tmp_path / "out", num_heads=3)


def test_heads_that_are_not_the_exported_ones(tmp_path: Path) -> None:
    heads, identity = load_heads(heads_directory())
    with torch.no_grad():
        heads.block(1, layer=0).linear.bias[0] += 0.01
    save_heads(heads, tmp_path / "other", base=identity)
    export("tgi", heads_directory(), tmp_path / "out")
    result = verify_directory("tgi", tmp_path / "out", heads=tmp_path / "other")
    assert len(result.errors) == 1
    assert "the logits of head 2 are not those of the heads" in result.errors[0]
