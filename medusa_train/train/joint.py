"""The base that is trained with its heads, its original, and the loss between the two (Medusa-2).

``L_base`` is the next-token cross-entropy, or KL(original ‖ trained), at every supervised token:
with n of them in the whole accumulated batch of all processes, their sum ÷ n. A source position t
stands for token t + 1, so the rows of a batch are all supervised tokens, and no others.

Shapes: B · T tokens of a batch, N source positions, D hidden, V rows of ``lm_head``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from medusa_train.base_model.adapters import adapters_off, current_projection
from medusa_train.base_model.features import LogitRule, hidden_states, output_projection
from medusa_train.loss_memory import LossMemory
from medusa_train.loss_targets import StoredTeacher, Teacher
from medusa_train.losses import LogitAdjust, chunked_cross_entropy

Batch = Mapping[str, Tensor]


class JointPass(NamedTuple):
    """What one pass over a batch gives.

    Attributes:
        states: [N, D] of the trained base, for the heads; their gradient goes into it as far as the
            recipe says.
        original_states: [N, D] of the original, or None where there is none.
        loss_sum: [] the base's loss, summed over the N supervised tokens.
    """

    states: Tensor
    original_states: Tensor | None
    loss_sum: Tensor


@dataclass(frozen=True, slots=True)
class HeadGradient:
    """How much of the heads' gradient goes into the base.

    Attributes:
        scale: it counts this much.
        detach_probability: of a batch whose heads send none.
    """

    scale: float = 1.0
    detach_probability: float = 0.0

    def apply(self, states: Tensor) -> Tensor:
        """The same numbers, with that gradient: [N, D] → [N, D]."""
        scale = self.scale
        if self.detach_probability and torch.rand(()).item() < self.detach_probability:
            scale = 0.0
        if scale == 1.0 and not self.detach_probability:
            return states
        # Times 0 rather than detached: under ZeRO-3 all processes must run the same modules, and
        # each draws for its own batch.
        fixed = states.detach()
        return fixed + scale * (states - fixed)


class JointBase(nn.Module):
    """The base under training.

    Args:
        model: the base; what requires gradients in it is trained.
        original: a second copy of it as it was; None: ``model`` with its adapters off.
        has_original: whether there is an original: then evaluation gives the divergence from it.
        trains_with_original: whether it runs at each step of the training too.
        rule: what the model does to its logits.
        loss: of the base.
        gradient: how much of the heads' gradient goes into the base.
        chunk_size: rows of logits that exist at one time; None chooses by V.
        stored: kind of the original's log-probabilities that a batch brings with it, in
            ``teacher_ids`` and ``teacher_logprobs`` [N, S]; None where the original runs.
        keeps_memory: keep the large tensors of the loss for the next step.
    """

    original: PreTrainedModel | None

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        original: PreTrainedModel | None,
        has_original: bool,
        trains_with_original: bool,
        rule: LogitRule,
        loss: Literal["kl", "cross_entropy"],
        gradient: HeadGradient,
        chunk_size: int | None,
        stored: Literal["top", "samples"] | None = None,
        keeps_memory: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        object.__setattr__(self, "original", original)  # nothing of it is trained or saved
        self.has_original = has_original
        self.trains_with_original = trains_with_original
        self.rule = rule
        self.loss = loss
        self.gradient = gradient
        self.chunk_size = chunk_size
        self.stored: Literal["top", "samples"] | None = stored
        self.memory = LossMemory() if keeps_memory else None

    def forward(self, batch: Batch, *, compute_dtype: torch.dtype) -> JointPass:
        """Run the base, and its original, over a batch.

        Args:
            batch: ``input_ids`` [B, T], ``source_index`` [N] into the flattened [B · T], and
                ``position_ids`` where conversations are packed.
            compute_dtype: dtype of the projection to the vocabulary.
        """
        index = batch["source_index"]
        labels = batch["input_ids"].flatten()[(index + 1) % batch["input_ids"].numel()]
        original_states: Tensor | None = None
        teacher: Teacher | StoredTeacher | None = None
        is_divergence = self.loss_name == "kl"
        if self.stored is not None:
            teacher = StoredTeacher(batch["teacher_ids"], batch["teacher_logprobs"], self.stored)
        elif self.trains_with_original or (self.has_original and not self.training):
            original_states, teacher = self._original(batch)
        states = _states(self.model, batch)
        weight, bias = current_projection(self.model)
        with torch.autocast(states.device.type, enabled=False):
            result = chunked_cross_entropy(
                states.to(_sum_dtype(states)),
                weight,
                bias=bias,
                labels=labels,
                teacher=teacher if is_divergence else None,
                teacher_states=original_states,
                chunk_size=self.chunk_size,
                compute_dtype=compute_dtype,
                adjust=None
                if self.rule == LogitRule()
                else LogitAdjust(self.rule.apply, self.rule.slope),
                leaves_out=not is_divergence,
                memory=self.memory,
            )
        heads_states = self.gradient.apply(states) if self.training else states
        return JointPass(heads_states, original_states, result.loss_sum)

    @property
    def loss_name(self) -> str:
        """What the loss is now: ``kl`` or ``cross_entropy``."""
        return "kl" if self.has_original and not self.training else self.loss

    def lm_head(self) -> tuple[Tensor, Tensor | None]:
        """The trained base's, for heads that share it: weight [V, D], and bias [V] or None.

        Under ZeRO-3 it is whole until the forward pass of the module that asks for it ends.
        """
        return current_projection(self.model)

    @torch.no_grad()
    def _original(self, batch: Batch) -> tuple[Tensor, Teacher]:
        """The original's states [N, D], and its distribution."""
        model = self.model if self.original is None else self.original
        was_training = model.training
        model.eval()
        with adapters_off(model) if self.original is None else nullcontext():
            states = _states(model, batch)
            weight, bias = (
                current_projection(model) if self.original is None else output_projection(model)
            )
        model.train(was_training)
        teacher = Teacher(weight, bias, 1.0, self.rule.apply, as_divergence=True)
        return states, teacher


def without_dropout(model: PreTrainedModel) -> None:
    """Turn the model's own dropout off: the original is to be compared with it as it is.

    That of adapters, which come later, stays.
    """
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def _states(model: PreTrainedModel, batch: Batch) -> Tensor:
    with _products_in_half(model):
        states = hidden_states(model, batch["input_ids"], position_ids=batch.get("position_ids"))
    return states.flatten(0, 1)[batch["source_index"]]


def _products_in_half(model: PreTrainedModel) -> AbstractContextManager[object]:
    """Adapters are fp32 weights in layers of half the width, and compute as these do.

    With and without adapters it is the same, so that they change nothing while they are zero.
    """
    trained = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if model.dtype != torch.bfloat16 or trained <= {torch.bfloat16}:
        return nullcontext()
    return torch.autocast(model.device.type, torch.bfloat16)


def _sum_dtype(states: Tensor) -> torch.dtype:
    return torch.float64 if states.dtype == torch.float64 else torch.float32
