"""Memory per device, component by component, for each ZeRO stage.

Symbols: B rows of a batch, T tokens of its longest row, N source positions of a batch, D hidden,
V rows of ``lm_head``, R logits of a head (V, or the truncated vocabulary), K heads, L ResBlocks per
head, W widest matrix of a layer of the base, c rows of a loss chunk, G devices; b, s bytes of a
weight of the base, of a number in the loss kernel's products; E bytes of a position in a batch:
2 · D (bf16) or D + 4 (int8) from the cache, b · D online.
All weights of the heads are fp32. Per device, with P parameters of the heads, P_b of the base:

=============  =====================================================================================
base weights   b · P_b
heads          4 · P
optimizer      8 · P (AdamW's two moments); at ZeRO-1 and 2 also 4 · P, DeepSpeed's own copy of the
               partition
gradients      4 · P, of which the loss kernel's forward makes 4 · K · R · D (layout ``full``); when
               gradients accumulate over micro-batches 4 · P more: those of the batches before, to
               which these are added
hidden states  (E + 4 · D) · N: the batch as it came, and in fp32
activations    4 · N · D · (2 · L + 1) · K: of each head the chosen states, each block's input and
               inner output, and the states' gradient; and (4 + s) · N · D of the head at work
loss chunk     s · c · R (the logits, then their gradient) + w + the greater of 8 · q (two fp32
               steps of the softmax) and (s + 4) · p (a product for the weight's gradient, layout
               ``full``); on the CPU q and p are a block of 2²¹ numbers, elsewhere q = c · R and
               p = R · D; in bf16 on the CPU the products take the columns with large gradients, a
               quarter being many: (2 · s + 4) · R · D ÷ 4 (``shared``: s · R · D ÷ 4);
               w = s · R · D is a copy of the weight where products are not in its type, without
               which the product needs nothing. Soft targets: s · c · R + 8 · q more
base forward   b · B · T · (2 · D + 3 · W): the widest moment of one layer; not at the same time as
               this batch's gradients, activations and chunk
=============  =====================================================================================

ZeRO divides by G: the optimizer from stage 1, gradients of the batches before from stage 2, weights
from stage 3, at which the largest part in use (a head, a layer of the base) is gathered: 1 − 1/G of
it comes on top. The kernel's own gradients are whole at every stage, since they are there before
anything is reduced. DeepSpeed's communication buckets, whose sizes its config names, are not
counted. At one device nothing is divided and nothing copied.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from medusa_train.heads.config import HeadsConfig
from medusa_train.hidden_states.shards import StatesDtype, row_bytes
from medusa_train.loss_products import BLOCK_ELEMENTS
from medusa_train.losses import default_chunk_size
from medusa_train.plan.model_shape import ModelShape

ZERO_STAGES = (0, 1, 2, 3)
FP32 = 4
BF16 = 2


@dataclass(frozen=True, slots=True)
class Load:
    """What one device works on at a time while the heads are trained.

    Attributes:
        batch_size: B, rows of a micro-batch.
        row_tokens: T, tokens of the longest row.
        batch_positions: N, source positions of a micro-batch.
        accumulation: micro-batches of a step.
        chunk_size: c, or None for the loss's own choice.
        compute_bytes: s.
        is_online: whether the base runs at each step.
        base_is_loaded: whether the base's weights are on the device although it does not run.
        is_host: whether the device is the CPU, whose memory also holds the mapped cache.
        soft_targets: whether the base's own distribution is a target.
        cache_positions: source positions of the cached hidden states.
        cached_dtype: of those.
    """

    batch_size: int
    row_tokens: int
    batch_positions: int
    accumulation: int = 1
    chunk_size: int | None = None
    compute_bytes: int = BF16
    is_online: bool = False
    base_is_loaded: bool = True
    is_host: bool = False
    soft_targets: bool = False
    cache_positions: int = 0
    cached_dtype: StatesDtype = "bfloat16"


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one device at the worst moment.

    Attributes:
        base_weights: of the base.
        heads: the heads' fp32 weights.
        gradients: of the heads.
        optimizer: what AdamW keeps.
        gathered: what ZeRO-3 fetches from the other devices at a time.
        hidden_states: a batch of them.
        activations: what a head's backward needs, for all heads.
        loss_chunk: the loss kernel's buffers.
        base_forward: what one layer of the base needs while it runs; not at the same time as the
            other transient parts.
        cache: mapped hidden states in the page cache; given back when memory is short.
        held_gradients: the part of ``gradients`` that lives between micro-batches.
    """

    base_weights: int = 0
    heads: int = 0
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    hidden_states: int = 0
    activations: int = 0
    loss_chunk: int = 0
    base_forward: int = 0
    cache: int = 0
    held_gradients: int = 0

    @property
    def total(self) -> int:
        """The peak: what is always there, and the greater of the two transient sums."""
        held = self.base_weights + self.heads + self.optimizer + self.gathered + self.cache
        loss = self.gradients + self.hidden_states + self.activations + self.loss_chunk
        return held + max(loss, self.held_gradients + self.base_forward)

    def as_dict(self) -> dict[str, int]:
        """Every component and the total, in bytes."""
        values = asdict(self)
        del values["held_gradients"]
        return {**values, "total": self.total}


