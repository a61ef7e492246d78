"""Small real models built from a seed, one per architecture, and what is needed to run them.

Shared by all tests: ``from tests.models_for_tests import ARCHITECTURES, make_model, make_base``.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from medusa_train.base_model.features import check_features
from medusa_train.base_model.load import BaseModel
from tests.tokenizers_for_tests import END, make_tokenizer

_COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
}
_MIXTURE = {"num_local_experts": 4, "num_experts_per_tok": 2}

# model_type → its config's own keys; the values differ from the defaults where those are large.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _COMMON,
    "mistral": {**_COMMON, "sliding_window": 16},
    "qwen2": _COMMON,
    "qwen3": {**_COMMON, "head_dim": 8},
    "gemma2": {
        **_COMMON,
        "head_dim": 8,
        "sliding_window": 16,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 8,
    },
    "gemma3_text": {**_COMMON, "head_dim": 8, "sliding_window": 16},
    "phi3": {**_COMMON, "pad_token_id": 0},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "gpt_neox": {k: v for k, v in _COMMON.items() if k != "num_key_value_heads"},
    "opt": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 48,
        "word_embed_proj_dim": 24,
        "max_position_embeddings": 512,
    },
    "olmo2": _COMMON,
    "mixtral": {**_COMMON, **_MIXTURE},
    "cohere": {**_COMMON, "logit_scale": 0.25},
    "granite": {**_COMMON, "logits_scaling": 4.0},
    "phi": {k: v for k, v in _COMMON.items() if k != "num_key_value_heads"},
}
# What only tests of decoding need: latent attention, and a model that cannot be rolled back.
OTHERS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **_COMMON,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 16,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "qwen3_next": {
        **_COMMON,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
}


def make_model(
    architecture: str = "llama",
    *,
    vocab_size: int = 64,
    tied: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    std: float = 0.2,
    **changes: Any,
) -> PreTrainedModel:
    """A seeded model in eval mode, with weights large enough that its outputs differ."""
    options = {**(ARCHITECTURES | OTHERS)[architecture], **changes}
    config = AutoConfig.for_model(
        architecture, vocab_size=vocab_size, tie_word_embeddings=tied, **options
    )
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if isinstance(value := getattr(config, name, None), int) and value >= vocab_size:
            setattr(config, name, None)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, std)
    model.tie_weights()
    if dtype == torch.float64 and "num_experts_per_tok" in options:
        model.set_experts_implementation("eager")  # the grouped product knows no fp64
    model.generation_config = GenerationConfig()
    return model.to(dtype).eval().requires_grad_(False)


def make_base(model: PreTrainedModel | None = None, **options: Any) -> BaseModel:
    """A base model on a small real tokenizer, without files behind it."""
    tokenizer = make_tokenizer(**options)
    model = make_model(vocab_size=len(tokenizer)) if model is None else model
    return BaseModel(
        model=model,
        tokenizer=tokenizer,
        name_or_path="tiny",
        revision=None,
        gguf_file=None,
        fingerprint="0" * 16,
        stop_ids=(tokenizer.convert_tokens_to_ids(END),),
        logit_rule=check_features(model),
    )


def save_base(
    directory: Path, architecture: str = "llama", *, extra_rows: int = 0, **options: Any
) -> Path:
    """A model directory with weights, tokenizer and chat template, as users have them.

    Args:
        directory: where; made if needed.
        architecture: one of :data:`ARCHITECTURES`.
        extra_rows: rows of ``lm_head`` beyond the tokenizer's ids.
        **options: ``template``, ``eos``, … of the tokenizer, and those of :func:`make_model`.
    """
    names = ("template", "eos", "pad", "adds_bos", "metaspace")
    tokenizer = make_tokenizer(**{name: options.pop(name) for name in names if name in options})
    model = make_model(architecture, vocab_size=len(tokenizer) + extra_rows, **options)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def file_hashes(directory: Path) -> dict[str, str]:
    """The sha256 of every file below ``directory``."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
