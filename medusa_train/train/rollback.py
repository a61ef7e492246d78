"""Going back to the last good checkpoint: what of it is on disk.

A run that goes back writes that down, and then goes on as a run that was interrupted at that
checkpoint, so that a kill at any time changes nothing.
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from medusa_train.console import log
from medusa_train.json_values import read_json
from medusa_train.run_dir import write_json
from medusa_train.train.checkpoints import numbered_checkpoints

GUARD_FILE = "guard.json"
ROLLBACKS_FILE = "rollbacks.json"
_UNDONE = ".undone"


@dataclass(frozen=True, slots=True)
class Rollback:
    """One return to a checkpoint.

    Attributes:
        from_step: where training ended.
        to_step: of the checkpoint; 0 is the start, for want of one.
        base_kl: the held-out KL at the end, in nats per token; None: a loss was not finite.
        head_loss_factor: the heads' weight, of the recipe's, with which training went on.
        learning_rate_factor: the same of the learning rates.
    """

    from_step: int
    to_step: int
    base_kl: float | None
    head_loss_factor: float
    learning_rate_factor: float


def read_rollbacks(checkpoints: Path) -> list[Rollback]:
    """What a run has gone back, first to last.

    Args:
        checkpoints: the directory of its checkpoints.
    """
    path = checkpoints / ROLLBACKS_FILE
    return [Rollback(**values) for values in read_json(path)] if path.exists() else []


def add_rollback(checkpoints: Path, rollback: Rollback) -> None:
    """Write down one more."""
    every = [*read_rollbacks(checkpoints), rollback]
    write_json(checkpoints / ROLLBACKS_FILE, [asdict(one) for one in every])


def remove_undone(checkpoints: Path) -> None:
    """Remove what was written between the last return's two ends, before it.

    An interrupt saves a checkpoint that may be above the limit.
    """
    for path in checkpoints.glob(f"{_UNDONE}-*"):
        shutil.rmtree(path)
    rollbacks = read_rollbacks(checkpoints)
    if not rollbacks:
        return
    for step, path in numbered_checkpoints(checkpoints):
        if step <= rollbacks[-1].to_step or not (path / GUARD_FILE).exists():
            # A kill may have left a part of one that made room for another.
            continue
        if read_json(path / GUARD_FILE).get("num_rollbacks", 0) < len(rollbacks):
            log(f"removing {path}: training went back to before it")
            # Whole or not there, also when this is killed.
            shutil.rmtree(path.rename(checkpoints / f"{_UNDONE}-{path.name}"))