COMPONENTS = tuple(f.name for f in fields(Memory) if f.name != "held_gradients")
"""The components that are shown, in order."""


def head_parameters(heads: HeadsConfig) -> int:
    """Parameters of one head."""
    blocks = heads.num_layers * (heads.hidden_size**2 + heads.hidden_size)
    return blocks + output_parameters(heads)


def output_parameters(heads: HeadsConfig) -> int:
    """Parameters of one head's own ``lm_head``; ``shared`` heads have none."""
    if heads.layout == "shared":
        return 0
    return heads.num_logits * (heads.hidden_size + int(heads.lm_head_bias))


def training_memory(
    base: ModelShape, heads: HeadsConfig, *, load: Load, zero: int, devices: int
) -> Memory:
    """Bytes per device while the heads are trained; the formulas are at the top of this module.

    Args:
        base: the base.
        heads: the heads.
        load: what one device works on.
        zero: ZeRO stage, 0 to 3.
        devices: G.
    """
    parts = [devices if zero >= stage else 1 for stage in ZERO_STAGES]
    trained = FP32 * heads.num_heads * head_parameters(heads)
    has_base = load.is_online or load.base_is_loaded
    # Under the Trainer, and so divided, only where it runs.
    base_parts = parts[3] if load.is_online else 1
    copies = 1 if devices > 1 and zero in {1, 2} else 0
    held_gradients = _divided(trained, parts[2]) if load.accumulation > 1 else 0
    gathered = 0
    if zero == 3:
        layer = base.layer_parameters * base.dtype_bytes if load.is_online else 0
        largest = max(FP32 * head_parameters(heads), layer)
        gathered = largest - largest // devices
    cached = row_bytes(heads.hidden_size, dtype=load.cached_dtype)
    arriving = base.dtype_bytes * heads.hidden_size if load.is_online else cached
    rows = load.batch_positions * heads.hidden_size
    kept = FP32 * rows * (2 * heads.num_layers + 1) * heads.num_heads
    tokens = load.batch_size * load.row_tokens
    is_mapped = load.is_host and not load.is_online
    return Memory(
        base_weights=_divided(base.num_bytes, base_parts) if has_base else 0,
        heads=_divided(trained, parts[3]),
        gradients=trained + held_gradients,
        optimizer=_divided(trained * (2 + copies), parts[1]),
        gathered=gathered,
        hidden_states=arriving * load.batch_positions + FP32 * rows,
        activations=kept + (FP32 + load.compute_bytes) * rows,
        loss_chunk=chunk_bytes(base, heads, load=load),
        base_forward=forward_bytes(base, tokens=tokens) if load.is_online else 0,
        cache=cached * load.cache_positions if is_mapped else 0,
        held_gradients=held_gradients,
    )


def chunk_bytes(base: ModelShape, heads: HeadsConfig, *, load: Load) -> int:
    """What ``chunked_cross_entropy`` holds for one head besides its results."""
    size, is_full = load.compute_bytes, heads.layout == "full"
    chunk = load.chunk_size or default_chunk_size(heads.num_logits)
    logits = min(chunk, max(load.batch_positions, 1)) * heads.num_logits
    matrix = heads.num_logits * heads.hidden_size
    most = BLOCK_ELEMENTS if load.is_host else max(logits, matrix)
    softmax = 2 * FP32 * min(logits, most)
    weight_bytes = FP32 if is_full else base.dtype_bytes
    held = size * logits + (size * matrix if size != weight_bytes else 0)
    if not is_full and heads.truncated_vocab_size is not None:
        # Its rows are taken out of the base's matrix for each head.
        held += weight_bytes * matrix
    if load.soft_targets:
        held += size * logits + (size * matrix if size != base.dtype_bytes else 0)
        softmax *= 2
    product = (size + FP32) * min(matrix, most) if is_full and size != FP32 else 0
    if load.is_host and size == BF16:
        # A slice's rows of the weight and, where it is trained, of its gradient.
        product = (2 * size + FP32 if is_full else size) * matrix // 4
    return held + max(softmax, product)


def forward_bytes(base: ModelShape, *, tokens: int) -> int:
    """The widest moment of one layer without gradients: residual, input, and the MLP's three."""
    return base.dtype_bytes * tokens * (2 * base.hidden_size + 3 * base.widest)


def caching_memory(
    base: ModelShape,
    *,
    batch_tokens: int,
    shard_positions: int,
    is_host: bool,
    cached_dtype: StatesDtype = "bfloat16",
) -> Memory:
    """Bytes per device while hidden states are cached: every device would hold the whole base.

    Args:
        base: the base.
        batch_tokens: tokens of a forward pass, padding included.
        shard_positions: source positions of one shard, which is put together on the CPU (twice:
            its rows, and all of them as one tensor).
        is_host: whether the device is the CPU.
        cached_dtype: of the states in the cache.
    """
    shard = 2 * shard_positions * row_bytes(base.hidden_size, dtype=cached_dtype)
    return Memory(
        base_weights=base.num_bytes,
        base_forward=forward_bytes(base, tokens=batch_tokens),
        hidden_states=0,
        cache=shard if is_host else 0,
    )


def _divided(num_bytes: int, parts: int) -> int:
    return -(-num_bytes // parts)
