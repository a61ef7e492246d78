"""Checkpoints: which is the last one, whether this run can go on from it, and whole weights.

Where DeepSpeed or FSDP shard the weights, a process holds a part of each; what is saved is whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from medusa_train.distributed import any_process, num_processes
from medusa_train.errors import InputError
from medusa_train.interrupts import Interrupt


class StopWhenAsked(TrainerCallback):
    """Ends training with a checkpoint when any process was asked to.

    Args:
        interrupt: of this process.
    """

    def __init__(self, interrupt: Interrupt) -> None:
        self.interrupt = interrupt
        self.has_stopped = False

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Agree with the other processes, which may be steps away from the signal."""
        del args, kwargs
        if any_process(self.interrupt.is_asked) and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = self.has_stopped = True


def whole_tensor(tensor: Tensor) -> Tensor:
    """A parameter of which this process has a part or all; in fp32 where it was trained in less."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor()
    if hasattr(tensor, "ds_id") or hasattr(tensor, "_hp_mapping"):
        from deepspeed.utils import safe_get_full_fp32_param

        whole: Tensor = safe_get_full_fp32_param(tensor)
        return whole
    return tensor


def whole_tensors(tensors: Iterable[tuple[str, Tensor]], *, keeps: bool) -> dict[str, Tensor]:
    """Named tensors, whole and on the CPU; all processes call it, and those that keep get them."""
    kept = {}
    for name, tensor in tensors:
        whole = whole_tensor(tensor)
        if keeps:
            kept[name] = whole.detach().cpu().contiguous()
    return kept


def check_same_processes(checkpoint: Path, *, engine: str) -> None:
    """Raise :class:`InputError` unless as many processes of the same kind wrote ``checkpoint``.

    Each step takes a batch of every process, and each process keeps its own part of the state.
    """
    states = list(checkpoint.glob("rng_state_*.pth"))
    then, now = max(1, len(states)), num_processes()
    wrote = "plain"
    if list(checkpoint.glob("global_step*")):
        wrote = "DeepSpeed"
    elif list(checkpoint.glob("optimizer_*")) or list(checkpoint.glob("pytorch_model_fsdp*")):
        wrote = "FSDP"
    if (then, wrote) == (now, engine):
        return
    raise InputError(
        f"{checkpoint}: written by {then} processes ({wrote}), and this run has {now} ({engine}); "
        f"go on with {then} (--devices {then}) of that kind, or start from its heads in a new run: "
        f"--set heads.init_from={checkpoint} --set run_dir=…"
    )


def publish(staged: Path, place: Path, *, state: TrainerState) -> None:
    """Move a checkpoint that is whole to its place, with ``state`` as it is now.

    The Trainer has written a state that may name as the best checkpoint the one in the staging
    directory.
    """
    state.save_to_json(str(staged / TRAINER_STATE_NAME))
    shutil.rmtree(place, ignore_errors=True)
    staged.rename(place)


def numbered_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """The complete checkpoints in ``directory``, each with its step, ascending."""
    return sorted(
        (int(path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")), path)
        for path in directory.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-").isdigit()
    )


def last_checkpoint(directory: Path) -> Path | None:
    """The complete checkpoint with the most steps in ``directory``, or None."""
    found = numbered_checkpoints(directory)
    return found[-1][1] if found else None
