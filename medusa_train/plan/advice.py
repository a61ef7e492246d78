"""What does not fit, and which keys of the recipe make it smaller."""

from __future__ import annotations

from dataclasses import replace

from medusa_train.heads.config import HeadsConfig
from medusa_train.plan.disk import Disk
from medusa_train.plan.joint import JointLoad, activation_bytes
from medusa_train.plan.memory import BF16, Load, Memory, output_parameters
from medusa_train.plan.model_shape import ModelShape

GIB = 1 << 30


def memory_warning(
    memory: Memory,
    *,
    free: int,
    base: ModelShape,
    heads: HeadsConfig,
    load: Load,
    stage: str,
    joint: JointLoad | None = None,
) -> str | None:
    """One line when a stage needs more than the device has free, with what to set.

    Args:
        memory: what the stage needs on a device.
        free: bytes of the device that are free.
        base: the base.
        heads: the heads.
        load: what the device works on.
        stage: ``train`` or ``hidden-states``.
        joint: how the base is trained, or None.
    """
    if memory.total <= free:
        return None
    needs = f"{stage}: needs {gib(memory.total)} of memory per device, {gib(free)} are free"
    if stage == "hidden-states":
        halve = "" if base.dtype_bytes <= BF16 else "set base_model.dtype to bfloat16, or "
        return f"{needs}; {halve}use a device with more memory"
    hints = training_hints(memory, base=base, heads=heads, load=load, joint=joint)
    return f"{needs}; {', or '.join(hints)}" if hints else f"{needs}; use more devices"


def training_hints(
    memory: Memory,
    *,
    base: ModelShape,
    heads: HeadsConfig,
    load: Load,
    joint: JointLoad | None = None,
) -> list[str]:
    """Keys that make training smaller, those that save most first."""
    saved: list[tuple[int, str]] = []
    of_heads = memory.heads + memory.gradients + memory.optimizer + memory.loss_chunk
    if output_parameters(heads):
        saved.append((of_heads, "set heads.layout to shared"))
        smaller = max(1, heads.vocab_size // 4)
        if heads.num_logits > smaller:
            share = of_heads - of_heads * smaller // heads.num_logits
            saved.append((share, f"set heads.vocab_size to {smaller} or less"))
    of_batch = memory.activations + memory.hidden_states
    if load.batch_size > 1:
        saved.append(
            (
                of_batch - of_batch // load.batch_size,
                "lower train.trainer.per_device_train_batch_size and raise "
                "gradient_accumulation_steps",
            )
        )
    if joint is not None:
        if not joint.is_checkpointed:
            again = replace(joint, is_checkpointed=True)
            of_both = [activation_bytes(base, load=load, joint=j) for j in (joint, again)]
            hint = "set train.trainer.activation_checkpointing to true"
            saved.append((of_both[0] - of_both[1], hint))
    elif load.is_online:
        without = replace(memory, base_forward=0).total
        saved.append((memory.total - without, "set train.hidden_states to cached"))
    saved.sort(key=lambda item: -item[0])
    return [text for size, text in saved if size > 0]


def disk_warning(disk: Disk, *, free: int, directory: str, is_cached: bool) -> str | None:
    """One line when the run directory's disk has less room than the run needs."""
    if disk.total <= free:
        return None
    hints = ["lower train.trainer.save_total_limit"]
    if is_cached and disk.hidden_states >= disk.checkpoints:
        hints.insert(0, "set train.hidden_states to online")
    hints.append("give a run_dir on another disk")
    return (
        f"{directory}: the run needs {gib(disk.total)} of disk, {gib(free)} are free; "
        f"{', or '.join(hints)}"
    )


def gib(num_bytes: float) -> str:
    """``1610612736`` → ``1.50 GiB``."""
    return f"{num_bytes / GIB:.2f} GiB"
