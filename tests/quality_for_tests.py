"""Changed models of a tiny base, as directories, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.training_for_tests import conversation

RANK, ALPHA = 4, 8
LAYERS = ("q_proj", "v_proj", "down_proj")
ROWS = [
    conversation([5, 9, 12, 31, 7, 8, 22, 14, 3], [(3, 9)], name="one"),
    conversation([5, 30, 11, 6, 40, 4, 5, 17, 23, 9, 8], [(2, 5), (7, 11)], name="two turns"),
    conversation([6, 7, 8, 9, 10, 11], [(0, 6)], name="plain text"),
    conversation([8, 19, 5], [(2, 3)], name="one token"),
]


def save_changed(directory: Path, *, base: Path, scale: float = 0.02, seed: int = 1) -> Path:
    """A copy of the base with noise on every weight."""
    model = AutoModelForCausalLM.from_pretrained(base)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(base).save_pretrained(directory)
    return directory


def save_adapters(
    directory: Path,
    *,
    base: Path,
    layers: tuple[str, ...] = LAYERS,
    scale: float = 0.2,
    seed: int = 2,
    bias: str = "none",
    init: bool | str = True,
) -> Path:
    """LoRA adapters at random, in the files that peft reads, written without it."""
    model = AutoModelForCausalLM.from_pretrained(base)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in model.named_modules():
        if not name.endswith(layers):
            continue
        rows, columns = module.weight.shape
        for part, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
            key = f"base_model.model.{name}.lora_{part}.weight"
            tensors[key] = torch.randn(shape, generator=generator) * scale
        if bias != "none" and module.bias is not None:
            tensors[f"base_model.model.{name}.base_layer.bias"] = torch.randn(
                rows, generator=generator
            )
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.5,
        "target_modules": sorted(layers),
        "bias": bias,
        "init_lora_weights": init,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def merged_by_hand(adapters: Path, *, base: Path) -> PreTrainedModel:
    """The base with W + B · A · alpha / r, by the definition of LoRA (and trained biases)."""
    from safetensors.torch import load_file

    model = AutoModelForCausalLM.from_pretrained(base)
    tensors = load_file(adapters / "adapter_model.safetensors")
    with torch.no_grad():
        for name, module in model.named_modules():
            key = f"base_model.model.{name}"
            if f"{key}.lora_A.weight" in tensors:
                a, b = (tensors[f"{key}.lora_{part}.weight"] for part in "AB")
                module.weight.add_(b @ a * (ALPHA / RANK))
            if f"{key}.base_layer.bias" in tensors:
                module.bias.copy_(tensors[f"{key}.base_layer.bias"])
    assert isinstance(model, PreTrainedModel)
    model.eval()
    return model
