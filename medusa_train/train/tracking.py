"""What a training run says while it runs: lines or a bar on stderr, and ``metrics.jsonl``."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from medusa_train import console
from medusa_train.run_dir import read_json_lines


class MetricsFile(TrainerCallback):
    """Appends every log of the Trainer to ``metrics.jsonl``, one JSON object a line.

    On resume the lines of steps after the checkpoint are dropped, since they come again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Keep the lines of the steps that are in the checkpoint."""
        del args, control, kwargs
        if not state.is_world_process_zero:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_json_lines(self.path) if line["step"] <= state.global_step]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        self.path.write_text(text if state.global_step else "", encoding="utf-8")

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Append one line."""
        del args, control, kwargs
        if state.is_world_process_zero:
            line = {"step": state.global_step, "time": round(time.time(), 3), **(logs or {})}
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


class TrainingLog(TrainerCallback):
    """The progress of training on stderr: a bar on a terminal, else one line per interval.

    Args:
        num_heads: K, for the per-head figures.
    """

    def __init__(self, num_heads: int) -> None:
        self.num_heads = num_heads
        self._stack = ExitStack()
        self._bar: console.ProgressReporter | None = None
        self._detail = ""

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Open the bar."""
        del args, control, kwargs
        self._bar = self._stack.enter_context(
            console.progress("train", state.max_steps, done=state.global_step)
        )

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """One more step."""
        del args, control, kwargs
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.done, detail=self._detail)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show the newest figures."""
        del args, control, kwargs
        if not logs:
            return
        if "loss" in logs:
            rate = logs.get("pairs_per_second", 0.0)
            self._detail = f"loss {logs['loss']:.3f}, {self._top1(logs, '')}, {rate:,.0f} pairs/s"
        elif any(name.startswith("eval_head") for name in logs):
            length = logs.get("eval_acceptance_length")
            chain = "" if length is None else f", acceptance length {length:.3f}"
            console.log(f"eval at step {state.global_step}: {self._top1(logs, 'eval_')}{chain}")

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Close the bar."""
        del args, state, control, kwargs
        self.close()

    def close(self) -> None:
        """Close the bar, also after an error."""
        self._stack.close()

    def _top1(self, logs: Mapping[str, float], prefix: str) -> str:
        figures = [logs.get(f"{prefix}head{k + 1}_top1") for k in range(self.num_heads)]
        shown = ["-" if figure is None else f"{figure:.3f}" for figure in figures]
        return "top-1 " + " ".join(shown)
