"""The original base model and the changed one, loaded together in fp32.

A changed model is a plain model directory, or a directory of adapters that peft reads. Adapters lie
on the one model that is in memory and are switched off for the original, where that undoes all of
them.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel

from medusa_train.base_model.fingerprint import base_fingerprint
from medusa_train.base_model.load import BaseModel, load_base_model
from medusa_train.console import log
from medusa_train.errors import InputError
from medusa_train.json_values import fingerprint, read_json
from medusa_train.run_dir import RunDir, file_fingerprint

ADAPTER_CONFIG = "adapter_config.json"
DTYPE = "float32"
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")

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


def changed_directory(run: RunDir) -> Path | None:
    """The changed base of a run: its adapters, or else its whole model; None: there is neither."""
    for directory, name in ((run.root / "adapters", ADAPTER_CONFIG), (run.root / "base", "")):
        if (directory / (name or "config.json")).exists():
            return directory
    return None


def is_adapters(directory: Path) -> bool:
    """Whether it holds adapters rather than a model."""
    return (directory / ADAPTER_CONFIG).exists()


def changed_fingerprint(directory: Path) -> str:
    """The fingerprint of a changed model's files.

    Raises:
        InputError: it is neither a model nor adapters.
    """
    if not is_adapters(directory):
        return base_fingerprint(str(directory))
    config = {k: v for k, v in _adapter_config(directory).items() if not k.endswith("_path")}
    weights = [directory / name for name in _ADAPTER_WEIGHTS if (directory / name).exists()]
    if not weights:
        raise InputError(f"{directory}: no {_ADAPTER_WEIGHTS[0]} in it, so it has no adapters")
    return fingerprint({"config": config, "weights": file_fingerprint(weights[0])})


def named_base(directory: Path) -> str | None:
    """The base model that adapters name; None for a plain model."""
    if not is_adapters(directory):
        return None
    name = _adapter_config(directory).get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


def check_changed(directory: Path) -> None:
    """Refuse what is no changed model, before weights are loaded.

    Raises:
        InputError: no such directory, nothing in it, or adapters without peft.
    """
    if not directory.is_dir():
        raise InputError(
            f"{directory}: no such directory; give a model's, or one of adapters that peft reads"
        )
    changed_fingerprint(directory)
    if is_adapters(directory) and importlib.util.find_spec("peft") is None:
        raise InputError(
            f"{directory}: holds adapters, and the package peft is not installed; pip install peft"
        )


def load_pair(options: Mapping[str, Any], *, changed: Path) -> Pair:
    """Load both models in fp32.

    Args:
        options: of :func:`medusa_train.base_model.load.load_base_model` for the original: its name,
            and not its dtype.
        changed: directory of the changed model, which :func:`check_changed` lets pass.

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
    from peft import PeftModel

    log(f"loading the adapters in {directory}")
    config = _adapter_config(directory)
    # Trained biases stay when other adapters are switched off.
    can_switch = config.get("peft_type") == "LORA" and config.get("bias", "none") == "none"
    under = original if can_switch else load_base_model(**options, dtype=DTYPE)
    try:
        with warnings.catch_warnings():
            # peft asks a model of transformers by a name that transformers has given up.
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
            # Nothing is merged here, so a tied lm_head with an adapter is no trouble.
            warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
            adapted = PeftModel.from_pretrained(under.model, str(directory))
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


def _adapter_config(directory: Path) -> dict[str, Any]:
    path = directory / ADAPTER_CONFIG
    config = read_json(path)
    if not isinstance(config, dict):
        raise InputError(f"{path}: must be a JSON object, got {type(config).__name__}")
    return config
