"""The original base model and the changed one, loaded together in fp32.

A changed model is a plain model directory, or a directory of adapters that peft reads. Adapters lie
on the one model that is in memory and are switched off for the original, where that undoes all of
them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel

from medusa_train.base_model.changed import adapter_config, changed_fingerprint, is_adapters
from medusa_train.base_model.load import BaseModel, load_base_model
from medusa_train.console import log
from medusa_train.errors import InputError

DTYPE = "float32"
_HARMLESS_STARTS = (True, False, "gaussian")
_LORA = ".lora_"

Side = Literal["original", "changed"]
SIDES: tuple[Side, ...] = ("original", "changed")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two models that read the same token ids.

    Attributes:
        original: the base before training.
        changed: the same after it; where adapters are switched, both share one ``model``.
        adapters: peft's model, where its adapters are switched off for the original.
    """

    original: BaseModel
    changed: BaseModel
    adapters: Any = None

    @contextmanager
    def using(self, side: Side) -> Iterator[BaseModel]:
        """One of the models, for use inside the block alone."""
        is_off = self.adapters is not None and side == "original"
        with self.adapters.disable_adapter() if is_off else nullcontext():
            yield self.original if side == "original" else self.changed


def load_pair(options: Mapping[str, Any], *, changed: Path) -> Pair:
    """Load both models in fp32.

    Args:
        options: of :func:`medusa_train.base_model.load.load_base_model` for the original: its name,
            and not its dtype.
        changed: directory of the changed model, which
            :func:`medusa_train.base_model.changed.check_changed` lets pass.

    Raises:
        InputError: one of them cannot be loaded, or they do not have the same tokens.
    """
    log(f"loading {options['name_or_path']} in {DTYPE}")
    original = load_base_model(**options, dtype=DTYPE)
    if is_adapters(changed):
        return _with_adapters(original, options, changed)
    log(f"loading {changed} in {DTYPE}")
    plain = {k: options[k] for k in ("attn_implementation", "trust_remote_code") if k in options}
    other = load_base_model(str(changed), dtype=DTYPE, **plain)
    if original.tokenizer.get_vocab() != other.tokenizer.get_vocab():
        raise InputError(
            f"{changed}: its tokenizer has other tokens than that of {original.name_or_path}, so "
            "their distributions cannot be compared; give the base that it was trained from "
            "(--base-model)"
        )
    return Pair(original, other)


def _with_adapters(original: BaseModel, options: Mapping[str, Any], directory: Path) -> Pair:
    from peft import PeftModel, get_peft_model_state_dict
    from peft.utils import load_peft_weights

    log(f"loading the adapters in {directory}")
    can_switch = _can_be_switched_off(adapter_config(directory))
    under = original if can_switch else load_base_model(**options, dtype=DTYPE)
    try:
        with warnings.catch_warnings():
            # peft asks a model of transformers by a name that transformers has given up.
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
            # Nothing is merged here, so a tied lm_head with an adapter is no trouble.
            warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
            # Names are compared below, for peft keeps silent about some of them.
            warnings.filterwarnings("ignore", message="Found missing adapter keys")
            adapted = PeftModel.from_pretrained(under.model, str(directory))
        names = {name for name in load_peft_weights(str(directory), device="cpu") if _LORA in name}
        known = {
            name
            for name in get_peft_model_state_dict(adapted, save_embedding_layers=False)
            if _LORA in name
        }
        if odd := sorted(names ^ known):
            raise ValueError(f"{odd[0]} is {'missing' if odd[0] in known else 'not in it'}")
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{directory}: the adapters do not fit {original.name_or_path}: {reason}; give the "
            "base that they were trained on (--base-model)"
        ) from error
    adapted.eval().requires_grad_(False)
    inner = adapted.get_base_model()
    assert isinstance(inner, PreTrainedModel)
    changed = replace(
        under,
        model=inner,
        name_or_path=str(directory),
        fingerprint=changed_fingerprint(directory),
    )
    if can_switch:
        original = replace(original, model=changed.model)
    return Pair(original, changed, adapters=adapted if can_switch else None)


def _can_be_switched_off(config: Mapping[str, Any]) -> bool:
    """Whether a model without its adapters is the original again.

    Trained biases stay when adapters are switched off, and some ways to begin a LoRA take a part of
    the model's own weights away.
    """
    return (
        config.get("peft_type") == "LORA"
        and config.get("bias", "none") == "none"
        and config.get("init_lora_weights", True) in _HARMLESS_STARTS
    )
