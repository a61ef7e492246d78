"""Hidden states and logits of any causal language model, the same way for all of them.

Features are the input of ``get_output_embeddings()``. What an architecture does to the logits
after that projection (a scale, a soft cap) is code in its ``forward``; :func:`check_features` finds
it out on a few tokens, and refuses a model whose logits it cannot reproduce.

Shapes: B batch, T sequence, D hidden, V rows of ``lm_head``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from medusa_train.errors import InputError

# Config attributes that transformers models read after lm_head, and what they do with the value.
_SCALES = ("logit_scale", "lm_head_multiplier")
_DIVISORS = ("logits_scaling",)
_SOFT_CAPS = ("final_logit_softcapping",)


@dataclass(frozen=True, slots=True)
class LogitRule:
    """What the model does to the output of ``lm_head``: ``cap · tanh(scale · x / cap)``.

    Attributes:
        scale: a factor, 1.0 for most models.
        soft_cap: the cap, or None for no cap.
    """

    scale: float = 1.0
    soft_cap: float | None = None

    def apply(self, logits: Tensor) -> Tensor:
        """[..., V] → [..., V]."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        return logits

    def slope(self, adjusted: Tensor) -> Tensor:
        """The derivative of :meth:`apply`, from what it returned: [..., V] → [..., V]."""
        slope = torch.full_like(adjusted, self.scale)
        if self.soft_cap is not None:
            slope *= 1.0 - (adjusted / self.soft_cap) ** 2
        return slope


def hidden_states(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    attention_mask: Tensor | Mapping[str, Tensor] | None = None,
    position_ids: Tensor | None = None,
) -> Tensor:
    """The input of the model's ``lm_head``, [B, T, D], for ``input_ids`` [B, T]."""
    output = decoder(model)(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        use_cache=False,
    )
    states: Tensor = output.last_hidden_state
    return states


def decoder(model: PreTrainedModel) -> nn.Module:
    """The part of a causal LM that ends before ``lm_head``."""
    inner: nn.Module = model.base_model
    return inner


def output_projection(model: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """The model's ``lm_head``: weight [V, D], and bias [V] or None.

    Where DeepSpeed has sharded the model, they are whole copies, and all processes call this.

    Raises:
        InputError: the model has none.
    """
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    if weight is None:
        raise InputError(
            f"{_name(model)}: the model has no output embedding, so it is no causal language model"
        )
    return _whole(weight), _whole(getattr(head, "bias", None))


@torch.no_grad()
def check_features(model: PreTrainedModel, *, num_probe_tokens: int = 8) -> LogitRule:
    """Prove that our features and logits are the model's, on a few tokens.

    Returns:
        What the model does after ``lm_head``.

    Raises:
        InputError: the features or the logits differ; the model is named.
    """
    weight, bias = output_projection(model)
    count = max(2, min(num_probe_tokens, weight.shape[0]))
    # Spread over the vocabulary: any ids will do, and ids at its end are often special.
    step = max(1, weight.shape[0] // (2 * count))
    ids = torch.arange(count, device=weight.device)[None] * step
    seen: list[Tensor] = []
    head = model.get_output_embeddings()
    hook = head.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    was_training = model.training
    model.eval()
    try:
        logits = model(input_ids=ids, use_cache=False).logits
        ours = hidden_states(model, ids)
    finally:
        hook.remove()
        model.train(was_training)
    if len(seen) != 1 or seen[0].shape != ours.shape or not is_close(ours, seen[0]):
        raise InputError(
            f"{_name(model)}: the input of its lm_head is not its decoder's last hidden state, so "
            "heads cannot be trained on this architecture"
        )
    raw = F.linear(seen[0], weight, bias)
    for rule in candidate_rules(model.config):
        if is_close(rule.apply(raw), logits):
            return rule
    raise InputError(
        f"{_name(model)}: its logits are neither lm_head's output nor a scaled or soft-capped form "
        "of it that its config names, so heads cannot be trained on this architecture"
    )


def candidate_rules(config: Any) -> list[LogitRule]:
    """What a model with this config may do after ``lm_head``; the last of them is nothing."""
    text_config = config.get_text_config()

    def values(names: tuple[str, ...]) -> list[float]:
        found = [getattr(text_config, name, None) for name in names]
        return [float(value) for value in found if isinstance(value, int | float) and value]

    scales = [1.0, *values(_SCALES), *(1.0 / value for value in values(_DIVISORS))]
    caps: list[float | None] = [None, *values(_SOFT_CAPS)]
    # The richest rule first: where a scale of 1.0 and the config's agree to rounding, the config's.
    return [LogitRule(scale, cap) for cap in reversed(caps) for scale in reversed(scales)]


def _whole(parameter: Any) -> Any:
    if not hasattr(parameter, "ds_id"):
        return parameter
    # By name: transformers refuses exported code that imports what is not installed.
    deepspeed = importlib.import_module("deepspeed")
    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def is_close(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two results agree to the rounding of their dtype, relative to the greatest number."""
    tolerance = {torch.float64: 1e-8, torch.float32: 1e-4}.get(theirs.dtype, 2e-2)
    difference = (ours.double() - theirs.double()).abs().max()
    return bool(difference <= tolerance * theirs.double().abs().max().clamp(min=1e-3))


def _name(model: PreTrainedModel) -> str:
    return f"{model.config.name_or_path or 'the base model'} ({type(model).__name__})"
