"""Room on disk: the data set, the cached hidden states, checkpoints, the heads, the report.

Symbols: P parameters of the heads, D hidden, K heads, N source positions.

=============  =====================================================================================
data           the size of the file where it is there, else 12 bytes a token (its id and its text)
hidden states  2 · D · N as bf16, (D + 4) · N as int8
checkpoints    kept · 12 · P: fp32 weights and AdamW's two moments
heads          4 · P
report         2 · K + 14 bytes a position (ranks, where they are from), and 2 MiB of pages
=============  =====================================================================================
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from medusa_train.heads.config import HeadsConfig
from medusa_train.hidden_states.shards import StatesDtype, row_bytes
from medusa_train.plan.amounts import Amount
from medusa_train.plan.memory import FP32, head_parameters

BYTES_PER_TOKEN = 12
_PAGES = 2 << 20


@dataclass(frozen=True, slots=True)
class Disk:
    """Bytes that a run writes below its directory."""

    data: int
    hidden_states: int
    checkpoints: int
    heads: int
    report: int

    @property
    def total(self) -> int:
        """All of it at its most."""
        return sum(asdict(self).values())

    def as_dict(self) -> dict[str, int]:
        """Every part and the total, in bytes."""
        return {**asdict(self), "total": self.total}


def disk_needed(
    heads: HeadsConfig,
    *,
    train: Amount,
    held_out: Amount,
    data_bytes: int | None,
    cached_dtype: StatesDtype | None,
    caches_held_out: bool,
    kept_checkpoints: int,
    keeps_optimizer: bool = True,
) -> Disk:
    """What a run writes.

    Args:
        heads: the heads.
        train: the text that is trained on.
        held_out: the text of the report.
        data_bytes: of the data set if it is there; 0 if it lies elsewhere.
        cached_dtype: of the cached hidden states; None where none are cached.
        caches_held_out: whether those of the held-out text are too.
        kept_checkpoints: the most that are there at a time: one more than are kept, while a new
            one is written.
        keeps_optimizer: whether a checkpoint holds the optimizer's state.
    """
    weights = FP32 * heads.num_heads * head_parameters(heads)
    positions = train.positions + (held_out.positions if caches_held_out else 0)
    guess = BYTES_PER_TOKEN * (train.tokens + held_out.tokens)
    saved = weights * (3 if keeps_optimizer else 1)
    return Disk(
        data=guess if data_bytes is None else data_bytes,
        hidden_states=0
        if cached_dtype is None
        else positions * row_bytes(heads.hidden_size, dtype=cached_dtype),
        checkpoints=kept_checkpoints * saved,
        heads=weights,
        report=(2 * heads.num_heads + 14) * held_out.positions + _PAGES
        if held_out.conversations
        else 0,
    )
