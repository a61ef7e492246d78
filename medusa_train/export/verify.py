"""Does a directory give an engine the heads that it should? Read back by the engine's own rules.

The rules are in ``loaders/``, written apart from the writers and sharing nothing with them. Where
the heads are at hand, their logits on random hidden states have to be those that the engine would
compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from medusa_train.errors import InputError
from medusa_train.export.files import require_directory
from medusa_train.export.loaders import (
    fasterdecoding,
    mlc,
    nxd,
    tensorrt_llm,
    tgi,
    transformers,
    vllm,
)
from medusa_train.export.loaders.view import EngineHead, Finding, Request, View
from medusa_train.export.source import HeadTensors
from medusa_train.heads.checkpoint import TOKEN_MAP

Target = Literal[
    "fasterdecoding", "tgi", "vllm", "tensorrt-llm", "mlc", "nxd", "combined", "transformers"
]
TARGETS: tuple[Target, ...] = (
    "fasterdecoding",
    "tgi",
    "vllm",
    "tensorrt-llm",
    "mlc",
    "nxd",
    "combined",
    "transformers",
)

NUM_PROBES = 16
TOLERANCE = 1e-5
"""Of equal logits, relative to the greatest; both sides are computed in fp64."""


@dataclass(frozen=True)
class Verification:
    """The outcome.

    Attributes:
        engine: its name.
        files: that it reads.
        num_heads: that it builds, or None where it does not get so far.
        num_layers: in each of them.
        findings: errors, warnings and notes.
        is_compared: whether logits were compared with those of the heads.
    """

    engine: str
    files: tuple[str, ...]
    num_heads: int | None
    num_layers: int | None
    findings: tuple[Finding, ...]
    is_compared: bool

    @property
    def errors(self) -> tuple[str, ...]:
        """What keeps the heads from working as they are."""
        return tuple(f.text for f in self.findings if f.severity == "error")

    @property
    def is_good(self) -> bool:
        """Whether there is no error."""
        return not self.errors


def verify(target: Target, request: Request, *, heads: HeadTensors | None = None) -> Verification:
    """Read a directory as an engine does, and compare with ``heads``.

    Args:
        target: the engine.
        request: the directory and how it will be used.
        heads: what was exported, with what was folded in; rounded to the dtype of the directory.

    Raises:
        InputError: the directory is not there, or holds what is not safe to read.
    """
    require_directory(request.directory)
    result = _view(target, request)
    compared = False
    if heads is not None and result.heads:
        compared = _compare(result, heads)
    return Verification(
        result.engine,
        tuple(result.files),
        result.num_heads,
        result.num_layers,
        tuple(result.findings),
        compared,
    )


def _view(target: Target, request: Request) -> View:
    match target:
        case "fasterdecoding":
            return fasterdecoding.view(request)
        case "tgi":
            return tgi.view(request)
        case "vllm":
            return vllm.view(request)
        case "tensorrt-llm":
            return tensorrt_llm.view(request)
        case "mlc":
            return mlc.view(request)
        case "nxd":
            return nxd.view(request)
        case "combined":
            return fasterdecoding.view_combined(request)
        case "transformers":
            return transformers.view(request)


def _compare(result: View, heads: HeadTensors) -> bool:
    """Whether logits were compared; differences are errors of ``result``."""
    config = heads.config
    if len(result.heads) + result.num_left_out != config.num_heads:
        result.error(
            f"{result.engine} gets {len(result.heads)} heads, but there are {config.num_heads}"
        )
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(NUM_PROBES, config.hidden_size, generator=generator, dtype=torch.float64)
    # The base's own lm_head is not in the directory: any matrix tells whether its inputs are equal.
    stand_in = torch.randn(32, config.hidden_size, generator=generator, dtype=torch.float64)
    is_compared = False
    for number, head in enumerate(result.heads[: config.num_heads]):
        if head.blocks[0][0].shape[0] != config.hidden_size:
            result.error(
                f"the directory has hidden size {head.blocks[0][0].shape[0]}, but the heads have "
                f"{config.hidden_size}"
            )
            break
        projections = _projections(result, head, heads, number, stand_in)
        if projections is None:
            break
        dtype = head.blocks[0][0].dtype
        theirs = F.linear(head.trunk(states), projections[0].double())
        ours = F.linear(
            _trunk(heads, number, states, dtype), projections[1].to(projections[0].dtype).double()
        )
        is_compared = True
        difference = float((theirs - ours).abs().max() / ours.abs().max().clamp(min=1e-30))
        if not difference <= TOLERANCE:
            result.error(
                f"the logits of head {number + 1} are not those of the heads: they differ by "
                f"{difference:.2g} of the greatest"
            )
    return is_compared


def _projections(
    result: View, head: EngineHead, heads: HeadTensors, number: int, stand_in: Tensor
) -> tuple[Tensor, Tensor] | None:
    """The engine's matrix and ours, or None where they cannot be compared."""
    config = heads.config
    own = heads.tensors.get(f"{number}.{config.num_layers}.weight")
    token_map = heads.tensors.get(TOKEN_MAP)
    theirs = head.projection
    if theirs is None:
        if own is not None and not _is_copy(own, heads, token_map):
            result.error(
                f"{result.engine} uses the base's lm_head, but head {number + 1} has its own"
            )
            return None
        return stand_in, stand_in
    if own is None:
        if heads.lm_head is None:
            result.note("the copy of the base's lm_head is not compared: the base is not given")
            return stand_in, stand_in
        own = heads.lm_head if token_map is None else heads.lm_head[token_map]
    if (token_map is None) != (head.token_map is None) or (
        token_map is not None
        and head.token_map is not None
        and not torch.equal(token_map.long(), head.token_map.long())
    ):
        result.error("the tokens of the truncated vocabulary are not those of the heads")
        return None
    if theirs.shape != own.shape:
        result.error(
            f"head {number + 1} has an lm_head of {list(theirs.shape)} in the directory, but the "
            f"heads have {list(own.shape)}"
        )
        return None
    return theirs, own


def _is_copy(own: Tensor, heads: HeadTensors, token_map: Tensor | None) -> bool:
    """Whether a head's own matrix is the base's, so that nothing is lost without it."""
    if heads.lm_head is None:
        return False
    rows = heads.lm_head if token_map is None else heads.lm_head[token_map]
    return torch.equal(own, rows.to(own.dtype))


def _trunk(heads: HeadTensors, number: int, states: Tensor, dtype: torch.dtype) -> Tensor:
    """Our ResBlocks of one head, rounded to the export's dtype, in fp64."""
    for layer in range(heads.config.num_layers):
        name = f"{number}.{layer}.linear"
        weight, bias = (heads.tensors[f"{name}.{p}"].to(dtype) for p in ("weight", "bias"))
        states = states + F.silu(F.linear(states, weight.double(), bias.double()))
    return states


def check_target(name: str) -> Target:
    """The target of that name.

    Raises:
        InputError: there is none.
    """
    for target in TARGETS:
        if target == name:
            return target
    raise InputError(f"no such target: {name!r}; choose from {', '.join(TARGETS)}")
