from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from medusa_train.base_model.packed_linear import PackedLinears, packed_linears
from medusa_train.distill import filters
from medusa_train.distill.in_process import InProcessEngine
from medusa_train.distill.sampling import Sampling, greedy, inverse_cdf
from medusa_train.distill.settings import DistillSettings
from medusa_train.distill.slot_attention import group_rows
from medusa_train.distill.writer import Stopping
from medusa_train.errors import InputError
from tests.models_for_tests import make_model

PROMPTS = [[5, 6, 7, 8, n % 50 + 3] * (n % 4 + 1) for n in range(14)]


def _generate(engine: InProcessEngine, *, seed: int = 0) -> list[tuple[int, ...]]:
    answers = engine.generate(
        PROMPTS,
        sampling=Sampling(1.0),
        stopping=Stopping(frozenset({2}), 20),
        generator=torch.Generator().manual_seed(seed),
    )
    return [answer.token_ids for answer in answers]


def test_packed_weights_change_no_bit() -> None:
    model = make_model(dtype=torch.bfloat16)
    ids = torch.arange(3, 63)[:, None]
    with torch.inference_mode():
        plain = model(input_ids=ids).logits
        with packed_linears(model, num_rows=60) as used:
            packed = model(input_ids=ids).logits
        again = model(input_ids=ids).logits
    assert used == torch.ops.mkldnn._is_mkldnn_bf16_supported()
    assert torch.equal(plain, packed)
    assert torch.equal(plain, again)
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 products"
)
@pytest.mark.parametrize("columns", [16, 15])
def test_packed_copies_stay_until_their_weight_changes(columns: int) -> None:
    layer = nn.Linear(columns, 8, bias=False).to(torch.bfloat16)
    other = nn.Linear(columns, 8, bias=False).to(torch.bfloat16)
    model: Any = nn.ModuleList([layer, other])
    packed = PackedLinears(model)
    inputs = torch.randn(3, columns, dtype=torch.bfloat16)

    def product_and_copies(num_rows: int = 3) -> tuple[Tensor, list[Tensor]]:
        with torch.inference_mode(), packed.in_use(num_rows=num_rows) as are_used:
            assert are_used
            copies = [module.forward.args[0] for module in (layer, other)]  # type: ignore[attr-defined]
            return layer(inputs), copies

    first, copies = product_and_copies()
    again, same = product_and_copies()
    assert torch.equal(first, again)
    assert all(one is two for one, two in zip(copies, same, strict=True))
    # As adapters are merged: no version that torch counts changes.
    version = layer.weight._version
    layer.weight.data[3, 2] += 1.0
    assert layer.weight._version == version
    changed, fresh = product_and_copies()
    assert torch.equal(changed, nn.functional.linear(inputs, layer.weight))
    assert not torch.equal(first, changed)
    assert fresh[0] is not copies[0]
    assert fresh[1] is copies[1]
    layer.weight = nn.Parameter(torch.randn(8, columns, dtype=torch.bfloat16))
    replaced, _ = product_and_copies()
    assert torch.equal(replaced, nn.functional.linear(inputs, layer.weight))
    assert product_and_copies(num_rows=60)[1][1] is not copies[1]
    # Weights that cannot be packed any more leave nothing behind.
    model.float()
    with packed.in_use(num_rows=3) as are_used:
        assert not are_used
    assert not packed._copies


def test_weights_in_float32_are_not_packed() -> None:
    model = make_model()
    with packed_linears(model, num_rows=60) as used:
        assert not used
        assert not any("forward" in m.__dict__ for m in model.modules() if type(m) is nn.Linear)


def test_what_an_engine_did_before_changes_nothing() -> None:
    """The cache is kept between calls; what is left in it must not be seen."""
    model = make_model()
    used = InProcessEngine(model, vocab_size=64, max_rows=5)
    first = _generate(used)
    _generate(used, seed=7)
    assert used.cache(5, bound=1).capacity > 0
    assert _generate(used) == first
    assert _generate(InProcessEngine(model, vocab_size=64, max_rows=5)) == first


def test_models_with_another_state_are_refused_by_name() -> None:
    config = AutoConfig.for_model(
        "mamba", hidden_size=16, num_hidden_layers=1, state_size=4, vocab_size=32
    )
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(InputError, match=r"MambaForCausalLM .* cannot generate in process"):
        InProcessEngine(model, vocab_size=32, max_rows=2)


def test_hybrid_models_are_refused_by_name() -> None:
    config = AutoConfig.for_model(
        "qwen3_next", hidden_size=16, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, intermediate_size=16, vocab_size=32, num_experts=2,
        num_experts_per_tok=1, moe_intermediate_size=8, shared_expert_intermediate_size=8,
        linear_num_value_heads=2, linear_num_key_heads=1, linear_key_head_dim=8,
        linear_value_head_dim=8,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(InputError, match="Qwen3NextForCausalLM keeps state in"):
        InProcessEngine(model, vocab_size=32, max_rows=2)


def test_attention_is_the_users_again_afterwards() -> None:
    for implementation in ("sdpa", "eager"):
        model = make_model()
        model.set_attn_implementation(implementation)
        _generate(InProcessEngine(model, vocab_size=64, max_rows=5))
        assert model.config._attn_implementation == implementation


def test_answers_end_where_the_positions_of_the_model_end() -> None:
    model = make_model(max_position_embeddings=24)
    engine = InProcessEngine(model, vocab_size=64, max_rows=2)
    [answer] = engine.generate(
        [[5] * 20],
        sampling=Sampling(0.0),
        stopping=Stopping(frozenset(), 20),
        generator=torch.Generator(),
    )
    assert len(answer.token_ids) == 4
    assert answer.finish_reason == "length"


def test_a_looping_answer_is_stopped_and_still_dropped() -> None:
    settings = DistillSettings(loop_ngram=2, loop_repeats=4)
    watch = filters.loop_watch(settings)
    assert watch is not None
    assert watch([1, 3] * 8)
    assert not watch([1, 3] * 4 + list(range(10, 18)))
    assert filters.loop_watch(DistillSettings(loop_ngram=0)) is None


def test_groups_cover_all_rows_and_their_lengths() -> None:
    positions = list(range(150, 3, -1))
    groups = group_rows(positions)
    assert [first for first, _, _ in groups] == [0, *[end for _, end, _ in groups[:-1]]]
    assert groups[-1][1] == len(positions)
    for first, end, length in groups:
        assert length == max(positions[first:end]) + 1


def test_greedy_takes_the_smallest_of_equal_ids() -> None:
    assert greedy(torch.tensor([[1.0, 4.0, 4.0], [2.0, 2.0, 2.0]])).tolist() == [1, 0]


def test_inverse_cdf_at_its_borders() -> None:
    """Chunks and tokens of weight 0 are never drawn, whatever the rounding."""
    weights = torch.zeros(3, 1024)
    weights[0, 700] = 1e-30
    weights[1, [3, 1020]] = 0.5
    weights[2, 256:512] = 1.0
    for share, expected in ((0.0, [700, 3, 256]), (1.0, [700, 1020, 511])):
        uniform = torch.full((3,), share, dtype=torch.float64)
        assert inverse_cdf(weights, uniform).tolist() == expected
    middle = torch.tensor([0.5, 0.5, 0.5], dtype=torch.float64)
    assert inverse_cdf(weights, middle).tolist() == [700, 1020, 384]
