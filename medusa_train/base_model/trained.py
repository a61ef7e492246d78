"""What training made of a base model: adapters, trained weights, or a whole model, and its use.

A directory holds one of the three: ``adapter_config.json`` with the adapters, as peft writes them;
``trained_weights.safetensors``, fp32, of the tensors that were trained; or a plain model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from medusa_train.base_model.adapters import (
    CONFIG_FILE,
    load_adapters,
    merge_adapters,
    put_adapters,
    read_tensors,
    save_adapters,
)
from medusa_train.base_model.adapters import WEIGHTS_FILE as ADAPTERS_FILE
from medusa_train.base_model.fingerprint import TRAINED_KEY, base_fingerprint
from medusa_train.errors import InputError
from medusa_train.json_values import fingerprint, read_json
from medusa_train.run_dir import file_fingerprint

TRAINED_FILE = "trained_weights.safetensors"


def save_trained(tensors: Mapping[str, Tensor], directory: Path, *, adapters: Any) -> None:
    """Write what was trained.

    Args:
        tensors: whole tensors on the CPU, by their names in the model.
        directory: made if needed.
        adapters: peft's configuration; None where the base's own weights were trained.
    """
    if adapters is not None:
        save_adapters(tensors, directory, config=adapters)
        return
    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), directory / TRAINED_FILE, metadata={"format": "pt"})


def put_trained(model: PreTrainedModel, directory: Path) -> None:
    """Give a model under training the values that were saved.

    Raises:
        InputError: they are of another model, or of another kind of training.
    """
    adapters = directory / ADAPTERS_FILE
    if adapters.exists():
        put_adapters(model, read_tensors(adapters), where=directory)
    else:
        put_weights(model, read_tensors(directory / TRAINED_FILE), where=directory)


@torch.no_grad()
def put_weights(model: PreTrainedModel, tensors: Mapping[str, Tensor], *, where: Path) -> None:
    """Copy tensors into the parameters of their names.

    Raises:
        InputError: the model has no such parameter, or one of another shape.
    """
    own = dict(model.named_parameters())
    for name, tensor in tensors.items():
        if name not in own or own[name].shape != tensor.shape:
            raise InputError(f"{where}: weights of another model: {name} does not fit")
        own[name].copy_(tensor)


def apply_trained(model: PreTrainedModel, directory: Path) -> None:
    """Make of the original what it was trained to; adapters are merged but for quantised weights.

    Raises:
        InputError: nothing of the kind is there, or it is of another model.
    """
    if (directory / CONFIG_FILE).exists():
        load_adapters(model, directory)
        merge_adapters(model)
    elif (directory / TRAINED_FILE).exists():
        put_weights(model, read_tensors(directory / TRAINED_FILE), where=directory)
    else:
        raise InputError(
            f"{directory}: holds neither {CONFIG_FILE} nor {TRAINED_FILE}; give a directory that a "
            "run wrote"
        )


def trained_fingerprint(original: str, directory: Path) -> str:
    """The fingerprint of the trained base.

    Args:
        original: fingerprint of the base before.
        directory: of adapters or trained weights.
    """
    config = directory / CONFIG_FILE
    if not config.exists():
        return fingerprint([original, file_fingerprint(directory / TRAINED_FILE)])
    settings = read_json(config)
    scaling = [settings["r"], settings["lora_alpha"]]
    return fingerprint([original, file_fingerprint(directory / ADAPTERS_FILE), scaling])


def write_trained_base(
    original: Mapping[str, Any],
    trained: Path,
    output: Path,
    *,
    original_fingerprint: str,
) -> None:
    """Write a plain model directory: the original with what was trained in it, without tokenizer.

    Args:
        original: ``name_or_path`` and options of transformers' ``from_pretrained``; ``dtype`` is
            that of the weights that are written.
        trained: adapters or trained weights.
        output: an empty directory.
        original_fingerprint: of the original.
    """
    options = dict(original)
    model = AutoModelForCausalLM.from_pretrained(options.pop("name_or_path"), **options)
    model.requires_grad_(False)
    apply_trained(model, trained)
    model.save_pretrained(output)
    wanted = trained_fingerprint(original_fingerprint, trained)
    path = output / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config[TRAINED_KEY] = {
        "fingerprint": wanted,
        "original_fingerprint": original_fingerprint,
        "files_fingerprint": base_fingerprint(str(output)),
    }
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
