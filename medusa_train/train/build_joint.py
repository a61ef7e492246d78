"""From a recipe to a base that is trained with its heads."""

from __future__ import annotations

import copy
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel, TrainingArguments

from medusa_train.base_model.adapters import AdapterOptions, add_adapters, keep_gradients
from medusa_train.base_model.features import decoder
from medusa_train.base_model.load import BaseModel
from medusa_train.console import log
from medusa_train.errors import InputError
from medusa_train.recipe.deepspeed_block import read_deepspeed
from medusa_train.recipe.medusa2 import LoraSection, Medusa2Section
from medusa_train.recipe.schema import Recipe
from medusa_train.train.guard import Guard
from medusa_train.train.joint import HeadGradient, JointBase, without_dropout
from medusa_train.train.joint_training import JointTraining
from medusa_train.train.schedule import HeadLossSchedule


def joint_parts(
    recipe: Recipe,
    base: BaseModel,
    *,
    original: BaseModel | None,
    args: TrainingArguments,
    stored: Literal["top", "samples"] | None = None,
) -> tuple[JointBase, JointTraining]:
    """The base under training, and what the Trainer needs to know of it.

    Args:
        recipe: with ``method: medusa2``.
        base: loaded in the type in which it is trained; its model is changed here.
        original: a second copy of it, or None.
        args: of the Trainer.
        stored: kind of the log-probabilities that the data brings, for ``teacher: stored``.

    Raises:
        InputError: adapters do not fit the base, or it has fewer layers than shall be trained.
    """
    section = recipe.train.joint
    assert section is not None
    model = base.model
    without_dropout(model)
    keep_gradients(model)
    has_original = needs_original(recipe)
    copied = None
    if has_original and section.teacher == "frozen_copy":
        copied = copy.deepcopy(model) if original is None else original.model
    adapters = make_trainable(model, section)
    num = sum(_size(parameter) for parameter in model.parameters() if parameter.requires_grad)
    log(f"base model: {num:,} parameters are trained ({section.trained})")
    if args.deepspeed is None:
        nn.Module.to(model, args.device)  # adapters are made beside the weights, and in fp32
    source = JointBase(
        model,
        original=copied,
        has_original=has_original,
        trains_with_original=section.base_loss == "kl" or recipe.train.soft_target_weight > 0,
        rule=base.logit_rule,
        loss=section.base_loss,
        gradient=HeadGradient(section.head_gradient_scale, section.head_detach_probability),
        chunk_size=recipe.train.loss_chunk_size,
        stored=stored,
        keeps_memory=args.device.type == "cpu" and args.deepspeed is None,
    )
    return source, JointTraining(
        schedule=HeadLossSchedule(
            weight=section.head_loss_weight,
            kind=section.head_loss_schedule,
            share=section.head_loss_share,
            delay=section.head_loss_delay,
        ),
        head_lr_multiplier=section.head_lr_multiplier,
        adapters=adapters,
        guard=None if section.guard is None else Guard(**section.guard.model_dump()),
    )


def needs_original(recipe: Recipe) -> bool:
    """Whether training or its evaluation compares the base with what it was."""
    section = recipe.train.joint
    if section is None:
        return False
    is_asked = section.base_loss == "kl" or recipe.train.soft_target_weight > 0
    # With adapters it is there anyway, and evaluation says how far the base has moved.
    return is_asked or section.guard is not None or section.trained == "lora"


def trained_in_float32(recipe: Recipe) -> bool:
    """Whether the base's weights must be fp32: where they are trained, and nobody keeps a copy."""
    section = recipe.train.joint
    if section is None or section.trained == "lora":
        return False
    if recipe.deepspeed is None:
        return True
    bf16 = read_deepspeed(recipe.deepspeed).get("bf16", {})
    enabled = bf16.get("enabled", False)
    return not (bool(recipe.train.trainer.get("bf16")) if enabled == "auto" else enabled)


def make_trainable(model: PreTrainedModel, section: Medusa2Section) -> Any:
    """Say which tensors of ``model`` are trained; adapters are put into it.

    Returns:
        peft's configuration of adapters, if it is those.

    Raises:
        InputError: they do not fit the model, or it has fewer layers than shall be trained.
    """
    match section.trained:
        case "lora":
            return add_adapters(model, _adapter_options(section.lora or LoraSection()))
        case "full":
            model.requires_grad_(True)
        case "last_layers":
            assert section.num_last_layers is not None
            for module in _last_modules(model, section.num_last_layers):
                module.requires_grad_(True)
    return None


def _adapter_options(section: LoraSection) -> AdapterOptions:
    names = section.target_modules
    return AdapterOptions(
        rank=section.rank,
        alpha=section.alpha,
        dropout=section.dropout,
        target_modules=None if names is None else tuple(names),
        lm_head=section.lm_head,
        untie_lm_head=section.untie_lm_head,
    )


def _last_modules(model: PreTrainedModel, number: int) -> list[nn.Module]:
    """The last layers, and the norm behind them."""
    owners = [
        (owner, child)
        for owner in decoder(model).modules()
        for child in owner.children()
        if isinstance(child, nn.ModuleList) and len(child)
    ]
    owner, layers = max(owners, key=lambda pair: sum(_size(p) for p in pair[1].parameters()))
    if number > len(layers):
        raise InputError(
            f"train.medusa2.num_last_layers: the base model has {len(layers)} layers, got {number}"
        )
    norms = [child for child in owner.children() if "Norm" in type(child).__name__]
    return [*list(layers)[-number:], *norms]


def _size(parameter: Any) -> int:
    """Also of a parameter of which this process holds a part."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))
