"""The Hugging Face Trainer, with what head training needs changed and nothing else.

Changed: the denominators of the loss (valid pairs per head in the global accumulated batch), what a
checkpoint holds (the trainable tensors, as a heads directory), that a checkpoint appears whole or
not at all, the per-head figures in the log, and that a loss that is not finite ends the run. With a
base that is trained too: its own learning rate, λ0, and what becomes of it in a checkpoint.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from medusa_train.base_model.trained import put_trained, save_trained
from medusa_train.console import log
from medusa_train.distributed import any_process, wait_for_all
from medusa_train.errors import MedusaTrainError
from medusa_train.heads.checkpoint import load_heads, save_tensors
from medusa_train.heads.config import BaseIdentity
from medusa_train.hidden_states.cache import CachedExamples
from medusa_train.hidden_states.online import OnlineExamples
from medusa_train.interrupts import interruptible
from medusa_train.metrics import HeadCounts
from medusa_train.train.checkpoints import (
    StopWhenAsked,
    check_same_processes,
    publish,
    whole_tensors,
)
from medusa_train.train.even import EvenExamples
from medusa_train.train.held_out import evaluate_held_out
from medusa_train.train.joint_training import JointTraining, joint_optimizer, trained_identity
from medusa_train.train.module import HeadsModule
from medusa_train.train.throughput import Throughput
from medusa_train.train.tracking import TrainingLog

STAGING = ".partial"


class HeadsTrainer(Trainer):
    """Trains a :class:`HeadsModule`.

    Args:
        module: base and heads.
        args: the Trainer's arguments.
        identity: of the base, written into every checkpoint.
        train_dataset: items that ``collate`` turns into batches.
        eval_dataset: the same for ``eval_strategy``; None for no evaluation while training.
        collate: items → batch.
        callbacks: the log, the trackers.
        joint: how the base is trained with the heads; None where it is frozen.
    """

    # The loss is divided by the pairs of the whole accumulated batch: no further division.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        module: HeadsModule,
        args: TrainingArguments,
        *,
        identity: BaseIdentity,
        train_dataset: CachedExamples | OnlineExamples | EvenExamples,
        eval_dataset: CachedExamples | OnlineExamples | None,
        collate: Callable[[Sequence[Any]], dict[str, Tensor]],
        callbacks: list[TrainerCallback],
        joint: JointTraining | None = None,
    ) -> None:
        self.joint = joint
        self.guard = None if joint is None else joint.guard
        super().__init__(
            model=module,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            data_collator=collate,
            callbacks=callbacks,
        )
        self.remove_callback(PrinterCallback)
        self.throughput = Throughput(
            module.heads.config,
            has_teacher=module.teacher is not None,
            device=args.device,
            compute_dtype=module.compute_dtype,
        )
        self.add_callback(self.throughput)
        self.module = module
        self.identity = identity
        self.collate = collate
        if self.guard is not None:
            self.add_callback(self.guard)
        self.is_staging = False
        self._counts = HeadCounts.zeros(module.heads.config.num_heads, device=args.device)
        self._is_finite = torch.ones((), dtype=torch.bool, device=args.device)
        self._base = torch.zeros(2, dtype=torch.float64, device=args.device)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """With a base that is trained: groups of their own for base and heads."""
        if self.joint is None or self.optimizer is not None:
            return super().create_optimizer(model)
        self.optimizer = joint_optimizer(
            self.module,
            self.args,
            multiplier=self.joint.head_lr_multiplier,
            decaying=self.get_decay_parameter_names(self.module),
            chosen=self.get_optimizer_cls_and_kwargs(self.args),
        )
        return self.optimizer

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor:
        """Denominators of the loss, over all micro-batches of all processes."""
        pairs = torch.zeros(self.module.num_denominators, dtype=torch.float64, device=device)
        for batch in batch_samples:
            pairs += self.module.count_pairs(batch["labels"]).to(device)
        total: Tensor = self.accelerator.reduce(pairs, reduction="sum")
        return total

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The module's loss, times the number of processes, which average their gradients."""
        num_pairs = num_items_in_batch
        if num_pairs is None:
            num_pairs = self.module.count_pairs(inputs["labels"])
        more = {}
        if self.joint is not None:
            more["head_loss_weight"] = self.joint.head_loss_weight(self.state)
        outputs = model(**inputs, num_pairs=num_pairs, with_ranks=self._takes_ranks(), **more)
        loss = outputs["loss"] * self.accelerator.num_processes
        self._is_finite &= loss.detach().isfinite()
        self._counts = self._counts + outputs["counts"]
        if self.joint is not None:
            rows = outputs["base_loss_sum"].new_tensor(len(inputs["labels"]))
            self._base += torch.stack([outputs["base_loss_sum"], rows])
        self.throughput.add(inputs["labels"])
        return (loss, outputs) if return_outputs else loss

    def _takes_ranks(self) -> bool:
        """Ranks cost a pass over the logits, so only the steps that are logged take them."""
        step = self.state.global_step + 1
        interval = max(1, int(self.state.logging_steps))
        return step % interval == 0 or step in {1, self.state.max_steps}

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log or self.control.should_save or self.control.should_evaluate:
            if self._is_ruined():
                return
            self.check_finite()
        # The device has been read just now, so what follows is not training.
        since = time.perf_counter()
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self.throughput.leave_out(since=since)

    def check_finite(self) -> None:
        """Raise if any loss since the start was not finite; one read of the device.

        Raises:
            MedusaTrainError: nothing of such a step is logged or saved.
        """
        if not bool(self._is_finite):
            raise MedusaTrainError(
                f"the loss is not finite at step {self.state.global_step} or just before it; "
                "lower train.trainer.learning_rate, raise its warm-up, or look for bad rows in "
                "the data; the last checkpoint is from before that step"
            )

    def _is_ruined(self) -> bool:
        """Whether a loss was not finite and a guard knows what then; then this ends.

        All processes ask at the same point.
        """
        if self.guard is None or not self.guard.outlives_ruin:
            return False
        if not any_process(not bool(self._is_finite)):
            return False
        self.guard.note_ruin(self.state.global_step)
        self.control.should_log = self.control.should_save = self.control.should_evaluate = False
        self.control.should_training_stop = True
        return True

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the per-head figures and the speed since the last log."""
        if "loss" in logs:
            stacked = self.accelerator.reduce(self._counts.stacked(), reduction="sum")
            logs = {**logs, **HeadCounts.from_stacked(stacked).log_values()}
            logs["pairs"] = stacked[:, -2].sum().item()
            logs |= self.throughput.log_values(self.accelerator, num_pairs=logs["pairs"])
            self._counts = HeadCounts.zeros(len(stacked), device=stacked.device)
            if self.joint is not None:
                logs |= self._base_values()
                # Its operations are the heads' alone.
                logs.pop("model_flops_utilisation", None)
        if self.guard is not None and self.guard.has_stopped:
            # The mean loss of the run may be no number, and that was said.
            logs = {name: value for name, value in logs.items() if math.isfinite(value)}
        super().log(logs, start_time)

    def _base_values(self) -> dict[str, float]:
        """The base's loss since the last log, and λ0 of the last step."""
        assert self.joint is not None
        assert self.module.joint is not None
        base = self.accelerator.reduce(self._base, reduction="sum")
        self._base = torch.zeros_like(self._base)
        values = {"lambda0": self.joint.head_loss_weight(self.state, back=1)}
        if base[1]:
            values[f"base_{self.module.joint.loss}"] = (base[0] / base[1]).item()
        return values

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """Per-head figures and the acceptance length on the eval split, over all of it."""
        del eval_dataset, ignore_keys
        assert isinstance(self.eval_dataset, CachedExamples | OnlineExamples)
        values = evaluate_held_out(
            self.module,
            self.eval_dataset,
            args=self.args,
            collate=self.collate,
            reduce=lambda tensor: self.accelerator.reduce(tensor, reduction="sum"),
        )
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in values.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def fit(self, checkpoint: Path | None = None) -> None:
        """Train from ``checkpoint`` or from the start, to the end or until a guard goes back.

        Ctrl-C or SIGTERM in any process saves a checkpoint after the step.

        Raises:
            InputError: the checkpoint is of another number or kind of processes.
            MedusaTrainError: a loss was not finite, or a checkpoint could not be written.
            KeyboardInterrupt: it was interrupted, and saved.
        """
        if checkpoint is not None:
            check_same_processes(checkpoint, engine=self._engine())
        if self.guard is not None:
            self.guard.restore(Path(str(self.args.output_dir)), checkpoint=checkpoint)
        with interruptible("saving a checkpoint after this step") as interrupt:
            stop = StopWhenAsked(interrupt)
            self.add_callback(stop)
            try:
                self.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            finally:
                self.remove_callback(stop)
                for callback in self.callback_handler.callbacks:
                    if isinstance(callback, TrainingLog):
                        callback.close()
        rolls_back = self.guard is not None and self.guard.rolls_back
        if not rolls_back and self.guarded_checkpoint() is None:
            self.check_finite()
        if stop.has_stopped:
            log(
                f"interrupted at step {self.state.global_step}: run the same command again to go on"
            )
            raise KeyboardInterrupt

    def guarded_checkpoint(self) -> Path | None:
        """The checkpoint that is the result because the base has moved too far since; or None.

        Raises:
            MedusaTrainError: it was too far before there was a checkpoint.
        """
        directory = Path(str(self.args.output_dir))
        return None if self.guard is None else self.guard.checkpoint(directory)

    def _engine(self) -> str:
        if self.is_deepspeed_enabled:
            return "DeepSpeed"
        return "FSDP" if self.is_fsdp_enabled else "plain"

    def whole_tensors(self) -> dict[str, Tensor]:
        """The heads' tensors in fp32 on the CPU, in the main process; in the others none.

        All processes call it: where weights are sharded, they are put together one at a time.
        """
        tensors = self.module.heads.state_dict(keep_vars=True).items()
        return whole_tensors(tensors, keeps=self.args.should_save)

    def trained_tensors(self) -> dict[str, Tensor]:
        """The same of the base's tensors that are trained, by their names in the base."""
        if self.module.joint is None:
            return {}
        parameters = self.module.joint.model.named_parameters()
        tensors = [(name, tensor) for name, tensor in parameters if tensor.requires_grad]
        return whole_tensors(tensors, keeps=self.args.should_save)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the heads, and of the base what is trained."""
        tensors, trained = self.whole_tensors(), self.trained_tensors()
        if self.guard is not None:
            self.guard.note_saved(self.state.global_step)
        if not self.args.should_save or output_dir is None:
            return
        directory = Path(output_dir)
        identity = self.identity
        if self.joint is not None:
            part = directory / self.joint.directory_name
            save_trained(trained, part, adapters=self.joint.adapters)
            identity = trained_identity(identity, part)
            if self.guard is not None:
                self.guard.save(directory)
        save_tensors(tensors, directory, config=self.module.heads.config, base=identity)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        directory = Path(resume_from_checkpoint)
        if self.joint is not None:
            assert self.module.joint is not None
            heads, _ = load_heads(directory)
            put_trained(self.module.joint.model, directory / self.joint.directory_name)
        else:
            heads, _ = load_heads(directory, base_fingerprint=self.identity.fingerprint)
        self.module.heads.load_state_dict(heads.state_dict())

    def _load_best_model(self) -> None:
        """With ``load_best_model_at_end``: the heads of the best checkpoint are the run's."""
        best = self.state.best_model_checkpoint
        if best is None or self.is_deepspeed_enabled or self.is_fsdp_enabled:
            super()._load_best_model()
        else:
            self._load_from_checkpoint(best)

    def _get_output_dir(self, trial: Any) -> str:
        directory = super()._get_output_dir(trial)
        return str(Path(directory) / STAGING) if self.is_staging else directory

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Let the Trainer write into a staging directory, then rename: whole or not there."""
        directory = Path(self._get_output_dir(trial))
        staging = directory / STAGING
        if self.args.should_save:
            shutil.rmtree(staging, ignore_errors=True)
        wait_for_all()
        self.is_staging = True
        try:
            super()._save_checkpoint(model, trial)
        except OSError as error:
            raise MedusaTrainError(
                f"{directory}: the checkpoint cannot be written: {error.strerror}; make room and "
                "run the same command again, it goes on from the checkpoint before"
            ) from error
        finally:
            self.is_staging = False
        wait_for_all()
        if self.args.should_save:
            name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            self._note_best(directory)
            publish(staging / name, directory / name, state=self.state)
            # The last good one may be older than the limit of their number lets it be.
            if self.guard is None or self.guard.good_step == self.state.global_step:
                rotate_checkpoints(
                    output_dir=str(directory),
                    save_total_limit=self.args.save_total_limit,
                    best_model_checkpoint=self.state.best_model_checkpoint,
                )
        wait_for_all()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """DeepSpeed's part of a checkpoint is without the weights that are frozen."""
        if self.joint is None or not self.is_deepspeed_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        engine: Any = self.model_wrapped
        engine.save_checkpoint = partial(engine.save_checkpoint, exclude_frozen_parameters=True)
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        finally:
            del engine.save_checkpoint

    def _note_best(self, directory: Path) -> None:
        """Name the checkpoint with the best evaluation; rotation keeps it."""
        step = self.state.best_global_step
        best = directory / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        is_known = best.exists() or step == self.state.global_step
        if step and is_known and self.state.best_model_checkpoint != str(best):
            self.state.best_model_checkpoint = str(best)
            name, value = self.args.metric_for_best_model, self.state.best_metric
            log(f"best checkpoint: {best}, {name} {value:.4f}")
