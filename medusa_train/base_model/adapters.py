"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) on a base model, through peft.

Adapters are put into the model itself, so that it stays the model of transformers that it was. A
quantised base keeps its weights (QLoRA, arXiv 2305.14314): the adapters run beside them.

Shapes: D hidden, V rows of ``lm_head``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from medusa_train.base_model.features import output_projection
from medusa_train.errors import InputError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_NAME = "default"
_PREFIX = "base_model.model."


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """What is adapted, and how much.

    Attributes:
        rank: r of both factors.
        alpha: the product counts ``alpha ÷ rank``.
        dropout: share of the factors' input that is left out in training.
        target_modules: last parts of the adapted layers' names; None is all linear layers.
        lm_head: whether ``lm_head`` is adapted; None where it is not tied to the embeddings.
        untie_lm_head: give a tied ``lm_head`` a weight of its own first.
    """

    rank: int = 32
    alpha: float = 16.0
    dropout: float = 0.05
    target_modules: tuple[str, ...] | None = None
    lm_head: bool | None = None
    untie_lm_head: bool = False


def is_tied(model: PreTrainedModel) -> bool:
    """Whether ``lm_head`` and the input embeddings are one weight."""
    inputs: Any = model.get_input_embeddings()
    outputs: Any = model.get_output_embeddings()
    return inputs is not None and outputs.weight is inputs.weight


def untie(model: PreTrainedModel) -> None:
    """Give ``lm_head`` a weight of its own, with the values that it has."""
    head: Any = model.get_output_embeddings()
    head.weight = nn.Parameter(output_projection(model)[0].detach().clone(), requires_grad=False)
    model.config.tie_word_embeddings = False
    model.config.get_text_config().tie_word_embeddings = False


def add_adapters(model: PreTrainedModel, options: AdapterOptions) -> Any:
    """Put new adapters into ``model``; they change nothing until they are trained.

    Their weights are fp32, and the only ones that are trained.

    Returns:
        peft's configuration of them.

    Raises:
        InputError: ``lm_head`` is tied and shall be adapted, or no layer has a wanted name.
    """
    from peft import LoraConfig

    if options.lm_head and is_tied(model):
        if not options.untie_lm_head:
            raise InputError(
                "train.medusa2.lora.lm_head: the base model's lm_head is its input embedding too, "
                "so an adapted one would change the embeddings when it is merged; write null to "
                "leave it out, or set untie_lm_head: true for a weight of its own"
            )
        untie(model)
    with_head = not is_tied(model) if options.lm_head is None else options.lm_head
    names = _adapted_names(model, options.target_modules, with_head=with_head)
    config = LoraConfig(
        r=options.rank,
        lora_alpha=cast("int", options.alpha),  # any number will do
        lora_dropout=options.dropout,
        target_modules=names,
        task_type="CAUSAL_LM",
    )
    _inject(config, model)
    for name, parameter in model.named_parameters():
        is_adapter = ".lora_" in name
        parameter.requires_grad_(is_adapter)
        if is_adapter:
            parameter.data = parameter.data.float()
    return config


def keep_gradients(model: PreTrainedModel) -> None:
    """Let gradients through the 4-bit layers of a model on a CPU.

    bitsandbytes lays their weights out anew for a CPU at the first pass without gradients, and its
    product of such weights has none.
    """
    for module in model.modules():
        if not getattr(module, "support_avx512bf16_for_cpu", False):
            continue
        layer: Any = module
        layer.support_avx512bf16_for_cpu = False
        if getattr(layer.weight.quant_state, "packing_format_for_cpu", False):
            from bitsandbytes.functional import _convert_weight_packed_for_cpu_inverse

            layer.weight.data, layer.weight.quant_state = _convert_weight_packed_for_cpu_inverse(
                layer.weight.data, layer.weight.quant_state
            )


@contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block ``model`` is the base without its adapters."""
    layers = _adapter_layers(model)
    # Only a flag of each layer: nothing of the parameters may change between two forward passes.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def current_projection(model: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """``lm_head`` with its adapter, if it has one: weight [V, D] with gradient, and bias [V].

    Dropout is left out of this layer's adapter.
    """
    head: Any = model.get_output_embeddings()
    weight, bias = head.weight, getattr(head, "bias", None)
    if not hasattr(head, "lora_A") or head.disable_adapters:
        return weight, bias
    down, up = head.lora_A[_NAME].weight, head.lora_B[_NAME].weight
    return weight + head.scaling[_NAME] * (up @ down), bias


def adapter_file_names(names: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by their names in the model → by the names that peft's files have."""
    return {f"{_PREFIX}{name.replace(f'.{_NAME}.', '.')}": tensor for name, tensor in names.items()}


