"""Load a base model and its tokenizer: a hub id, a local directory, or a GGUF file."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from medusa_train.base_model.features import LogitRule, check_features
from medusa_train.base_model.fingerprint import base_fingerprint, first_line
from medusa_train.base_model.naming import check_name
from medusa_train.base_model.sharded import run_sharded, sharded_loading, whole_layers
from medusa_train.base_model.trained import apply_trained, trained_fingerprint
from medusa_train.errors import InputError


@dataclass(frozen=True, slots=True)
class BaseModel:
    """A loaded base model.

    Attributes:
        model: in eval mode, frozen.
        tokenizer: the model's own.
        name_or_path: as the user gave it.
        revision: as the user gave it.
        gguf_file: as the user gave it.
        fingerprint: of the model's files.
        stop_ids: ids at which its generation stops, ascending.
        logit_rule: what the model does after its ``lm_head``.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name_or_path: str
    revision: str | None
    gguf_file: str | None
    fingerprint: str
    stop_ids: tuple[int, ...]
    logit_rule: LogitRule

    @property
    def num_tokens(self) -> int:
        """Ids that are tokens: ``lm_head`` may have more rows than the tokenizer has ids."""
        return len(self.tokenizer)

    @property
    def device(self) -> torch.device:
        """Where the model's input goes."""
        return self.model.device


def load_base_model(
    name_or_path: str,
    *,
    gguf_file: str | None = None,
    revision: str | None = None,
    dtype: str = "auto",
    quantization: Literal["8bit", "4bit"] | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    device: torch.device | str | None = None,
    zero3: Mapping[str, Any] | None = None,
    runs_alone: bool = True,
    trained: Path | None = None,
) -> BaseModel:
    """Load a base model frozen and in eval mode, and check that our logits are the model's.

    Args:
        name_or_path: a hub id or a directory.
        gguf_file: the name of a GGUF file in it; it is dequantised.
        revision: a branch, tag or commit on the hub.
        dtype: ``auto`` (that of the files), ``float32``, ``bfloat16`` or ``float16``.
        quantization: keep the layers' weights in 8 or 4 bits, by bitsandbytes.
        attn_implementation: as in transformers; None leaves the choice to it.
        trust_remote_code: run code that comes with the model. Off unless asked for.
        device: None is accelerate's choice.
        zero3: DeepSpeed configuration with which the weights are sharded over the processes; all of
            them call this. None gives every process the whole model.
        runs_alone: with ``zero3``, whether the model runs by itself; not where it becomes a part of
            a module that DeepSpeed trains.
        trained: what training made of it (:mod:`medusa_train.base_model.trained`), applied to it;
            it then has the fingerprint of the trained base.

    Raises:
        InputError: there is no such model, it is no causal LM, its logits cannot be reproduced, or
            bitsandbytes is wanted and not installed.
    """
    fingerprint = base_fingerprint(name_or_path, gguf_file=gguf_file, revision=revision)
    tokenizer = load_tokenizer(
        name_or_path, gguf_file=gguf_file, revision=revision, trust_remote_code=trust_remote_code
    )
    if not sys.stderr.isatty():
        # In a log file transformers' bar is one long line.
        disable_progress_bar()
    options: dict[str, Any] = {
        "revision": revision,
        "dtype": dtype if dtype == "auto" else getattr(torch, dtype),
        "trust_remote_code": trust_remote_code,
    }
    if gguf_file is not None:
        options["gguf_file"] = gguf_file
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    device = device or default_device()
    if quantization is not None:
        options |= _quantised(quantization, device)
    try:
        if zero3 is None:
            model = AutoModelForCausalLM.from_pretrained(name_or_path, **options)
            # nn.Module.to is the same call; transformers wraps it so that mypy cannot read it.
            torch.nn.Module.to(model, device)
            model.eval().requires_grad_(False)
            if trained is not None:
                apply_trained(model, trained)
                fingerprint = trained_fingerprint(fingerprint, trained)
            logit_rule = check_features(model)
        else:
            config = AutoConfig.from_pretrained(name_or_path, **options)
            with sharded_loading(zero3, dtype=config.dtype or torch.float32) as sharding:
                model = AutoModelForCausalLM.from_pretrained(name_or_path, **options)
            model.eval().requires_grad_(False)
            if runs_alone:
                logit_rule = run_sharded(model, sharding, check=lambda: check_features(model))
            else:
                with whole_layers(model):
                    logit_rule = check_features(model)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise InputError(f"{name_or_path}: cannot be loaded: {first_line(error)}") from error
    return BaseModel(
        model=model,
        tokenizer=tokenizer,
        name_or_path=name_or_path,
        revision=revision,
        gguf_file=gguf_file,
        fingerprint=fingerprint,
        stop_ids=tuple(_stop_ids(model.generation_config, tokenizer)),
        logit_rule=logit_rule,
    )


