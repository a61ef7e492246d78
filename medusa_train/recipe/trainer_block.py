"""What ``train.trainer`` may say: arguments of ``transformers.TrainingArguments``, by their names.

The names and types are in ``trainer_fields.json``, which ``scripts/make_trainer_fields.py`` writes,
because importing transformers' Trainer takes seconds and needs torch.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from medusa_train.recipe.yaml_reader import show

_STAGES = "the recipe's stages decide that; remove the key"

REFUSED: Mapping[str, str] = {
    "output_dir": "checkpoints lie in the run directory; set run_dir instead",
    "deepspeed": "set the recipe's own section deepspeed instead",
    "report_to": "set tracking.wandb, tracking.mlflow or tracking.tensorboard instead",
    "run_name": "set tracking.run_name instead",
    "project": "set tracking.project instead",
    "remove_unused_columns": "the columns are ours and all are used; remove the key",
    "logging_nan_inf_filter": "a loss that is not finite stops the run and is never hidden; "
    "remove the key",
    "resume_from_checkpoint": "a run goes on from its last checkpoint by itself; remove the key",
    "hub_token": "a recipe is written to the run directory; set the variable HF_TOKEN instead",
    "parallelism_config": "it is a Python object, which a recipe cannot hold; remove the key",
    "do_train": _STAGES,
    "do_eval": _STAGES,
    "do_predict": _STAGES,
}
"""Arguments that a recipe may not set, with the reason and what to do."""

REMOVED: Mapping[str, str] = {
    "adafactor": "set optim: adafactor",
    "dispatch_batches": "set it in accelerator_config",
    "evaluation_strategy": "did you mean 'eval_strategy'?",
    "fp16_backend": "set fp16 alone",
    "fp16_opt_level": "set fp16 alone",
    "fsdp_min_num_params": "set it in fsdp_config",
    "fsdp_transformer_layer_cls_to_wrap": "set it in fsdp_config",
    "group_by_length": "did you mean 'train_sampling_strategy: group_by_length'?",
    "half_precision_backend": "set bf16 or fp16 alone",
    "include_inputs_for_metrics": "did you mean 'include_for_metrics'?",
    "logging_dir": "the curves lie in the run directory; remove the key",
    "no_cuda": "did you mean 'use_cpu'?",
    "overwrite_output_dir": "a stage is done again when its inputs change; remove the key",
    "per_gpu_eval_batch_size": "did you mean 'per_device_eval_batch_size'?",
    "per_gpu_train_batch_size": "did you mean 'per_device_train_batch_size'?",
    "push_to_hub_model_id": "did you mean 'hub_model_id'?",
    "push_to_hub_organization": "did you mean 'hub_model_id'?",
    "push_to_hub_token": "set the variable HF_TOKEN",
    "save_safetensors": "weights are always saved as safetensors; remove the key",
    "split_batches": "set it in accelerator_config",
    "torchdynamo": "did you mean 'torch_compile_backend'?",
    "use_mps_device": "the device is found by itself; remove the key",
    "warmup_ratio": "did you mean 'warmup_steps'? A value below 1 is a share of all steps",
    "xpu_backend": "did you mean 'ddp_backend'?",
}
"""Arguments of older releases of transformers, with what takes their place."""

ALSO_TRUE = frozenset({"fsdp"})
"""Arguments that are typed as text, and turned on with ``true``."""

_TYPE_NAMES = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "list": "a list",
    "dict": "a section",
    "null": "null",
}


@cache
def trainer_fields() -> dict[str, dict[str, Any]]:
    """Every argument's types and, where it has them, its choices."""
    text = files("medusa_train.recipe").joinpath("trainer_fields.json").read_text(encoding="utf-8")
    fields: dict[str, dict[str, Any]] = json.loads(text)
    return fields


def check_trainer(block: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and the mistake of every argument in ``block`` that is wrong."""
    fields = trainer_fields()
    for name, value in block.items():
        if name in REFUSED:
            yield name, f"may not be set here: {REFUSED[name]}"
        elif name in REMOVED:
            yield name, f"transformers 5 has no such argument; {REMOVED[name]}"
        elif name not in fields:
            names = [other for other in fields if other not in REFUSED]
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean '{close[0]}'?" if close else "see TrainingArguments"
            yield name, f"unknown key; {hint}"
        elif value is True and name in ALSO_TRUE:
            continue
        elif message := _wrong_value(fields[name], value):
            yield name, message


def _wrong_value(field: Mapping[str, Any], value: Any) -> str | None:
    types = field["types"]
    if not any(_has_type(value, name) for name in types):
        wanted = " or ".join(_TYPE_NAMES[name] for name in types)
        return f"must be {wanted}; got {show(value)}"
    choices = field.get("choices")
    if choices and isinstance(value, str) and value not in choices:
        return f"must be one of {', '.join(choices)}; got {show(value)}"
    return None


def _has_type(value: Any, name: str) -> bool:
    match name:
        case "null":
            return value is None
        case "bool":
            return isinstance(value, bool)
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "float":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "str":
            return isinstance(value, str)
        case "list":
            return isinstance(value, list)
        case "dict":
            return isinstance(value, dict)
    raise AssertionError(name)
