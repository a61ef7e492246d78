"""What an export starts from: heads as tensors by FasterDecoding's names, and facts of their base.

Shapes: D hidden, V rows of the base's ``lm_head``, K heads, L layers, N truncated vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from medusa_train.errors import InputError
from medusa_train.heads.checkpoint import TOKEN_MAP, load_heads
from medusa_train.heads.config import BaseIdentity, HeadsConfig, Layout
from medusa_train.tree.topology import Tree

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class HeadTensors:
    """Heads as they will be written.

    Attributes:
        config: their shape.
        base: the model that they belong to.
        tensors: ``{h}.{l}.linear.weight`` [D, D] and ``.bias`` [D]; in the layout ``full``
            ``{h}.{L}.weight`` [V or N, D]; with a truncated vocabulary ``token_map`` [N].
        lm_head: [V, D] the base's, where shared heads need a copy of it.
        logit_scale: what has been multiplied into the output matrices; 1 for most models.
        soft_cap: what the base does to its logits and an export leaves out, or None.
        model_type: of the base's config.
    """

    config: HeadsConfig
    base: BaseIdentity
    tensors: Mapping[str, Tensor]
    lm_head: Tensor | None = None
    logit_scale: float = 1.0
    soft_cap: float | None = None
    model_type: str = ""

    @property
    def dtype(self) -> torch.dtype:
        """Of all weights."""
        return self.tensors["0.0.linear.weight"].dtype


@dataclass(frozen=True)
class ServeOptions:
    """How the heads will be served.

    Attributes:
        directory: the export, as the commands in its README name it.
        tree: the candidates of each step; for an engine that runs a chain, the chain.
        num_speculative_tokens: candidates in the chain, at most K.
        min_version: the oldest version of the engine that has to load the export, or None.
    """

    directory: Path
    tree: Tree
    num_speculative_tokens: int
    min_version: tuple[int, int] | None = None


@dataclass(frozen=True)
class Written:
    """What an engine's writer says of its export.

    Attributes:
        start: how to start the engine with it, in Markdown.
        warnings: what its user should know, a sentence each.
    """

    start: str
    warnings: tuple[str, ...] = ()


def read_heads(directory: Path, *, num_heads: int | None = None) -> HeadTensors:
    """Read a heads directory, strictly.

    Args:
        directory: the heads.
        num_heads: keep the first so many; None keeps all.

    Raises:
        InputError: no heads, damaged ones, or fewer than are asked for.
    """
    heads, base = load_heads(directory)
    config = heads.config
    tensors = {name: tensor.contiguous() for name, tensor in heads.state_dict().items()}
    if num_heads is not None:
        if not 1 <= num_heads <= config.num_heads:
            raise InputError(
                f"--num-heads: must be from 1 to {config.num_heads}, the heads of {directory}; "
                f"got {num_heads}"
            )
        config = replace(config, num_heads=num_heads)
        tensors = {
            name: tensor
            for name, tensor in tensors.items()
            if name == TOKEN_MAP or int(name.split(".")[0]) < num_heads
        }
    return HeadTensors(config, base, tensors)


def as_layout(heads: HeadTensors, layout: Layout, *, lm_head: Tensor) -> HeadTensors:
    """The same heads in another layout, where nothing is lost.

    Args:
        heads: as they are.
        layout: ``full`` gives each head a copy of ``lm_head``; ``shared`` takes equal ones away.
        lm_head: [V, D] the base's.

    Raises:
        InputError: the heads have trained matrices of their own, which ``shared`` would drop.
    """
    config = heads.config
    if config.layout == layout:
        return heads
    rows = lm_head.to(heads.dtype)
    if TOKEN_MAP in heads.tensors:
        rows = rows[heads.tensors[TOKEN_MAP]]
    names = [f"{head}.{config.num_layers}.weight" for head in range(config.num_heads)]
    tensors = dict(heads.tensors)
    if layout == "full":
        tensors |= {name: rows.clone() for name in names}
    else:
        for number, name in enumerate(names, start=1):
            if not torch.equal(tensors.pop(name), rows):
                raise InputError(
                    f"--layout shared: the lm_head of head {number} was trained and is not the "
                    "base's; sharing would lose it: export the layout full"
                )
            tensors.pop(name.replace(".weight", ".bias"), None)
    return replace(heads, config=replace(config, layout=layout), tensors=tensors)


def folded(heads: HeadTensors, *, scale: float, soft_cap: float | None) -> HeadTensors:
    """The heads with a factor of the base's logits multiplied into their output matrices.

    Raises:
        InputError: the factor is not positive, so it would turn the order of the tokens around.
    """
    if scale == 1.0:
        return replace(heads, soft_cap=soft_cap)
    if scale <= 0.0:
        raise InputError(
            f"{heads.base.name_or_path}: multiplies its logits by {scale:g}; only a positive "
            "factor can be folded into exported weights"
        )
    end = f".{heads.config.num_layers}.weight"
    tensors = {
        name: _scaled(tensor, scale) if name.endswith(end) else tensor
        for name, tensor in heads.tensors.items()
    }
    lm_head = None if heads.lm_head is None else _scaled(heads.lm_head, scale)
    return replace(heads, tensors=tensors, lm_head=lm_head, logit_scale=scale, soft_cap=soft_cap)


def cast(heads: HeadTensors, dtype: str) -> HeadTensors:
    """The heads in another dtype; ``auto`` is the one that they are stored in.

    Raises:
        InputError: a weight is too large for it.
    """
    chosen = heads.dtype if dtype == "auto" else DTYPES[dtype]
    tensors = {name: _as(tensor, chosen, name) for name, tensor in heads.tensors.items()}
    lm_head = None if heads.lm_head is None else _as(heads.lm_head, chosen, "lm_head")
    return replace(heads, tensors=tensors, lm_head=lm_head)


def _scaled(tensor: Tensor, scale: float) -> Tensor:
    return (tensor.double() * scale).to(tensor.dtype)


def _as(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    if not tensor.is_floating_point():
        return tensor.contiguous()
    result = tensor.to(dtype).contiguous()
    if not result.isfinite().all():
        raise InputError(
            f"--dtype: {name} has values that {str(dtype).removeprefix('torch.')} cannot hold; "
            "give bfloat16 or float32"
        )
    return result