def _quantised(quantization: str, device: torch.device | str) -> dict[str, Any]:
    """Options of ``from_pretrained``; the weights are quantised where they will be used."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise InputError(
            "base_model.quantization: needs the package bitsandbytes; pip install "
            '"medusa-train[quantization]"'
        )
    if quantization == "8bit":
        config = BitsAndBytesConfig(load_in_8bit=True)
    else:
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16
        )
    return {"quantization_config": config, "device_map": {"": str(device)}}


def load_tokenizer(
    name_or_path: str,
    *,
    gguf_file: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a base model.

    Raises:
        InputError: there is none.
    """
    check_name(name_or_path)
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    if gguf_file is not None:
        options["gguf_file"] = gguf_file
    try:
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, **options)
    except (OSError, ValueError, ImportError) as error:
        raise InputError(
            f"{name_or_path}: its tokenizer cannot be loaded: {first_line(error)}"
        ) from error
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def load_stop_ids(
    name_or_path: str,
    *,
    tokenizer: PreTrainedTokenizerBase,
    revision: str | None = None,
) -> tuple[int, ...]:
    """The ids at which the model's generation stops, without loading its weights."""
    check_name(name_or_path)
    try:
        config: GenerationConfig | None = GenerationConfig.from_pretrained(
            name_or_path, revision=revision or "main"
        )
    except OSError:
        # A model need not ship one; then its own config says the same, as when it is loaded.
        config = _generation_config(name_or_path, revision=revision)
    return tuple(_stop_ids(config, tokenizer))


def load_dtype(name_or_path: str, *, dtype: str, revision: str | None = None) -> torch.dtype | None:
    """The type that the model's weights will have, without loading them; None where that is open.

    Args:
        name_or_path: a hub id or a directory.
        dtype: as a recipe names it; ``auto`` is that of the files.
        revision: a branch, tag or commit on the hub.
    """
    if dtype != "auto":
        chosen: torch.dtype = getattr(torch, dtype)
        return chosen
    check_name(name_or_path)
    try:
        config = AutoConfig.from_pretrained(name_or_path, revision=revision or "main")
    except (OSError, ValueError):
        # Loading says it better.
        return None
    found = config.dtype
    return found if isinstance(found, torch.dtype) else None


def _generation_config(name_or_path: str, *, revision: str | None) -> GenerationConfig | None:
    try:
        config = AutoConfig.from_pretrained(name_or_path, revision=revision or "main")
    except (OSError, ValueError):
        # A GGUF file keeps its configuration inside; the tokenizer's end then stands alone.
        return None
    return GenerationConfig.from_model_config(config)


def load_max_length(name_or_path: str, *, revision: str | None = None) -> int | None:
    """The positions that the model has, without loading its weights; None where it names none."""
    check_name(name_or_path)
    try:
        config = AutoConfig.from_pretrained(name_or_path, revision=revision or "main")
    except (OSError, ValueError):
        # A GGUF file keeps its configuration inside; a server refuses what is too long by itself.
        return None
    length = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return length if isinstance(length, int) else None


def default_device() -> torch.device:
    """The device of this process, as accelerate chooses it (CUDA, ROCm, XPU, MPS or the CPU)."""
    from accelerate import PartialState

    device: torch.device = PartialState().device
    return device


def _stop_ids(config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    eos = getattr(config, "eos_token_id", None)
    ids = {*(eos if isinstance(eos, list | tuple) else [eos]), tokenizer.eos_token_id}
    return sorted(int(token) for token in ids if token is not None)
