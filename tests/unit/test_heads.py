from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from medusa_train.base_model.features import output_projection
from medusa_train.errors import InputError, InputErrors
from medusa_train.heads.checkpoint import (
    CONFIG_FILE,
    SPEC_FILE,
    WEIGHTS_FILE,
    heads_fingerprint,
    load_heads,
    read_spec,
    save_heads,
)
from medusa_train.heads.config import BaseIdentity, HeadsConfig
from medusa_train.heads.model import MedusaHeads, most_frequent_tokens, num_candidate_rows
from medusa_train.losses import IGNORE
from tests.models_for_tests import ARCHITECTURES, make_model

BASE = BaseIdentity("some/base", "f" * 16, revision="main", max_length=2048)


def _heads(
    *,
    num_heads: int = 3,
    num_layers: int = 1,
    layout: str = "full",
    truncated: int | None = None,
    bias: bool = False,
    seed: int = 5,
) -> MedusaHeads:
    config = HeadsConfig(num_heads, num_layers, layout, 8, 20, truncated, bias)  # type: ignore[arg-type]
    token_map = None if truncated is None else torch.arange(truncated) * 2
    heads = MedusaHeads(config, token_map=token_map)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_()
    return heads


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["full", "shared"])
def test_new_head_is_the_base(
    architecture: str, tied: bool, dtype: torch.dtype, layout: str
) -> None:
    """In the same dtype and batch shape a new head's logits equal the base's, bit for bit."""
    from medusa_train.base_model.features import check_features, hidden_states

    model = make_model(architecture, tied=tied, dtype=dtype)
    rule = check_features(model)
    weight, bias = output_projection(model)
    config = HeadsConfig(
        2, 2, layout, weight.shape[1], weight.shape[0], lm_head_bias=bias is not None
    )  # type: ignore[arg-type]
    heads = MedusaHeads(config, dtype=dtype)
    heads.init_from_base(weight, bias)
    ids = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(0))
    states = hidden_states(model, ids)
    logits = heads.logits(states, lm_head_weight=weight, lm_head_bias=bias)
    expected = model(ids).logits
    for head in logits:
        assert torch.equal(rule.apply(head), expected)


@pytest.mark.parametrize("layout", ["full", "shared"])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("truncated", [None, 6])
@pytest.mark.parametrize("num_heads", [1, 8])
def test_saved_heads_load_with_equal_logits(
    tmp_path: Path, layout: str, num_layers: int, truncated: int | None, num_heads: int
) -> None:
    heads = _heads(
        num_heads=num_heads, num_layers=num_layers, layout=layout, truncated=truncated, bias=True
    )
    save_heads(heads, tmp_path, base=BASE)
    loaded, base = load_heads(tmp_path, base_fingerprint="f" * 16, hidden_size=8, vocab_size=20)
    assert base == BASE
    assert loaded.config == heads.config
    x, w, b = torch.randn(4, 8), torch.randn(20, 8), torch.randn(20)
    ours, theirs = (h.logits(x, lm_head_weight=w, lm_head_bias=b) for h in (heads, loaded))
    assert torch.equal(ours, theirs)
    assert ours.shape == (num_heads, 4, truncated or 20)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_files_are_format_a(tmp_path: Path) -> None:
    save_heads(_heads(num_heads=2, num_layers=2), tmp_path, base=BASE)
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    assert sorted(tensors) == [
        "0.0.linear.bias", "0.0.linear.weight", "0.1.linear.bias", "0.1.linear.weight",
        "0.2.weight",
        "1.0.linear.bias", "1.0.linear.weight", "1.1.linear.bias", "1.1.linear.weight",
        "1.2.weight",
    ]  # fmt: skip
    assert json.loads((tmp_path / CONFIG_FILE).read_text()) == {
        "base_model_name_or_path": "some/base",
        "medusa_num_heads": 2,
        "num_medusa_heads": 2,
        "medusa_num_layers": 2,
        "num_medusa_layers": 2,
        "hidden_size": 8,
        "vocab_size": 20,
        "medusa_fc_bias": True,
    }


def test_shared_layout_saves_the_blocks_only(tmp_path: Path) -> None:
    save_heads(_heads(num_heads=1, layout="shared"), tmp_path, base=BASE)
    assert sorted(load_file(tmp_path / WEIGHTS_FILE)) == ["0.0.linear.bias", "0.0.linear.weight"]


