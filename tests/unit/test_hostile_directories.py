"""Directories made to harm: each is refused in plain words, and nothing in it runs."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa_train.errors import InputError
from medusa_train.export.verify import TARGETS
from medusa_train.importing import import_heads
from medusa_train.verifying import verify_directory
from tests.exports_for_tests import base_directory, export, heads_directory

FILES = {
    "fasterdecoding": "medusa_lm_head.pt",
    "tgi": "medusa_lm_head.safetensors",
    "vllm": "model.safetensors",
    "tensorrt-llm": "medusa_lm_head.pt",
    "mlc": "model.safetensors",
    "nxd": "medusa_heads.pt",
    "combined": "model-00002-of-00002.safetensors",
    "transformers": "medusa_lm_head.safetensors",
}


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (self.path,)


def _refused(directory: Path, target: str, message: str) -> None:
    """By verify and by import."""
    with pytest.raises(InputError, match=message):
        verify_directory(target, directory)  # type: ignore[arg-type]
    back = directory.parent / "back"
    with pytest.raises(InputError, match=message):
        import_heads(directory, back, base_model=str(base_directory()))
    assert not back.exists()


@pytest.mark.parametrize("target", ["fasterdecoding", "tensorrt-llm", "nxd"])
@pytest.mark.parametrize("protocol", [2, 5])
def test_a_pickle_with_code(tmp_path: Path, target: str, protocol: int) -> None:
    export(target, heads_directory(), tmp_path / "out")
    path = tmp_path / "out" / FILES[target]
    marker = tmp_path / "it-ran"
    torch.save({"0.0.linear.weight": Bomb(marker)}, path)
    _refused(tmp_path / "out", target, "holds more than tensors")
    path.write_bytes(pickle.dumps({"0.0.linear.weight": Bomb(marker)}, protocol=protocol))
    _refused(tmp_path / "out", target, "holds more than tensors|not a readable file of torch")
    path.write_bytes(b"PK\x03\x04 and no more")
    _refused(tmp_path / "out", target, "holds more than tensors|not a readable file of torch")
    torch.save([torch.zeros(2)], path)
    _refused(tmp_path / "out", target, "must hold tensors by their names")
    assert not marker.exists()


@pytest.mark.parametrize("target", ["combined", "vllm", "mlc"])
@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "sub/../../x"])
def test_an_index_that_leads_out(tmp_path: Path, target: str, name: str) -> None:
    export(target, heads_directory(), tmp_path / "out")
    index = {"weight_map": {"medusa_head.0.0.linear.weight": name}}
    (tmp_path / "out" / "model.safetensors.index.json").write_text(json.dumps(index))
    _refused(tmp_path / "out", target, "leads out of the directory")


@pytest.mark.parametrize("text", ["[]", '{"weight_map": [1]}', '{"weight_map": {"a": 3}}'])
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    export("combined", heads_directory(), tmp_path / "out")
    (tmp_path / "out" / "model.safetensors.index.json").write_text(text)
    _refused(tmp_path / "out", "combined", "has no weight_map|must be a JSON object")


def _header(path: Path, header: dict[str, object], *, claimed: int | None = None) -> None:
    text = json.dumps(header).encode()
    length = len(text) if claimed is None else claimed
    path.write_bytes(length.to_bytes(8, "little") + text + bytes(64))


@pytest.mark.parametrize("target", ["tgi", "vllm", "mlc", "combined", "transformers"])
def test_a_header_that_claims_ten_gigabytes(tmp_path: Path, target: str) -> None:
    export(target, heads_directory(), tmp_path / "out")
    path = tmp_path / "out" / FILES[target]
    name = next(iter(load_file(path)))
    huge = {"dtype": "F32", "shape": [50000, 50000], "data_offsets": [0, 10_000_000_000]}
    _header(path, {name: huge})
    _refused(tmp_path / "out", target, "claims bytes 0 to 10,000,000,000, but the file holds 64")
    _header(path, {name: huge}, claimed=10_000_000_000)
    _refused(tmp_path / "out", target, "its header claims 10,000,000,000 bytes")
    _header(path, {name: {"dtype": "F32", "shape": [50000, 50000], "data_offsets": [0, 64]}})
    _refused(tmp_path / "out", target, "its shape needs 10,000,000,000 bytes, but it has 64")
    _header(path, {name: {"dtype": "F32", "shape": [-4, 4], "data_offsets": [0, 64]}})
    _refused(tmp_path / "out", target, "its shape needs")
    _header(path, {name: {"shape": 3}})
    _refused(tmp_path / "out", target, "its header is damaged")
    path.write_bytes(b"")
    _refused(tmp_path / "out", target, "not a safetensors file")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(tmp_path: Path, target: str, value: float) -> None:
    export(target, heads_directory(), tmp_path / "out")
    path = tmp_path / "out" / FILES[target]
    is_pickle = path.suffix == ".pt"
    tensors = torch.load(path, weights_only=True) if is_pickle else load_file(path)
    name = next(name for name in tensors if name.endswith("0.0.linear.bias") or "0.bias" in name)
    tensors[name][0] = value
    (torch.save if is_pickle else save_file)(tensors, path)
    _refused(tmp_path / "out", target, "holds values that are not finite")


@pytest.mark.parametrize("target", TARGETS)
def test_shapes_that_make_no_sense(tmp_path: Path, target: str) -> None:
    export(target, heads_directory(), tmp_path / "out")
    path = tmp_path / "out" / FILES[target]
    is_pickle = path.suffix == ".pt"
    whole = torch.load(path, weights_only=True) if is_pickle else load_file(path)
    for tensor in (torch.tensor(1.0), torch.zeros(0), torch.zeros(2, 3, 4)):
        for name in whole:
            (torch.save if is_pickle else save_file)({**whole, name: tensor}, path)
            assert verify_directory(target, path.parent, heads=heads_directory()).errors  # type: ignore[arg-type]
    base = str(base_directory())
    with pytest.raises(InputError):
        import_heads(tmp_path / "out", tmp_path / "back", base_model=base)


@pytest.mark.parametrize("target", ["tgi", "vllm", "mlc", "nxd", "fasterdecoding", "combined"])
def test_a_billion_heads(tmp_path: Path, target: str) -> None:
    export(target, heads_directory(), tmp_path / "out")
    path = tmp_path / "out" / FILES[target]
    is_pickle = path.suffix == ".pt"
    whole = torch.load(path, weights_only=True) if is_pickle else load_file(path)
    name = next(name for name in whole if "0.0.linear.weight" in name or "0.weight" in name)
    whole[re.sub(r"\d+", "1000000000", name, count=1)] = whole[name].clone()
    (torch.save if is_pickle else save_file)(whole, path)
    with pytest.raises(InputError, match="1,000,000,001 heads or layers; at most 256 are read"):
        import_heads(tmp_path / "out", tmp_path / "back", base_model=str(base_directory()))
    config = tmp_path / "out" / "config.json"
    if config.exists():
        text = config.read_text()
        for key in ("medusa_num_heads", "medusa_num_layers", "num_heads", "num_hidden_layers"):
            text = re.sub(rf'"{key}": \d+', f'"{key}": 1000000000', text)
        config.write_text(text)
    try:
        assert verify_directory(target, tmp_path / "out").errors  # type: ignore[arg-type]
    except InputError as error:
        assert "at most 256 are read" in str(error)  # noqa: PT017 — some engines count names


def test_a_config_without_an_end(tmp_path: Path) -> None:
    export("tgi", heads_directory(), tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text("[" * 200_000)
    _refused(tmp_path / "out", "tgi", "nested too deeply")


def test_quantised_weights(tmp_path: Path) -> None:
    export("tgi", heads_directory(), tmp_path / "out")
    path = tmp_path / "out" / FILES["tgi"]
    tensors = load_file(path)
    save_file({**tensors, "0.1.weight": torch.zeros(453, 32, dtype=torch.int8)}, path)
    _refused(tmp_path / "out", "tgi", r"has dtype torch\.int8; quantised heads are not read")


@pytest.mark.parametrize("target", TARGETS)
def test_a_link_that_leads_out(tmp_path: Path, target: str) -> None:
    export(target, heads_directory(), tmp_path / "out")
    path = tmp_path / "out" / FILES[target]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    _refused(tmp_path / "out", target, "leads out of the directory")


def test_a_config_that_is_a_link(tmp_path: Path) -> None:
    export("tgi", heads_directory(), tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    path.rename(tmp_path / "secret.json")
    path.symlink_to(tmp_path / "secret.json")
    _refused(tmp_path / "out", "tgi", "leads out of the directory")


def test_links_of_the_hubs_cache_are_its_own(tmp_path: Path) -> None:
    """There a snapshot is made of links into the store beside it."""
    repository = tmp_path / "models--a--b"
    snapshot = repository / "snapshots" / "abc"
    export("tgi", heads_directory(), tmp_path / "out")
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in (tmp_path / "out").iterdir():
        path.rename(repository / "blobs" / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert verify_directory("tgi", snapshot, heads=heads_directory()).is_good
    import_heads(snapshot, tmp_path / "back")


def test_no_directory_at_all(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such directory"):
        verify_directory("tgi", tmp_path / "absent")
    with pytest.raises(InputError, match="no such directory"):
        import_heads(tmp_path / "absent", tmp_path / "back")
