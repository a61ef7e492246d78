"""What an engine has in memory after it has read a directory, and what it did not say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from medusa_train.export.files import (
    MAX_COUNT,
    check_count,
    check_values,
    read_config,
    read_tensors,
)

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that a user should know of a directory.

    Attributes:
        severity: ``error``: the heads would not work, or not as they are; ``warning``: they work
            under a condition; ``note``: what the engine does.
        text: in one sentence.
    """

    severity: Severity
    text: str


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of an engine.

    Attributes:
        directory: what it reads.
        path: of the directory as the engine will be given it; one made for a moment is elsewhere.
        num_speculative_tokens: candidates a step; None for all heads'.
        version: (major, minor) of the engine, or None for any that loads the directory.
        base_config: of the model that it will be used with, or None where that is not known.
    """

    directory: Path
    path: str
    num_speculative_tokens: int | None = None
    version: tuple[int, int] | None = None
    base_config: Mapping[str, Any] | None = None

    def base_value(self, name: str) -> Any:
        """A value of the base's config, or None."""
        return None if self.base_config is None else self.base_config.get(name)


@dataclass(frozen=True)
class EngineHead:
    """One head as an engine computes it.

    Attributes:
        blocks: weight [D, D] and bias [D] or None of each ResBlock.
        projection: [rows, D], or None where the base's ``lm_head`` is used.
        token_map: [rows] the tokens of the rows, or None for 0, 1, ….
    """

    blocks: tuple[tuple[Tensor, Tensor | None], ...]
    projection: Tensor | None
    token_map: Tensor | None = None

    def trunk(self, hidden_states: Tensor) -> Tensor:
        """[N, D] → [N, D] in fp64: the ResBlocks."""
        for weight, bias in self.blocks:
            shift = None if bias is None else bias.double()
            hidden_states = hidden_states + F.silu(F.linear(hidden_states, weight.double(), shift))
        return hidden_states


@dataclass
class View:
    """The outcome of reading a directory; :meth:`error` and its kin add to it.

    Attributes:
        engine: its name.
        files: that it reads.
        heads: as it would compute them; fewer than it builds where some are not there.
        num_heads: that it builds.
        num_layers: that it builds in each.
        num_left_out: heads that are not read because fewer were asked for.
        findings: in the order in which they were met.
    """

    engine: str
    files: list[str] = field(default_factory=list)
    heads: list[EngineHead] = field(default_factory=list)
    num_heads: int | None = None
    num_layers: int | None = None
    num_left_out: int = 0
    findings: list[Finding] = field(default_factory=list)

    def error(self, text: str) -> None:
        """Add what keeps the heads from working as they are."""
        self.findings.append(Finding("error", text))

    def warning(self, text: str) -> None:
        """Add a condition."""
        self.findings.append(Finding("warning", text))

    def note(self, text: str) -> None:
        """Add what the engine does."""
        self.findings.append(Finding("note", text))