def test_missing_and_surplus_tensors_are_all_named(tmp_path: Path) -> None:
    save_heads(_heads(num_heads=1), tmp_path, base=BASE)
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    del tensors["0.0.linear.bias"]
    tensors["7.0.linear.bias"] = torch.zeros(8)
    tensors["0.1.weight"] = torch.zeros(21, 8)
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    with pytest.raises(InputErrors) as failure:
        load_heads(tmp_path)
    assert list(failure.value.lines) == [
        f"{tmp_path}: {WEIGHTS_FILE}: 0.1.weight: shape [21, 8], but {SPEC_FILE} says [20, 8]",
        f"{tmp_path}: {WEIGHTS_FILE}: missing tensor '0.0.linear.bias'",
        f"{tmp_path}: {WEIGHTS_FILE}: surplus tensor '7.0.linear.bias'",
    ]


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    heads = _heads(num_heads=1)
    with torch.no_grad():
        heads[0][0].linear.bias[3] = float("nan")
    save_heads(heads, tmp_path, base=BASE)
    with pytest.raises(InputErrors, match=r"0\.0\.linear\.bias: holds values that are not finite"):
        load_heads(tmp_path)


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({"base_fingerprint": "0" * 16}, "with fingerprint ffffffffffffffff, but this base"),
        ({"hidden_size": 9}, "heads for hidden size 8"),
        ({"vocab_size": 21}, "heads for 20 rows of lm_head"),
    ],
)
def test_another_base_is_refused(tmp_path: Path, expected: dict[str, object], message: str) -> None:
    save_heads(_heads(), tmp_path, base=BASE)
    with pytest.raises(InputError, match=message):
        load_heads(tmp_path, **expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 0}, "num_heads must be a whole number of at least 1, got 0"),
        ({"layout": "wide"}, "layout must be 'full' or 'shared', got 'wide'"),
        ({"surprise": 1}, "unexpected keyword argument 'surprise'"),
        ({"schema_version": 2}, "schema_version: must be 1, got 2"),
        ({"base_model": None}, "base_model: must be a JSON object"),
        ({"truncated_vocab_size": 21}, "truncated_vocab_size must be from 1 to 20"),
    ],
)
def test_wrong_specs_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    save_heads(_heads(), tmp_path, base=BASE)
    path = tmp_path / SPEC_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InputError, match=message):
        read_spec(tmp_path)


def test_a_directory_without_heads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such heads directory"):
        read_spec(tmp_path / "absent")
    with pytest.raises(InputError, match=f"no {SPEC_FILE} in it"):
        read_spec(tmp_path)
    save_heads(_heads(), tmp_path, base=BASE)
    (tmp_path / WEIGHTS_FILE).write_bytes(b"not tensors")
    with pytest.raises(InputError, match="not a readable safetensors file"):
        load_heads(tmp_path)


def test_fingerprint_covers_weights_config_and_spec_only(tmp_path: Path) -> None:
    save_heads(_heads(), tmp_path, base=BASE)
    first = heads_fingerprint(tmp_path)
    (tmp_path / "README.md").write_text("a model card")
    assert heads_fingerprint(tmp_path) == first
    save_heads(_heads(seed=6), tmp_path, base=BASE)
    assert heads_fingerprint(tmp_path) != first


def test_truncated_vocabulary_maps_both_ways() -> None:
    heads = _heads(truncated=4)  # ids 0, 2, 4, 6
    labels = torch.tensor([[0, 6], [3, IGNORE], [2, 19]])
    rows = heads.labels_to_rows(labels, ignore=IGNORE)
    assert rows.tolist() == [[0, 3], [IGNORE, IGNORE], [1, IGNORE]]
    assert heads.rows_to_tokens(torch.tensor([3, 1])).tolist() == [6, 2]
    assert num_candidate_rows(heads, 5) == 3
    assert num_candidate_rows(_heads(), 5) == 5


def test_truncated_heads_start_as_the_base_over_their_tokens() -> None:
    weight, bias, x = torch.randn(20, 8), torch.randn(20), torch.randn(3, 8)
    for layout in ("full", "shared"):
        config = HeadsConfig(1, 1, layout, 8, 20, 4, True)  # type: ignore[arg-type]
        heads = MedusaHeads(config, token_map=torch.tensor([1, 5, 6, 19]))
        heads.init_from_base(weight, bias)
        logits = heads.logits(x, lm_head_weight=weight, lm_head_bias=bias)
        expected = (x @ weight.T + bias)[:, [1, 5, 6, 19]]
        torch.testing.assert_close(logits[0], expected)


@pytest.mark.parametrize("ids", [[3, 1], [1, 1], [0, 20], [-1, 3]])
def test_a_token_map_must_ascend_within_the_vocabulary(ids: list[int]) -> None:
    config = HeadsConfig(1, 1, "full", 8, 20, 2)
    with pytest.raises(ValueError, match="token_map must be ascending ids below 20"):
        MedusaHeads(config, token_map=torch.tensor(ids))


def test_most_frequent_tokens() -> None:
    labels = [5, 5, 5, 2, 2, 9, 1]
    assert most_frequent_tokens(labels, size=3, vocab_size=12).tolist() == [1, 2, 5]
    assert most_frequent_tokens(labels, size=6, vocab_size=12).tolist() == [0, 1, 2, 3, 5, 9]