def save_adapters(tensors: Mapping[str, Tensor], directory: Path, *, config: Any) -> None:
    """Write adapters as peft does.

    Args:
        tensors: whole tensors on the CPU, by their names in the model.
        directory: made if needed.
        config: what :func:`add_adapters` returned.
    """
    directory.mkdir(parents=True, exist_ok=True)
    save_file(adapter_file_names(tensors), directory / WEIGHTS_FILE, metadata={"format": "pt"})
    config.save_pretrained(str(directory))


def load_adapters(model: PreTrainedModel, directory: Path) -> None:
    """Put the adapters in ``directory`` into ``model``, strictly.

    Raises:
        InputError: they cannot be read, or are those of another model.
    """
    from peft import LoraConfig

    tensors = read_tensors(directory / WEIGHTS_FILE)
    try:
        config = LoraConfig.from_pretrained(str(directory))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{directory / CONFIG_FILE}: cannot be read: {error}") from error
    head = _output_name(model)
    if any(name.startswith(f"{_PREFIX}{head}.") for name in tensors) and is_tied(model):
        untie(model)
    try:
        _inject(config, model)
    except ValueError as error:
        raise InputError(f"{directory}: adapters of another model: {error}") from error
    put_adapters(model, tensors, where=directory)


@torch.no_grad()
def put_adapters(model: PreTrainedModel, tensors: Mapping[str, Tensor], *, where: Path) -> None:
    """Give the adapters of ``model`` the values in a file of peft's.

    Raises:
        InputError: a tensor is missing, surplus, or of another shape.
    """
    own = {name: p for name, p in model.named_parameters() if ".lora_" in name}
    wanted = adapter_file_names(own)
    odd = sorted(wanted.keys() ^ tensors.keys())
    odd += [n for n in wanted.keys() & tensors.keys() if wanted[n].shape != tensors[n].shape]
    if odd:
        raise InputError(f"{where}: adapters of another model: {odd[0]} does not fit")
    for parameter, name in zip(own.values(), wanted, strict=True):
        parameter.data = tensors[name].to(device=parameter.device, dtype=torch.float32)


@torch.no_grad()
def merge_adapters(model: PreTrainedModel) -> None:
    """Add the adapters to the weights beside them, in fp32, and remove them.

    Where a weight is quantised its adapter stays, switched on.
    """
    for name, module in list(model.named_modules()):
        if not hasattr(module, "lora_A"):
            continue
        layer: Any = module
        weight = layer.base_layer.weight
        if not isinstance(layer.base_layer, nn.Linear | Conv1D) or not weight.is_floating_point():
            continue
        delta = layer.get_delta_weight(_NAME)
        weight.copy_((weight.float() + delta.float()).to(weight.dtype))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.base_layer)
    model.requires_grad_(False)
    if not _adapter_layers(model):
        # What transformers looks at to see whether a model has adapters.
        model.__dict__.pop("peft_config", None)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file.

    Raises:
        InputError: it is not there or not readable.
    """
    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: not a readable safetensors file: {error}") from error


def _inject(config: Any, model: PreTrainedModel) -> None:
    from peft import inject_adapter_in_model

    with warnings.catch_warnings():
        # A model may have layers of both kinds; peft finds out which one each is, and says so.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        inject_adapter_in_model(config, model, adapter_name=_NAME)
    # New layers are in training mode whatever the model is in.
    model.train(model.training)


def _adapter_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def _output_name(model: PreTrainedModel) -> str:
    head = model.get_output_embeddings()
    names: list[str] = [name for name, module in model.named_modules() if module is head]
    return names[0]


def _adapted_names(
    model: PreTrainedModel, wanted: tuple[str, ...] | None, *, with_head: bool
) -> list[str]:
    """The full names of the layers that get an adapter."""
    head = _output_name(model)
    linear = [
        name
        for name, module in model.named_modules()
        # Quantised layers are nn.Linear too.
        if isinstance(module, nn.Linear | Conv1D) and name != head
    ]
    if wanted is not None:
        known = {name.rpartition(".")[2] for name in linear}
        unknown = sorted(set(wanted) - known)
        if unknown:
            raise InputError(
                f"train.medusa2.lora.target_modules: the base model has no linear layer named "
                f"{unknown[0]}; choose from {', '.join(sorted(known))}"
            )
        linear = [name for name in linear if name.rpartition(".")[2] in wanted]
    return [*linear, head] if with_head else linear
