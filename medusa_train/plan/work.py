"""How much there is to compute, in floating-point operations.

Symbols: D hidden, R logits of a head, K heads, L ResBlocks per head, T tokens of a row, A width of
the base's attention, M layers of the base, P_a entries of the matrices that a token meets.

============  ====================================================================================
base, a row   2 · P_a · T + 2 · M · A · T² (scores and values, of each the causal half); lm_head
              does not run
a pair        ``full``: 3 products of 2 · R · D (logits, gradient of the states, of the weight);
              ``shared``: 2, since the base's weight is frozen; and (3 · L − 1) · 2 · D² of
              ResBlocks: the states themselves need no gradient; with soft targets one product more
rank, a pair  2 · R · D + L · 2 · D²
============  ====================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass

from medusa_train.heads.config import HeadsConfig
from medusa_train.plan.amounts import Amount
from medusa_train.plan.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class Flops:
    """Floating-point operations; a multiplication and an addition are two.

    Attributes:
        caching: of the stage hidden-states.
        epoch: of one pass over the training data; with the base's where it runs at each step.
        accuracy: of the accuracy report.
    """

    caching: int
    epoch: int
    accuracy: int


def base_flops(base: ModelShape, *, tokens: int, squared_tokens: int) -> int:
    """Of the base's hidden states for rows with so many tokens."""
    attention = 2 * base.num_layers * base.attention_width * squared_tokens
    return 2 * base.active_parameters * tokens + attention


def pair_flops(heads: HeadsConfig, *, soft_targets: bool = False) -> int:
    """Of the loss and the gradients of one valid pair."""
    products = (3 if heads.layout == "full" else 2) + int(soft_targets)
    return products * 2 * heads.num_logits * heads.hidden_size


def block_flops(heads: HeadsConfig) -> int:
    """Of the ResBlocks of one head at one position, forward and backward."""
    return (3 * heads.num_layers - 1) * 2 * heads.hidden_size**2


def count_flops(
    base: ModelShape,
    heads: HeadsConfig,
    *,
    train: Amount,
    held_out: Amount,
    is_online: bool,
    soft_targets: bool = False,
    base_passes: int = 1,
) -> Flops:
    """The operations of each stage that has a base or heads in it.

    ``base_passes``: forward passes of the base that a step costs as much as, where it is trained.
    """
    of_base = base_flops(base, tokens=train.tokens, squared_tokens=train.squared_tokens)
    training = pair_flops(heads, soft_targets=soft_targets) * train.pairs
    # A head's blocks run at the positions where it has a pair.
    training += block_flops(heads) * train.pairs
    rank = 2 * heads.num_logits * heads.hidden_size + heads.num_layers * 2 * heads.hidden_size**2
    return Flops(
        caching=0 if is_online else of_base,
        epoch=training + (base_passes * of_base if is_online else 0),
        accuracy=base_flops(base, tokens=held_out.tokens, squared_tokens=held_out.squared_tokens)
        + rank * held_out.positions * heads.num_heads,
    )


def steps_per_epoch(conversations: int, *, batch_size: int, accumulation: int, devices: int) -> int:
    """Optimizer steps of one pass over the training data."""
    micro_batches = -(-conversations // (batch_size * devices))
    return max(1, -(-micro_batches // accumulation))
