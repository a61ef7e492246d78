"""What training the base too adds to a plan (Medusa-2).

Symbols as in :mod:`medusa_train.plan.memory`; P_t trained parameters of the base, M its layers, A
what the adapted matrices of a layer read per token, in numbers; b = 4 where the base's own weights
are trained without bf16 in DeepSpeed.

=============  =====================================================================================
base weights   b · P_b; with adapters 4 · P_t more; with a frozen copy twice (b · P_b each)
optimizer      8 · P_t; 4 · P_t more where the weights in use are bf16, for their fp32 masters
gradients      4 · P_t; 4 · V · D more while the loss of a trained ``lm_head`` is at work
activations    a layer keeps per token b · (8 · D + 4 · W), and with adapters 4 · A, their input in
               fp32; all M layers do, or with checkpointing one, and of the others b · D each; the
               original's states, and the gradient of the trained ones: 12 · D per position
loss chunk     of the base: two of s · c · V (model and original), their weights in that type and
               16 · q of softmax, where that is more than a head's
=============  =====================================================================================

ZeRO divides as it does the heads: the optimizer from stage 1, gradients that are kept from stage 2,
weights from stage 3 (a frozen copy too).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from medusa_train.loss_products import BLOCK_ELEMENTS
from medusa_train.losses import default_chunk_size
from medusa_train.plan.memory import FP32, Load, Memory
from medusa_train.plan.model_shape import ModelShape


@dataclass(frozen=True, slots=True)
class JointLoad:
    """How the base is trained.

    Attributes:
        trained: P_t.
        is_adapters: whether those are beside the base's own weights.
        adapted_width: A.
        trains_lm_head: whether ``lm_head`` gets a gradient of its whole size.
        has_copy: whether a second copy of the base is the original.
        runs_original: whether the original runs at each step.
        is_checkpointed: whether activations are computed again in the backward pass.
        keeps_masters: whether the weights in use are bf16 with fp32 masters.
    """

    trained: int
    is_adapters: bool
    adapted_width: int
    trains_lm_head: bool
    has_copy: bool
    runs_original: bool
    is_checkpointed: bool
    keeps_masters: bool

    @property
    def base_passes(self) -> int:
        """Forward passes of the base that a step costs as much as."""
        backward = 1 if self.is_adapters else 2
        return 1 + backward + int(self.is_checkpointed) + int(self.runs_original)


def with_joint(
    memory: Memory,
    base: ModelShape,
    *,
    load: Load,
    joint: JointLoad,
    zero: int,
    devices: int,
) -> Memory:
    """Bytes per device while base and heads are trained.

    Args:
        memory: of the heads alone, with the base online.
        base: its shape, in the type in which it is trained.
        load: what one device works on.
        joint: how the base is trained.
        zero: ZeRO stage.
        devices: G.
    """
    parts = [devices if zero >= stage else 1 for stage in (0, 1, 2, 3)]
    adapters = FP32 * joint.trained if joint.is_adapters else 0
    copies = base.num_bytes if joint.has_copy else 0
    masters = FP32 * joint.trained if joint.keeps_masters else 0
    shards = FP32 * joint.trained if devices > 1 and zero in {1, 2} and not masters else 0
    optimizer = 2 * FP32 * joint.trained + masters + shards
    head_gradient = FP32 * base.vocab_size * base.hidden_size if joint.trains_lm_head else 0
    held = FP32 * joint.trained
    if load.accumulation > 1:
        held = -(-held // parts[2])
    states = 12 * load.batch_positions * base.hidden_size
    return replace(
        memory,
        base_weights=memory.base_weights + -(-(adapters + copies) // parts[3]),
        optimizer=memory.optimizer + -(-optimizer // parts[1]),
        gradients=memory.gradients + held + head_gradient,
        held_gradients=memory.held_gradients + (held if load.accumulation > 1 else 0),
        activations=memory.activations + activation_bytes(base, load=load, joint=joint) + states,
        loss_chunk=max(memory.loss_chunk, _chunk_bytes(base, load=load, joint=joint)),
    )


def activation_bytes(base: ModelShape, *, load: Load, joint: JointLoad) -> int:
    """What the base's backward pass reads."""
    tokens = load.batch_size * load.row_tokens
    of_layer = base.dtype_bytes * (8 * base.hidden_size + 4 * base.widest)
    of_layer += FP32 * joint.adapted_width
    if joint.is_checkpointed:
        return tokens * (of_layer + base.dtype_bytes * base.hidden_size * base.num_layers)
    return tokens * of_layer * base.num_layers


def _chunk_bytes(base: ModelShape, *, load: Load, joint: JointLoad) -> int:
    """What the base's own loss holds besides its results."""
    size = load.compute_bytes
    chunk = load.chunk_size or default_chunk_size(base.vocab_size)
    logits = min(chunk, max(load.batch_positions, 1)) * base.vocab_size
    matrix = base.vocab_size * base.hidden_size
    softmax = min(logits, BLOCK_ELEMENTS) if load.is_host else logits
    count = 2 if joint.runs_original else 1
    casts = size * matrix if size != base.dtype_bytes else 0
    return count * (size * logits + casts + 2 * FP32 * softmax)
