"""The latency curve of decoding steps on this device: measured once, then kept in a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from medusa_train import __version__
from medusa_train.base_model.fingerprint import base_fingerprint
from medusa_train.base_model.load import default_device, load_dtype
from medusa_train.console import log, warn
from medusa_train.errors import InputError, MedusaTrainError
from medusa_train.heads.checkpoint import heads_fingerprint, read_spec
from medusa_train.heads.config import HeadsConfig
from medusa_train.json_values import fingerprint, read_json
from medusa_train.medusa_model import MedusaModel
from medusa_train.plan.device import device_name
from medusa_train.run_dir import write_json
from medusa_train.step_timing import NUM_TURNS, cache_length, measure_steps
from medusa_train.tree.latency import LatencyCurve

CURVE_VERSION = 1


@dataclass(frozen=True, slots=True)
class StepKind:
    """What a step's time depends on; a curve is kept for each.

    Attributes:
        device: its name.
        threads: of torch on the CPU.
        dtype: of the base's weights.
        base_fingerprint: of the base's files.
        layout: of the heads.
        num_heads: K.
        num_layers: L.
        truncated_vocab_size: of the heads, or None.
        attn_implementation: as asked for.
        quantization: as asked for.
        torch: its version.
        medusa_train: the version of this package.
    """

    device: str
    threads: int
    dtype: str
    base_fingerprint: str
    layout: str
    num_heads: int
    num_layers: int
    truncated_vocab_size: int | None
    attn_implementation: str | None = None
    quantization: str | None = None
    torch: str = torch.__version__
    medusa_train: str = __version__

    @property
    def file(self) -> Path:
        """Where its curve is kept, there or not."""
        return cache_directory() / f"{fingerprint(asdict(self))}.json"


def step_kind(
    config: HeadsConfig,
    *,
    base_fingerprint: str,
    dtype: torch.dtype | str,
    attn_implementation: str | None = None,
    quantization: str | None = None,
) -> StepKind:
    """The kind of step that these heads take in this process."""
    return StepKind(
        device=device_name(default_device()),
        threads=torch.get_num_threads(),
        dtype=str(dtype).removeprefix("torch."),
        base_fingerprint=base_fingerprint,
        layout=config.layout,
        num_heads=config.num_heads,
        num_layers=config.num_layers,
        truncated_vocab_size=config.truncated_vocab_size,
        attn_implementation=attn_implementation,
        quantization=quantization,
    )


def cache_directory() -> Path:
    """``$XDG_CACHE_HOME/medusa_train/latency``, by default below ``~/.cache``."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # The convention has relative paths ignored.
    root = Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
    return root / "medusa_train" / "latency"


def heads_latency(
    heads: Path,
    *,
    num_nodes: int,
    base_model: str | None = None,
    dtype: str = "auto",
    ranks_of: str | None = None,
    measure_again: bool = False,
) -> LatencyCurve:
    """The curve for a heads directory; the base is loaded only where it has to be measured.

    Args:
        heads: a heads directory.
        num_nodes: nodes of the largest tree, without the root.
        base_model: hub id or directory; None for the one that the heads name.
        dtype: of the base, as in recipes.
        ranks_of: fingerprint of the heads whose tree is searched, where it is known.
        measure_again: even if there is a curve.

    Raises:
        InputError: no such heads or base, another base, heads other than the ranks', or a damaged
            file.
    """
    config, identity = read_spec(heads)
    if ranks_of is not None and ranks_of != heads_fingerprint(heads):
        raise InputError(
            f"{heads}: the ranks are of other heads ({ranks_of}); give those that they were "
            "measured with"
        )
    is_named = base_model is None
    name = base_model or identity.name_or_path
    revision = identity.revision if is_named else None
    gguf_file = identity.gguf_file if is_named else None
    found = base_fingerprint(name, gguf_file=gguf_file, revision=revision)
    if is_named and identity.trained and found == identity.trained.original_fingerprint:
        found = identity.fingerprint  # what was trained lies beside the heads
    kind = step_kind(
        config,
        base_fingerprint=found,
        dtype=load_dtype(name, dtype=dtype, revision=revision) or dtype,
    )
    # Loading says why another base is refused.
    is_other = found != identity.fingerprint
    return step_latency(
        lambda: MedusaModel.from_pretrained(heads, base_model, dtype=dtype),
        kind=kind,
        num_nodes=num_nodes,
        measure_again=measure_again or is_other,
    )


def step_latency(
    load: Callable[[], MedusaModel], *, kind: StepKind, num_nodes: int, measure_again: bool = False
) -> LatencyCurve:
    """The curve that is kept for this kind of step, or a new one.

    Args:
        load: gives the model, if it has to be measured.
        kind: of the step.
        num_nodes: nodes of the largest tree, without the root.
        measure_again: even if there is a curve.

    Raises:
        InputError: the file that keeps it is damaged.
    """
    path = kind.file
    if path.exists() and not measure_again:
        kept, most = _read(path, kind)
        if most >= num_nodes:
            log(f"latency of a step: from {path}; remove it to measure again")
            return kept
    model = load()
    log(f"latency of a step: measuring on {kind.device}, {kind.threads} threads, {kind.dtype}")
    curve = measure_steps(model, num_nodes=num_nodes)
    record = {
        "schema_version": CURVE_VERSION,
        "kind": asdict(kind),
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
        "cache_length": cache_length(model),
        "num_turns": NUM_TURNS,
        "num_nodes": num_nodes,
        "latency_ms": curve.as_json(),
    }
    try:
        write_json(path, record)
    except MedusaTrainError as error:
        warn(f"{error}; the latency of a step is measured anew next time")
    else:
        log(f"latency of a step: kept in {path}")
    return curve


def _read(path: Path, kind: StepKind) -> tuple[LatencyCurve, int]:
    """The curve, and the nodes that were asked for; fewer heads may not fill so many."""
    record: Any = read_json(path)
    try:
        if record["schema_version"] != CURVE_VERSION or record["kind"] != asdict(kind):
            raise ValueError("of another kind of step")
        return LatencyCurve.of(record["latency_ms"]), int(record["num_nodes"])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path}: no latency curve ({error}); remove it, and it is measured again"
        ) from error
