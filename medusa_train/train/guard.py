"""Keeps a base that is trained near its original.

Each evaluation while training gives the held-out KL(original ‖ trained). Above a limit the heads'
weight is lowered and nothing is saved; where that does not help, training stops. So the last
checkpoint is one below the limit, and the result is that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from medusa_train.console import warn
from medusa_train.errors import MedusaTrainError
from medusa_train.json_values import read_json
from medusa_train.run_dir import write_json

GUARD_FILE = "guard.json"
METRIC = "eval_base_kl"


class Guard(TrainerCallback):
    """Watches the held-out divergence.

    Args:
        max_kl: the limit, in nats per token.
        lower_by: the heads' weight is multiplied by this at each evaluation above it.
        patience: evaluations in a row above it after which training stops.
    """

    def __init__(self, *, max_kl: float, lower_by: float, patience: int) -> None:
        self.max_kl = max_kl
        self.lower_by = lower_by
        self.patience = patience
        self.factor = 1.0
        self.num_above = 0
        self.good_step: int | None = None
        self.has_stopped = False
        self._checked_step = -1

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """What is to be saved is evaluated before."""
        del args, state, kwargs
        control.should_evaluate = control.should_evaluate or control.should_save

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The same."""
        del args, state, kwargs
        control.should_evaluate = control.should_evaluate or control.should_save

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Judge the newest figure."""
        del args, kwargs
        divergence = (metrics or {})[METRIC]
        # A divergence that is not finite is above any limit.
        if divergence <= self.max_kl:
            self.num_above = 0
            self._checked_step = state.global_step
            return
        self.num_above += 1
        self.factor *= self.lower_by
        control.should_save = False
        what = (
            f"held-out KL to the original base {divergence:.3g} at step {state.global_step}, above "
            f"train.medusa2.guard.max_kl {self.max_kl:g}"
        )
        if self.num_above < self.patience:
            warn(f"{what}: the heads' weight is lowered to {self.factor:.3g} of the recipe's")
            return
        control.should_training_stop = self.has_stopped = True
        warn(f"{what} for {self.num_above} evaluations in a row: training stops")

    @property
    def is_above(self) -> bool:
        """Whether the last evaluation was above the limit."""
        return self.num_above > 0

    def checkpoint(self, directory: Path) -> Path | None:
        """The checkpoint that is the result because the last evaluation was above; else None.

        Args:
            directory: of the checkpoints.

        Raises:
            MedusaTrainError: it was above before there was a checkpoint.
        """
        if not self.is_above:
            return None
        if self.good_step is None:
            raise MedusaTrainError(
                f"train.medusa2.guard: the held-out KL to the original base is above "
                f"{self.max_kl:g}, and no checkpoint is from before that; lower "
                "train.trainer.learning_rate or head_loss_weight, or save earlier (save_steps)"
            )
        return directory / f"{PREFIX_CHECKPOINT_DIR}-{self.good_step}"

    def note_ruin(self, step: int) -> None:
        """A loss was not finite."""
        self.num_above = max(self.num_above, self.patience)
        self.has_stopped = True
        warn(f"the loss is not finite at step {step} or just before it: training stops")

    def note_saved(self, step: int) -> None:
        """A checkpoint is written; it is good if its very step was evaluated, and was below.

        One that an interrupt asked for was not.
        """
        if self._checked_step == step:
            self.good_step = step

    def save(self, directory: Path) -> None:
        """Write into a checkpoint what a run needs to go on from it."""
        values = {
            "factor": self.factor,
            "num_above": self.num_above,
            "good_step": self.good_step,
        }
        write_json(directory / GUARD_FILE, values)

    def restore(self, checkpoint: Path) -> None:
        """Go on as the run that wrote ``checkpoint`` would have."""
        values = read_json(checkpoint / GUARD_FILE)
        self.factor = float(values["factor"])
        self.num_above = int(values["num_above"])
        self.good_step = values["good_step"]
