"""The Hugging Face Trainer, with what head training needs changed and nothing else.

Changed: the denominators of the loss (valid pairs per head in the global accumulated batch), what a
checkpoint holds (the trainable tensors, as a heads directory), that a checkpoint appears whole or
not at all, the per-head figures in the log, and that a loss that is not finite ends the run.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from medusa_train.console import log
from medusa_train.distributed import wait_for_all
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
    whole_tensor,
)
from medusa_train.train.even import EvenExamples
from medusa_train.train.held_out import evaluate_held_out
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
    ) -> None:
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
        self.is_staging = False
        self._counts = HeadCounts.zeros(module.heads.config.num_heads, device=args.device)
        self._is_finite = torch.ones((), dtype=torch.bool, device=args.device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Tensor:
        """[K] valid pairs of each head in all micro-batches of all processes."""
        pairs = torch.zeros(self.module.heads.config.num_heads, dtype=torch.float64, device=device)
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
        outputs = model(**inputs, num_pairs=num_pairs, with_ranks=self._takes_ranks())
        loss = outputs["loss"] * self.accelerator.num_processes
        self._is_finite &= loss.detach().isfinite()
        self._counts = self._counts + outputs["counts"]
        self.throughput.add(inputs["labels"])
        return (loss, outputs) if return_outputs else loss

    def _takes_ranks(self) -> bool:
        """Ranks cost a pass over the logits, so only the steps that are logged take them."""
        step = self.state.global_step + 1
        interval = max(1, int(self.state.logging_steps))
        return step % interval == 0 or step in {1, self.state.max_steps}

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log or self.control.should_save or self.control.should_evaluate:
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

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add the per-head figures and the speed since the last log."""
        if "loss" in logs:
            stacked = self.accelerator.reduce(self._counts.stacked(), reduction="sum")
            logs = {**logs, **HeadCounts.from_stacked(stacked).log_values()}
            logs["pairs"] = stacked[:, -2].sum().item()
            logs |= self.throughput.log_values(self.accelerator, num_pairs=logs["pairs"])
            self._counts = HeadCounts.zeros(len(stacked), device=stacked.device)
        super().log(logs, start_time)

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
        """Train to the end, from ``checkpoint`` or from the start.

        Ctrl-C or SIGTERM in any process saves a checkpoint after the step.

        Raises:
            InputError: the checkpoint is of another number or kind of processes.
            MedusaTrainError: a loss was not finite, or a checkpoint could not be written.
            KeyboardInterrupt: it was interrupted, and saved.
        """
        if checkpoint is not None:
            check_same_processes(checkpoint, engine=self._engine())
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
        self.check_finite()
        if stop.has_stopped:
            log(
                f"interrupted at step {self.state.global_step}: run the same command again to go on"
            )
            raise KeyboardInterrupt

    def _engine(self) -> str:
        if self.is_deepspeed_enabled:
            return "DeepSpeed"
        return "FSDP" if self.is_fsdp_enabled else "plain"

    def whole_tensors(self) -> dict[str, Tensor]:
        """The heads' tensors in fp32 on the CPU, in the main process; in the others none.

        All processes call it: where weights are sharded, they are put together one at a time.
        """
        tensors = {}
        for name, tensor in self.module.heads.state_dict(keep_vars=True).items():
            whole = whole_tensor(tensor)
            if self.args.should_save:
                tensors[name] = whole.detach().cpu().contiguous()
        return tensors

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the heads, and nothing of the base."""
        tensors = self.whole_tensors()
        if self.args.should_save and output_dir is not None:
            config = self.module.heads.config
            save_tensors(tensors, Path(output_dir), config=config, base=self.identity)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self.is_fsdp_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        heads, _ = load_heads(
            Path(resume_from_checkpoint), base_fingerprint=self.identity.fingerprint
        )
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
            shutil.rmtree(directory / name, ignore_errors=True)
            (staging / name).rename(directory / name)
            self._note_best(directory)
            rotate_checkpoints(
                output_dir=str(directory),
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=self.state.best_model_checkpoint,
            )
        wait_for_all()

    def _note_best(self, directory: Path) -> None:
        """Name the checkpoint with the best evaluation; rotation keeps it."""
        step = self.state.best_global_step
        best = directory / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        if step and best.exists() and self.state.best_model_checkpoint != str(best):
            self.state.best_model_checkpoint = str(best)
            name, value = self.args.metric_for_best_model, self.state.best_metric
            log(f"best checkpoint: {best}, {name} {value:.4f}")