class Shelf:
    """The tensors of a file, each taken once by its name; what is left was not read.

    Args:
        tensors: by name.
        view: gets an error for each tensor that is missing or of another shape.
    """

    def __init__(self, tensors: Mapping[str, Tensor], view: View) -> None:
        self._tensors = dict(tensors)
        self._view = view
        self._taken: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(
        self, name: str, *, missing: str, shape: tuple[int | None, ...] | None = None
    ) -> Tensor:
        """A tensor; an empty one where it is missing or of another shape, after an error.

        Args:
            name: of the tensor.
            missing: what the engine does without it.
            shape: that it must have; None stands for any size.
        """
        tensor = self._tensors.get(name)
        self._taken.add(name)
        if tensor is None:
            self._view.error(f"{name} is missing: {missing}")
            return torch.empty(0)
        if shape is not None and not _fits(tensor, shape):
            wanted = ", ".join("…" if size is None else str(size) for size in shape)
            self._view.error(
                f"{name} has shape {list(tensor.shape)}, but {self._view.engine} builds [{wanted}]"
            )
            return torch.empty(0)
        return tensor

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; empty where it is missing."""
        return tuple(self._tensors[name].shape) if name in self._tensors else ()

    def left(self) -> list[str]:
        """The names that were not taken."""
        return sorted(self._tensors.keys() - self._taken)

    def report_left(self, reason: str) -> None:
        """Add an error that names the tensors which were not taken, if there are any."""
        if left := self.left():
            shown = ", ".join(left[:4]) + (f" and {len(left) - 4} more" if len(left) > 4 else "")
            self._view.error(f"{shown}: {reason}")


def _fits(tensor: Tensor, shape: tuple[int | None, ...]) -> bool:
    return tensor.dim() == len(shape) and all(
        wanted in {None, size} for wanted, size in zip(shape, tensor.shape, strict=True)
    )


def load(directory: Path, name: str, view: View, *, only: str | None = None) -> dict[str, Tensor]:
    """The tensors of a file, checked, which goes to the files that the engine reads."""
    view.files.append(name)
    tensors = read_tensors(directory, name, only=only)
    check_values(tensors, where=directory / name, integers=["token_map"])
    return tensors


def config_of(directory: Path, view: View) -> dict[str, Any]:
    """``config.json``; without one an error is added and it is empty."""
    if not (directory / "config.json").exists():
        view.error(f"there is no config.json: {view.engine} does not know what the directory is")
        return {}
    return read_config(directory)


def count_of(config: Mapping[str, Any], name: str, view: View, *, default: int | None) -> int:
    """A count in the config; where it is missing or no count, an error and the default, or 0."""
    value = config.get(name)
    # The sizes of matrices are counts too; they make no loops.
    most = MAX_COUNT if "num" in name else None
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        if most is None or value <= most:
            return value
        view.error(f"config.json: {name} is {value:,}; at most {most} are read")
        return 0
    if value is not None:
        view.error(f"config.json: {name} must be a whole number of at least 1, got {value!r}")
    elif default is None:
        view.error(f"config.json has no {name}: {view.engine} does not load without it")
    else:
        view.error(f"config.json has no {name}: {view.engine} takes {default}")
    return default or 0


def take_head(
    shelf: Shelf,
    names: Mapping[str, str],
    *,
    num_layers: int,
    missing: str,
    hidden_size: int | None = None,
    num_rows: int | None = None,
) -> EngineHead | None:
    """One head with a projection of its own; None where a part of it is missing.

    Args:
        shelf: the tensors.
        names: ``block`` with ``{layer}`` and ``{part}`` to fill in, and ``projection``.
        num_layers: L.
        missing: what the engine does without a tensor.
        hidden_size: D that the engine builds, or None for the tensors'.
        num_rows: V that it builds, or None for the tensors'.
    """
    first = shelf.shape_of(names["block"].format(layer=0, part="weight"))
    size = hidden_size or (first[0] if first else None)
    blocks = [
        (
            shelf.take(name.format(part="weight"), missing=missing, shape=(size, size)),
            shelf.take(name.format(part="bias"), missing=missing, shape=(size,)),
        )
        for name in (names["block"].replace("{layer}", str(layer)) for layer in range(num_layers))
    ]
    projection = shelf.take(names["projection"], missing=missing, shape=(num_rows, size))
    parts = [*(part for block in blocks for part in block), projection]
    if any(part.numel() == 0 for part in parts):
        return None
    return EngineHead(tuple(blocks), projection)


def num_heads_in(names: Mapping[str, Tensor], pattern: str) -> int:
    """How many heads the names speak of: one more than the greatest first group of ``pattern``."""
    found = [int(m.group(1)) for name in names if (m := re.match(pattern, name))]
    return check_count(max(found, default=-1) + 1, where="weights")


def check_rows(view: View, request: Request) -> None:
    """Add an error where projections have other rows than the base."""
    wanted = request.base_value("vocab_size")
    for number, head in enumerate(view.heads, start=1):
        rows = None if head.projection is None else head.projection.shape[0]
        if rows is not None and head.token_map is None and wanted is not None and rows != wanted:
            view.error(
                f"head {number} has {rows} rows, but the base's vocab_size is {wanted}: they must "
                "be equal"
            )
            return
