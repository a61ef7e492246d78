from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from medusa_train.base_model.changed import check_changed
from medusa_train.errors import InputError
from medusa_train.evaluate.accuracy import bootstrap_weights
from medusa_train.evaluate.quality import Drift, quality_figures, verdict
from medusa_train.quality import compare
from medusa_train.quality.compare import measure_drift
from medusa_train.quality.pair import Pair, load_pair
from tests.models_for_tests import ARCHITECTURES, save_base
from tests.quality_for_tests import ROWS, merged_by_hand, save_adapters, save_changed
from tests.reference import quality_reference as reference

LIMITS = {"min_agreement": 0.98, "max_perplexity_ratio": 1.02}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base") / "base", extra_rows=7)


def _load(base: Path, changed: Path) -> Pair:
    check_changed(changed)
    return load_pair({"name_or_path": str(base)}, changed=changed)


def _model(directory: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert isinstance(model, PreTrainedModel)
    model.eval()
    return model


def _check(drift: Drift, wanted: Sequence[reference.Place]) -> None:
    # The reference leaves out no conversation; those without a position have no row in either.
    numbers = sorted({place.conversation for place in wanted})
    assert drift.conversation.tolist() == [numbers.index(place.conversation) for place in wanted]
    assert drift.place.tolist() == [place.place for place in wanted]
    for name in ("kl", "original_nll", "changed_nll"):
        ours = getattr(drift, name)
        np.testing.assert_allclose(ours, [getattr(p, name) for p in wanted], atol=2e-5, rtol=1e-5)
    assert drift.agrees.tolist() == [place.agrees for place in wanted]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_drift_equals_a_plain_loop(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches and in chunks of a few rows, with a scaled or capped lm_head too."""
    monkeypatch.setattr(compare, "MAX_BATCH_TOKENS", 24)
    monkeypatch.setattr(compare, "CHUNK_ELEMENTS", 200)
    base = save_base(tmp_path / "base", architecture, extra_rows=7)
    changed = save_changed(tmp_path / "changed", base=base, scale=0.05)
    pair = _load(base, changed)
    assert pair.original.model.get_output_embeddings().weight.shape[0] > pair.original.num_tokens
    wanted = reference.drift(
        _model(base), _model(changed), ROWS, num_tokens=pair.original.num_tokens
    )
    assert sum(place.kl for place in wanted) > 0.01
    _check(measure_drift(pair, ROWS), wanted)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layers", [("q_proj", "down_proj"), ("v_proj", "lm_head")])
def test_adapters_are_switched_on_the_one_model(
    tmp_path: Path, tied: bool, layers: tuple[str, ...]
) -> None:
    base = save_base(tmp_path / "base", tied=tied)
    adapters = save_adapters(tmp_path / "adapters", base=base, layers=layers)
    pair = _load(base, adapters)
    assert pair.original.model is pair.changed.model
    # The embedding of a tied model stays as it is, so here the sum is made on an untied copy.
    untied = save_base(tmp_path / "untied")
    twin = _model(untied)
    twin.load_state_dict(_model(base).state_dict())
    twin.save_pretrained(untied)
    wanted = reference.drift(
        _model(base),
        merged_by_hand(adapters, base=untied),
        ROWS,
        num_tokens=pair.original.num_tokens,
    )
    assert sum(place.kl for place in wanted) > 0.01
    _check(measure_drift(pair, ROWS), wanted)


def test_trained_biases_need_a_model_of_their_own(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "gpt_neox")
    layers = ("dense_h_to_4h", "dense_4h_to_h")
    adapters = save_adapters(tmp_path / "adapters", base=base, layers=layers, bias="lora_only")
    pair = _load(base, adapters)
    assert pair.original.model is not pair.changed.model
    wanted = reference.drift(
        _model(base),
        merged_by_hand(adapters, base=base),
        ROWS,
        num_tokens=pair.original.num_tokens,
    )
    _check(measure_drift(pair, ROWS), wanted)


def test_adapters_that_take_from_the_weights_need_a_model_of_their_own(
    tmp_path: Path, base: Path
) -> None:
    """OLoRA begins with a part of each weight, which is missing when the adapters are off."""
    pair = _load(base, save_adapters(tmp_path / "adapters", base=base, init="olora"))
    assert pair.original.model is not pair.changed.model
    ids = torch.tensor([ROWS[0].input_ids])
    with torch.no_grad(), pair.using("original") as original:
        logits = original.model(ids, use_cache=False).logits
        assert torch.equal(logits, _model(base)(ids, use_cache=False).logits)


@pytest.mark.parametrize("kind", ["copy", "adapters of zero"])
def test_the_same_model_has_not_moved(tmp_path: Path, base: Path, kind: str) -> None:
    if kind == "copy":
        changed = save_changed(tmp_path / "same", base=base, scale=0.0)
    else:
        changed = save_adapters(tmp_path / "zero", base=base, scale=0.0)
    figures = quality_figures(measure_drift(_load(base, changed), ROWS), num_bootstrap=20, seed=0)
    assert (figures["kl"], figures["kl_ci95"]) == (0.0, [0.0, 0.0])
    assert (figures["perplexity_ratio"], figures["perplexity_ratio_ci95"]) == (1.0, [1.0, 1.0])
    assert figures["greedy_top1_agreement"] == 1.0
    assert figures["greedy_top1_agreement_ci95"] == [1.0, 1.0]
    assert all(row["kl"] == 0.0 for row in [*figures["by_place"], *figures["per_conversation"]])
    assert verdict(figures, **LIMITS)["kept"] is True


def _drift(generator: np.random.Generator, lengths: Sequence[int]) -> Drift:
    count = sum(lengths)
    return Drift(
        conversation=np.repeat(np.arange(len(lengths)), lengths),
        place=np.concatenate([np.arange(1, length + 1) for length in lengths]),
        kl=generator.gamma(0.5, 0.1, count),
        original_nll=generator.gamma(1.0, 1.0, count),
        changed_nll=generator.gamma(1.0, 1.1, count),
        agrees=generator.random(count) < 0.9,
    )


def test_figures_are_ratios_of_sums_over_conversations() -> None:
    lengths = [5, 40, 1, 17, 90]
    drift = _drift(np.random.default_rng(3), lengths)
    figures = quality_figures(drift, num_bootstrap=200, seed=7)
    assert (figures["num_conversations"], figures["num_positions"]) == (5, sum(lengths))
    count = sum(lengths)
    difference = [b - a for a, b in zip(drift.original_nll, drift.changed_nll, strict=True)]
    assert figures["kl"] == pytest.approx(sum(drift.kl) / count)
    assert figures["greedy_top1_agreement"] == pytest.approx(sum(drift.agrees) / count)
    assert figures["perplexity_ratio"] == pytest.approx(math.exp(sum(difference) / count))
    assert figures["perplexity_ratio"] == pytest.approx(
        figures["changed_perplexity"] / figures["original_perplexity"]
    )
    # The interval, resample by resample.
    drawn: dict[str, list[float]] = {}
    for weights in bootstrap_weights(5, num_bootstrap=200, seed=7).tolist():
        total = sum(w * n for w, n in zip(weights, lengths, strict=True))
        for name, values in (
            ("kl", drift.kl),
            ("perplexity_ratio", difference),
            ("greedy_top1_agreement", drift.agrees),
        ):
            above = sum(
                weights[c] * float(v) for c, v in zip(drift.conversation, values, strict=True)
            )
            drawn.setdefault(name, []).append(above / total)
    drawn["perplexity_ratio"] = [math.exp(value) for value in drawn["perplexity_ratio"]]
    for name, values in drawn.items():
        wanted = [np.percentile(values, 2.5), np.percentile(values, 97.5)]
        assert figures[f"{name}_ci95"] == pytest.approx(wanted, rel=2e-3)
    ordered = sorted(drift.kl)
    assert figures["kl_quantiles"]["max"] == ordered[-1]
    assert ordered[count // 2] >= figures["kl_quantiles"]["p50"] >= ordered[count // 2 - 1]


def test_figures_along_the_answers_add_up() -> None:
    drift = _drift(np.random.default_rng(5), [3, 60, 25])
    figures = quality_figures(drift, num_bootstrap=20, seed=0)
    bins = figures["by_place"]
    assert (bins[0]["first_place"], bins[-1]["last_place"]) == (1, 60)
    for before, after in itertools.pairwise(bins):
        assert after["first_place"] == before["last_place"] + 1
    total = figures["num_positions"]
    assert sum(row["num_positions"] for row in bins) == total
    for name in ("kl", "greedy_top1_agreement"):
        mean = sum(row[name] * row["num_positions"] for row in bins) / total
        assert mean == pytest.approx(figures[name])
    first = [i for i, place in enumerate(drift.place) if place == 1]
    assert bins[0]["greedy_top1_agreement"] == pytest.approx(drift.agrees[first].mean())
    rows = figures["per_conversation"]
    assert [row["num_positions"] for row in rows] == [3, 60, 25]
    assert rows[1]["kl"] == pytest.approx(drift.kl[3:63].mean())


@pytest.mark.parametrize(
    ("agreement", "ratio", "kept"),
    [
        ((0.99, [0.985, 0.995]), (1.0, [0.99, 1.01]), True),
        ((0.99, [0.97, 0.995]), (1.0, [0.99, 1.01]), None),
        ((0.99, [0.985, 0.995]), (1.01, [0.99, 1.03]), None),
        ((0.95, [0.94, 0.96]), (1.0, [0.99, 1.01]), False),
        ((0.99, [0.985, 0.995]), (1.05, [1.03, 1.07]), False),
        ((0.98, None), (1.02, None), True),
        ((0.979, None), (1.0, None), False),
    ],
)
def test_the_verdict_is_certain_or_open(
    agreement: tuple[float, list[float] | None],
    ratio: tuple[float, list[float] | None],
    kept: bool | None,
) -> None:
    figures = {
        "greedy_top1_agreement": agreement[0],
        "greedy_top1_agreement_ci95": agreement[1],
        "perplexity_ratio": ratio[0],
        "perplexity_ratio_ci95": ratio[1],
    }
    found = verdict(figures, **LIMITS)
    assert found["kept"] is kept
    assert (found["retained_share"], found["retained_share_ci95"]) == agreement


def test_one_conversation_has_no_intervals() -> None:
    figures = quality_figures(_drift(np.random.default_rng(0), [9]), num_bootstrap=20, seed=0)
    for name in ("kl", "perplexity_ratio", "greedy_top1_agreement"):
        assert figures[name] is not None
        assert figures[f"{name}_ci95"] is None


def test_another_vocabulary_is_refused(tmp_path: Path, base: Path) -> None:
    other = save_base(tmp_path / "other", template="vicuna", adds_bos=True, extra_rows=7)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(InputError, match="its tokenizer has other tokens than that of"):
        _load(base, other)


def test_adapters_of_another_base_are_refused(tmp_path: Path, base: Path) -> None:
    wide = save_base(tmp_path / "wide", hidden_size=48)
    adapters = save_adapters(tmp_path / "adapters", base=wide)
    with pytest.raises(InputError, match=r"the adapters do not fit .*; give the base that they"):
        _load(base, adapters)


@pytest.mark.parametrize("layers", [("q_proj",), ("q_proj", "v_proj", "up_proj")])
def test_adapters_that_are_not_those_of_their_config_are_refused(
    tmp_path: Path, base: Path, layers: tuple[str, ...]
) -> None:
    """peft would leave a layer without its adapter, or an adapter without its layer."""
    adapters = save_adapters(tmp_path / "adapters", base=base, layers=layers)
    config = json.loads((adapters / "adapter_config.json").read_text())
    config["target_modules"] = ["q_proj", "v_proj"]
    (adapters / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(
        InputError, match=r"the adapters do not fit .*lora_A.weight is (missing|not)"
    ):
        _load(base, adapters)


def test_what_is_no_changed_model_is_refused(tmp_path: Path, base: Path) -> None:
    with pytest.raises(InputError, match="no such directory; give a model's, or one of adapters"):
        check_changed(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"no config.json in it"):
        check_changed(tmp_path / "empty")
    adapters = save_adapters(tmp_path / "adapters", base=base)
    (adapters / "adapter_model.safetensors").unlink()
    with pytest.raises(InputError, match=r"no adapter_model.safetensors in it"):
        check_changed(adapters)
    (adapters / "adapter_config.json").write_text("[1]")
    with pytest.raises(InputError, match="must be a JSON object, got list"):
        check_changed(adapters)


def test_switched_adapters_leave_no_state(tmp_path: Path, base: Path) -> None:
    """Off and on again, in any order, gives the same distributions."""
    pair = _load(base, save_adapters(tmp_path / "adapters", base=base))
    ids = torch.tensor([ROWS[0].input_ids])
    seen = []
    with torch.no_grad():
        for side in ("changed", "original", "original", "changed"):
            with pair.using(side) as model:
                seen.append(model.model(ids, use_cache=False).logits)
    assert torch.equal(seen[0], seen[3])
    assert torch.equal(seen[1], seen[2])
    assert not torch.allclose(seen[0], seen[1])
