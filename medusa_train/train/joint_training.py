"""How a base is trained with its heads: learning rates, λ0, and what a checkpoint says of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerState, TrainingArguments

from medusa_train.base_model.trained import trained_fingerprint
from medusa_train.errors import InputError
from medusa_train.heads.config import BaseIdentity, TrainedFrom
from medusa_train.train.guard import Guard
from medusa_train.train.module import HeadsModule
from medusa_train.train.schedule import HeadLossSchedule


@dataclass(frozen=True, slots=True)
class JointTraining:
    """What the Trainer needs to know besides the module.

    Attributes:
        schedule: of λ0.
        head_lr_multiplier: the heads' learning rate is the base's times this.
        adapters: peft's configuration, or None where the base's own weights are trained.
        guard: keeps the base near the original, or None.
    """

    schedule: HeadLossSchedule
    head_lr_multiplier: float
    adapters: Any
    guard: Guard | None

    def head_loss_weight(self, state: TrainerState, *, back: int = 0) -> float:
        """λ0 of the step that comes, or of one ``back`` from it, as far as the guard leaves it."""
        step = max(0, state.global_step - back)
        weight = self.schedule.at(step, num_steps=state.max_steps)
        return weight if self.guard is None else weight * self.guard.factor

    @property
    def directory_name(self) -> str:
        """Where a checkpoint has what is trained of the base."""
        return "trained_weights" if self.adapters is None else "adapters"


def joint_optimizer(
    module: HeadsModule,
    args: TrainingArguments,
    *,
    multiplier: float,
    decaying: Collection[str],
    chosen: tuple[Any, dict[str, Any]],
) -> torch.optim.Optimizer:
    """The chosen optimizer over the base's tensors and, at another learning rate, the heads'.

    Args:
        module: base and heads.
        args: learning rate and weight decay.
        multiplier: the heads' learning rate is the base's times this.
        decaying: names of the tensors that have weight decay.
        chosen: the optimizer's class and its arguments.

    Raises:
        InputError: the optimizer makes its own groups.
    """
    optimizer_class, kwargs = chosen
    if {"params", "model", "optimizer_dict"} & kwargs.keys() or not isinstance(
        optimizer_class, type
    ):
        raise InputError(
            f"train.trainer.optim: {args.optim} groups the tensors by itself, and method: medusa2 "
            "has groups for base and heads; choose another, such as adamw_torch"
        )
    heads = {id(parameter) for parameter in module.heads.parameters()}
    groups: dict[tuple[bool, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            groups.setdefault((id(parameter) in heads, name in decaying), []).append(parameter)
    optimizer: torch.optim.Optimizer = optimizer_class(
        [
            {
                "params": parameters,
                "lr": args.learning_rate * (multiplier if is_head else 1.0),
                "weight_decay": args.weight_decay if decays else 0.0,
            }
            for (is_head, decays), parameters in sorted(groups.items(), key=lambda item: item[0])
        ],
        **kwargs,
    )
    return optimizer


def trained_identity(
    original: BaseIdentity, trained: Path, *, directory: str | None = None
) -> BaseIdentity:
    """What a heads directory says of a base that was trained with the heads.

    Args:
        original: of the base before.
        trained: directory of adapters or trained weights.
        directory: where a reader finds what was trained, from the heads directory; None: in it,
            under its own name.
    """
    return replace(
        original,
        fingerprint=trained_fingerprint(original.fingerprint, trained),
        trained=TrainedFrom(original.fingerprint, directory or trained.name),
    )
