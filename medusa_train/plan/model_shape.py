"""The shape of a base model from its config alone: it is built on the meta device, without weights.

Shapes: D hidden, V rows of ``lm_head``.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from medusa_train.base_model.features import decoder, output_projection
from medusa_train.base_model.fingerprint import OWN_CODE, first_line, needs_its_code
from medusa_train.base_model.naming import check_name
from medusa_train.errors import InputError

QUANTISED_BYTES = {"8bit": 1.0, "4bit": 0.5 + 4 / 64}
"""Bytes of a quantised weight; NF4 keeps an fp32 scale for each 64 of them."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the estimates read of a base model.

    Attributes:
        num_parameters: all of them, tied ones once.
        dtype_bytes: bytes of one weight in memory.
        quantised_bytes: bytes of one weight of the layers' matrices where they are quantised.
        hidden_size: D.
        vocab_size: V.
        num_layers: layers of the decoder.
        layer_parameters: of the largest layer.
        active_parameters: entries of the matrices that one token is multiplied with on its way to
            its hidden state; of a mixture's experts only those that it is sent to.
        attention_width: heads × size of a head.
        widest: the widest matrix of a layer, most often the MLP's inner size.
        lm_head_bias: whether ``lm_head`` has a bias.
        max_length: positions that the model has, or None where its config names none.
    """

    num_parameters: int
    dtype_bytes: int
    hidden_size: int
    vocab_size: int
    num_layers: int
    layer_parameters: int
    active_parameters: int
    attention_width: int
    widest: int
    lm_head_bias: bool
    max_length: int | None = None
    quantised_bytes: float | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights in memory."""
        layers = self.num_layers * self.layer_parameters
        saved = 0.0 if self.quantised_bytes is None else self.dtype_bytes - self.quantised_bytes
        return self.num_parameters * self.dtype_bytes - round(layers * saved)


def load_config(
    name_or_path: str,
    *,
    gguf_file: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PretrainedConfig:
    """The config of a hub id, a directory, or a GGUF file; no weights are read.

    Raises:
        InputError: there is none, or it cannot be read.
    """
    check_name(name_or_path)
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    if gguf_file is not None:
        options["gguf_file"] = gguf_file
    try:
        config = AutoConfig.from_pretrained(name_or_path, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        if needs_its_code(error):
            raise InputError(f"{name_or_path}: its config cannot be loaded: {OWN_CODE}") from error
        raise InputError(
            f"{name_or_path}: its config cannot be loaded: {first_line(error)}; give a "
            "directory with its config.json, or a machine that reaches the hub"
        ) from error
    assert isinstance(config, PretrainedConfig)
    return config


def meta_model(
    config: PretrainedConfig, *, dtype: str = "auto", trust_remote_code: bool = False
) -> PreTrainedModel:
    """The base model without weights.

    Args:
        config: of the base.
        dtype: as in recipes; ``auto`` is that of the config, else fp32.
        trust_remote_code: run code that comes with the model.

    Raises:
        InputError: the config is of no causal language model.
    """
    chosen = config.get_text_config().dtype or config.dtype if dtype == "auto" else dtype
    if not isinstance(chosen, torch.dtype):
        chosen = getattr(torch, str(chosen or "float32").removeprefix("torch."))
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=chosen, trust_remote_code=trust_remote_code
            )
    except (ValueError, ImportError) as error:
        name = config.name_or_path or "the base model"
        raise InputError(f"{name}: cannot be built from its config: {first_line(error)}") from error
    assert isinstance(model, PreTrainedModel)
    return model


def shape_of(model: PreTrainedModel) -> ModelShape:
    """The shape of a model on any device, the meta device too.

    Raises:
        InputError: it has no ``lm_head``.
    """
    weight, bias = output_projection(model)
    layers = _layers(model)
    text = model.config.get_text_config(decoder=True)
    heads = int(getattr(text, "num_attention_heads", 1))
    head_dim = getattr(text, "head_dim", None) or weight.shape[1] // heads
    length = getattr(text, "max_position_embeddings", None)
    share = _expert_share(text)
    return ModelShape(
        num_parameters=_count(model.parameters()),
        dtype_bytes=weight.element_size(),
        hidden_size=weight.shape[1],
        vocab_size=weight.shape[0],
        num_layers=len(layers),
        layer_parameters=max(_count(layer.parameters()) for layer in layers),
        active_parameters=round(
            sum(_active(name, p, share) for layer in layers for name, p in layer.named_parameters())
        ),
        attention_width=heads * int(head_dim),
        widest=max(max(p.shape[-2:]) for p in layers[0].parameters() if p.dim() >= 2),
        lm_head_bias=bias is not None,
        max_length=length if isinstance(length, int) else None,
    )


def one_layer_config(config: PretrainedConfig, *, vocab_size: int = 256) -> PretrainedConfig:
    """The config with a single layer and few tokens: what one layer costs can be measured on it."""
    small = copy.deepcopy(config)
    text = small.get_text_config(decoder=True)
    text.num_hidden_layers = 1
    text.vocab_size = vocab_size
    for name in ("layer_types", "mlp_layer_types"):
        if isinstance(kinds := getattr(text, name, None), list):
            setattr(text, name, kinds[:1])
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(text, name, None)
    return small


def _layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder's layers: its list of modules with the most parameters."""
    lists = [m for m in decoder(model).modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        raise InputError(
            f"{model.config.name_or_path or 'the base model'} ({type(model).__name__}): has no "
            "list of layers, so its memory cannot be estimated"
        )
    return max(lists, key=lambda modules: _count(modules.parameters()))


def _count(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _expert_share(config: Any) -> float:
    """The share of a mixture's experts that a token is sent to; 1 for other models."""
    chosen = getattr(config, "num_experts_per_tok", None)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((n for name in names if (n := getattr(config, name, None))), None)
    return chosen / experts if chosen and experts else 1.0


def _active(name: str, parameter: Tensor, share: float) -> float:
    if parameter.dim() < 2:
        return 0.0
    is_expert = ".experts." in f".{name}" and ".shared_experts." not in f".{name}"
    return parameter.numel() * (share if is_expert else 1.0)
