from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from medusa_train.base_model.adapters import (
    AdapterOptions,
    adapters_off,
    add_adapters,
    current_projection,
    is_tied,
    load_adapters,
    merge_adapters,
    save_adapters,
)
from medusa_train.base_model.features import hidden_states
from medusa_train.errors import InputError
from tests.models_for_tests import make_model, save_base

IDS = torch.arange(5, 29).view(2, 12)


def _adapters(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {n: p.detach() for n, p in model.named_parameters() if ".lora_" in n}


def _train_a_little(model: PreTrainedModel) -> None:
    generator = torch.Generator().manual_seed(1)
    for tensor in _adapters(model).values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gpt_neox", "opt", "qwen3", "mixtral"])
def test_new_adapters_change_nothing_and_trained_ones_merge(architecture: str) -> None:
    model = make_model(architecture)
    plain = model(IDS).logits
    add_adapters(model, AdapterOptions(rank=4, dropout=0.0))
    assert torch.equal(model(IDS).logits, plain)
    assert all(p.requires_grad == (".lora_" in n) for n, p in model.named_parameters())
    _train_a_little(model)
    adapted = model(IDS).logits
    assert (adapted - plain).abs().max() > 1e-2
    with adapters_off(model):
        torch.testing.assert_close(model(IDS).logits, plain, rtol=0, atol=0)
    states = hidden_states(model, IDS)
    weight, bias = current_projection(model)
    torch.testing.assert_close(torch.nn.functional.linear(states, weight, bias), adapted)
    merge_adapters(model)
    assert not _adapters(model)
    torch.testing.assert_close(model(IDS).logits, adapted, rtol=1e-4, atol=1e-4)


def test_all_linear_layers_are_adapted_and_lm_head_where_it_is_not_tied() -> None:
    model = make_model()
    add_adapters(model, AdapterOptions(rank=4))
    adapted = {name.split(".lora_")[0] for name in _adapters(model)}
    linear = {
        name.removesuffix(".base_layer")
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear and ".lora_" not in name
    }
    assert adapted == linear
    assert "lm_head" in adapted
    tied = make_model(tied=True)
    add_adapters(tied, AdapterOptions(rank=4))
    assert not any(name.startswith("lm_head") for name in _adapters(tied))


def test_a_tied_lm_head_is_refused_or_untied() -> None:
    with pytest.raises(InputError, match="lm_head is its input embedding too"):
        add_adapters(make_model(tied=True), AdapterOptions(lm_head=True))
    model = make_model(tied=True)
    plain = model(IDS).logits
    add_adapters(model, AdapterOptions(rank=4, lm_head=True, untie_lm_head=True))
    assert not is_tied(model)
    assert torch.equal(model(IDS).logits, plain)
    _train_a_little(model)
    adapted = model(IDS).logits
    merge_adapters(model)
    torch.testing.assert_close(model(IDS).logits, adapted, rtol=1e-4, atol=1e-4)


def test_chosen_layers_and_an_unknown_one() -> None:
    model = make_model()
    add_adapters(model, AdapterOptions(target_modules=("q_proj", "v_proj"), lm_head=False))
    assert {n.split(".lora_")[0].rpartition(".")[2] for n in _adapters(model)} == {
        "q_proj",
        "v_proj",
    }
    with pytest.raises(InputError, match="no linear layer named query; choose from down_proj"):
        add_adapters(make_model(), AdapterOptions(target_modules=("query",)))


# peft asks transformers by an old name.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("untied", [False, True])
def test_saved_adapters_are_those_of_peft(tmp_path: Path, untied: bool) -> None:
    from peft import PeftModel

    base = save_base(tmp_path / "base", tied=untied)
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    options = AdapterOptions(rank=4, lm_head=untied or None, untie_lm_head=untied)
    config = add_adapters(model, options)
    _train_a_little(model)
    save_adapters(_adapters(model), tmp_path / "adapters", config=config)
    logits = model(IDS).logits

    again = AutoModelForCausalLM.from_pretrained(base).eval()
    load_adapters(again, tmp_path / "adapters")
    assert torch.equal(again(IDS).logits, logits)
    if not untied:
        theirs = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapters"
        )
        torch.testing.assert_close(theirs.eval()(input_ids=IDS).logits, logits)


def test_adapters_of_another_model_are_refused(tmp_path: Path) -> None:
    model = make_model()
    config = add_adapters(model, AdapterOptions(rank=4))
    tensors = _adapters(model)
    save_adapters(tensors, tmp_path, config=config)
    with pytest.raises(InputError, match="adapters of another model"):
        load_adapters(make_model("gpt2"), tmp_path)
    save_adapters(dict(list(tensors.items())[1:]), tmp_path, config=config)
    with pytest.raises(InputError, match="does not fit"):
        load_adapters(make_model(), tmp_path)
