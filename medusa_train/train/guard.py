"""Keeps a base that is trained near its original.

Each evaluation while training gives the held-out KL(original ‖ trained). Above a limit the heads'
weight is lowered and nothing is saved; where that does not help, training goes back to the last
checkpoint, which is one below the limit, and on from there with less weight and smaller steps. When
it has gone back as often as it may, it stops, and that checkpoint is the result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from medusa_train.console import warn
from medusa_train.errors import MedusaTrainError
from medusa_train.json_values import read_json
from medusa_train.run_dir import write_json
from medusa_train.train.rollback import GUARD_FILE, Rollback, add_rollback, read_rollbacks

METRIC = "eval_base_kl"


class Guard(TrainerCallback):
    """Watches the held-out divergence.

    Args:
        max_kl: the limit, in nats per token.
        lower_by: the heads' weight is multiplied by this at each evaluation above it, and when
            training goes back.
        patience: evaluations in a row above it after which training goes back, or stops.
        num_rollbacks: how often it may go back.
        lower_learning_rate_by: the learning rates are multiplied by this when it does.
    """

    def __init__(
        self,
        *,
        max_kl: float,
        lower_by: float,
        patience: int,
        num_rollbacks: int = 0,
        lower_learning_rate_by: float = 1.0,
    ) -> None:
        self.max_kl = max_kl
        self.lower_by = lower_by
        self.patience = patience
        self.num_rollbacks = num_rollbacks
        self.lower_learning_rate_by = lower_learning_rate_by
        self.factor = 1.0
        self.learning_rate_factor = 1.0
        self.num_above = 0
        self.num_rolled_back = 0
        self.good_step: int | None = None
        self.has_stopped = False
        self._good_factor = 1.0
        self._loaded_rate_factor = 1.0
        self._checked_step = -1
        self._end: tuple[int, float] = (0, math.nan)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Optimizer | None = None,
        lr_scheduler: Any = None,
        **kwargs: Any,
    ) -> None:
        """Lower the learning rates, which are the recipe's or the checkpoint's."""
        del args, state, control, kwargs
        assert optimizer is not None, "the Trainer passes it on"
        scale = self.learning_rate_factor / self._loaded_rate_factor
        if scale != 1.0:
            scale_learning_rates(optimizer, lr_scheduler, by=scale)

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
        self._end = (state.global_step, divergence)
        control.should_save = False
        what = (
            f"held-out KL to the original base {divergence:.3g} at step {state.global_step}, above "
            f"train.medusa2.guard.max_kl {self.max_kl:g}"
        )
        if self.num_above < self.patience:
            warn(f"{what}: the heads' weight is lowered to {self.factor:.3g} of the recipe's")
            return
        control.should_training_stop = self.has_stopped = True
        warn(f"{what} for {self.num_above} evaluations in a row: training {self._what_follows}")

    @property
    def rolls_back(self) -> bool:
        """Whether training has ended to go on from the last good checkpoint."""
        return self.has_stopped and self.num_rolled_back < self.num_rollbacks

    @property
    def outlives_ruin(self) -> bool:
        """Whether there is something to go back to, or to end with, after a loss without number."""
        return self.good_step is not None or self.num_rolled_back < self.num_rollbacks

    @property
    def _what_follows(self) -> str:
        if not self.rolls_back:
            return "stops"
        return f"goes back to {f'step {self.good_step}' if self.good_step else 'its start'}"

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
        self._end = (step, math.nan)
        what = f"the loss is not finite at step {step} or just before it"
        warn(f"{what}: training {self._what_follows}")

    def note_saved(self, step: int) -> None:
        """A checkpoint is written; it is good if its very step was evaluated, and was below.

        One that an interrupt asked for was not.
        """
        if self._checked_step == step:
            self.good_step = step
            self._good_factor = self.factor

    def roll_back(self, directory: Path) -> None:
        """Write down that training goes on from the last good checkpoint, and how.

        Args:
            directory: of the checkpoints.
        """
        step, divergence = self._end
        rollback = Rollback(
            from_step=step,
            to_step=self.good_step or 0,
            base_kl=divergence if math.isfinite(divergence) else None,
            head_loss_factor=self._good_factor * self.lower_by,
            learning_rate_factor=self.learning_rate_factor * self.lower_learning_rate_by,
        )
        add_rollback(directory, rollback)
        warn(
            f"rollback {self.num_rolled_back + 1} of {self.num_rollbacks}: going on from step "
            f"{rollback.to_step} with {rollback.head_loss_factor:.3g} of the heads' weight and "
            f"{rollback.learning_rate_factor:.3g} of the learning rate"
        )

    def save(self, directory: Path) -> None:
        """Write into a checkpoint what a run needs to go on from it."""
        values = {
            "factor": self.factor,
            "num_above": self.num_above,
            "good_step": self.good_step,
            "good_factor": self._good_factor,
            "learning_rate_factor": self.learning_rate_factor,
            "num_rollbacks": self.num_rolled_back,
        }
        write_json(directory / GUARD_FILE, values)

    def restore(self, directory: Path, *, checkpoint: Path | None) -> None:
        """Go on as the run that wrote ``checkpoint`` would have, or as it goes back to it.

        Args:
            directory: of the checkpoints.
            checkpoint: one of them; None is the start.
        """
        if checkpoint is not None:
            values = read_json(checkpoint / GUARD_FILE)
            self.factor = float(values["factor"])
            self.num_above = int(values["num_above"])
            self.good_step = values["good_step"]
            # Checkpoints of before there were rollbacks lack the others.
            self._good_factor = float(values.get("good_factor", self.factor))
            self.learning_rate_factor = float(values.get("learning_rate_factor", 1.0))
            self.num_rolled_back = int(values.get("num_rollbacks", 0))
        self._loaded_rate_factor = self.learning_rate_factor
        rollbacks = read_rollbacks(directory)
        if len(rollbacks) > self.num_rolled_back:
            self.num_rolled_back = len(rollbacks)
            self.factor = self._good_factor = rollbacks[-1].head_loss_factor
            self.learning_rate_factor = rollbacks[-1].learning_rate_factor
            self.num_above = 0


def scale_learning_rates(optimizer: Optimizer, scheduler: Any, *, by: float) -> None:
    """Multiply the learning rates of all groups, now and later in the schedule.

    Args:
        optimizer: that steps next.
        scheduler: one of torch's, or accelerate's cover of it.
        by: factor.
    """
    scheduler = getattr(scheduler, "scheduler", scheduler)
    for name in ("base_lrs", "_last_lr"):
        rates = getattr(scheduler, name, None)
        if rates is not None:
            setattr(scheduler, name, [rate * by for rate in rates])
    for group in optimizer.param_groups:
        for name in ("initial_lr", "lr"):
            if name in group:
                group[name] *= by
