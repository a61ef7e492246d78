"""How cached hidden states lie on disk: which conversations go into which file, and its tensors.

Shapes: N source positions, D hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from medusa_train.data.conversations import Conversation
from medusa_train.hidden_states.quantised import quantise_rows

StatesDtype = Literal["bfloat16", "int8"]
STATES = "hidden_states"
SCALES = "scales"
TENSORS: Mapping[StatesDtype, tuple[str, ...]] = {
    "bfloat16": (STATES,),
    "int8": (STATES, SCALES),
}
"""The tensors of a shard."""
SHARD_POSITIONS = 16_384


@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive conversations whose states lie in one file.

    Attributes:
        name: of the file.
        first: index of its first conversation.
        offsets: where each conversation's rows begin, and where the last one's end.
    """

    name: str
    first: int
    offsets: tuple[int, ...]

    @property
    def num_positions(self) -> int:
        """N of the file."""
        return self.offsets[-1]


def plan_shards(conversations: Sequence[Conversation], *, with_last: bool = False) -> list[Shard]:
    """Which conversations go into which file; the same data gives the same plan."""
    shards: list[Shard] = []
    first, offsets = 0, [0]
    for index, row in enumerate(conversations):
        offsets.append(offsets[-1] + num_source_positions(row, with_last=with_last))
        if offsets[-1] >= SHARD_POSITIONS or index == len(conversations) - 1:
            shards.append(Shard(f"{len(shards):05d}.safetensors", first, tuple(offsets)))
            first, offsets = index + 1, [0]
    return shards


def num_source_positions(row: Conversation, *, with_last: bool = False) -> int:
    """Positions of a row with at least one valid pair, or also each span's last source position."""
    left_out = 0 if with_last else 1
    return sum(max(0, end - left_out - max(start, 1)) for start, end in row.assistant_spans)


def row_bytes(hidden_size: int, *, dtype: StatesDtype) -> int:
    """Bytes of one position: bf16, or int8 and an fp32 scale."""
    return hidden_size + 4 if dtype == "int8" else 2 * hidden_size


def encode(states: Tensor, *, dtype: StatesDtype) -> dict[str, Tensor]:
    """States [N, D] as the tensors of a shard, on the CPU."""
    if dtype == "bfloat16":
        return {STATES: states.to(device="cpu", dtype=torch.bfloat16)}
    steps, scales = quantise_rows(states)
    return {STATES: steps.cpu(), SCALES: scales.cpu()}
