"""One measurement of speed: equal output first, then time, against plain decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from medusa_train.base_model.load import default_device
from medusa_train.console import log, warn
from medusa_train.errors import InputError
from medusa_train.evaluate.equality import TIE_STEPS
from medusa_train.evaluate.speed_report import write_speedup
from medusa_train.heads.checkpoint import heads_fingerprint, read_spec
from medusa_train.medusa_model import MedusaModel, read_tree
from medusa_train.plan.device import device_name
from medusa_train.run_dir import check_writable
from medusa_train.speed.comparison import Comparison
from medusa_train.speed.options import SpeedupOptions
from medusa_train.speed.prompts import Prompts, load_prompts
from medusa_train.speed.ways import Ways

REPORT_VERSION = 1


def measure_speedup(heads: Path, *, options: SpeedupOptions) -> dict[str, Any]:
    """Measure how much faster the base model decodes with heads, at equal output.

    Args:
        heads: the heads directory.
        options: how.

    Returns:
        ``speedup.json`` as an object (docs/formats.md).

    Raises:
        InputError: wrong heads, base, tree or prompts.
    """
    _, identity = read_spec(heads)
    tree = None if options.tree is None else read_tree(options.tree)
    if options.output is not None:
        check_writable(options.output)
    prompts = load_prompts(
        heads,
        identity,
        file=options.prompts,
        base_model=options.base_model,
        chat_template=options.chat_template,
        max_new_tokens=options.max_new_tokens,
        num_prompts=options.num_prompts,
    )
    largest = max(options.batch_sizes, default=0)
    if largest > len(prompts.rows):
        raise InputError(
            f"--batch-sizes: a batch of {largest} needs as many prompts, got {len(prompts.rows)}; "
            "give more prompts or smaller batches"
        )
    ways: dict[str, Ways] = {}
    for dtype in dict.fromkeys(options.dtypes or _usual_dtypes()):
        log(f"loading {options.base_model or identity.name_or_path} in {dtype}")
        model = MedusaModel.from_pretrained(
            heads, options.base_model, dtype=dtype, tree=tree, compiled=options.compiled
        )
        ways[dtype] = Ways(model, max_new_tokens=options.max_new_tokens)
    report = Comparison(ways, prompts.rows, options).report()
    model = next(iter(ways.values())).model
    report = {
        "schema_version": REPORT_VERSION,
        "base_model": model.base.name_or_path,
        "heads_fingerprint": heads_fingerprint(heads),
        "tree": {"num_nodes": model.tree.num_nodes, "depth": model.tree.depth},
        **_facts(prompts, options, device=model.device),
        **report,
    }
    other = report["identical_outputs"]["other"]
    if other:
        warn(
            f"{other} of {len(prompts.rows)} answers differ from plain decoding in "
            f"{report['medusa']['dtype']} by more than {TIE_STEPS} steps of it: the speed is not "
            "of equal output; please report it with the base model's name"
        )
    if options.output is not None:
        write_speedup(report, directory=options.output)
    return report


def _usual_dtypes() -> tuple[str, ...]:
    return ("float32", "bfloat16") if default_device().type == "cpu" else ("bfloat16",)


def _facts(prompts: Prompts, options: SpeedupOptions, *, device: torch.device) -> dict[str, Any]:
    return {
        "prompts": prompts.what,
        "num_prompts": len(prompts.rows),
        "num_dropped": prompts.num_dropped,
        "max_new_tokens": options.max_new_tokens,
        "decoding": "greedy",
        "compiled": options.compiled,
        "repeats": options.repeats,
        "num_probe": options.num_probe,
        "device": device_name(device),
        "threads": torch.get_num_threads(),
    }
