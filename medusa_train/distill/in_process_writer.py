"""The writer of responses in this process: the engine behind the seam."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from transformers import PreTrainedModel

from medusa_train.distill.in_process import InProcessEngine
from medusa_train.distill.sampling import Sampling
from medusa_train.distill.writer import Answer, Failure, Stopping, Teacher
from medusa_train.errors import InputError


class InProcessWriter:
    """Writes with a model in this process; see :class:`medusa_train.distill.writer.Writer`.

    Args:
        load: gives the model, in eval mode; any that keeps keys and values per position. Called
            once, when there is something to write.
        dtype: of its weights.
        vocab_size: the number of the tokenizer's ids; greater ids are never written.
        max_rows: the most rows decoded together.
        unit_size: prompts of one call of :meth:`write`.
        teacher: the log-probabilities that answers have.

    Raises:
        InputError: ``teacher.num`` is not within 1 … ``vocab_size``.
    """

    # One model has one cache, and one call uses all cores.
    num_workers = 1

    def __init__(
        self,
        load: Callable[[], PreTrainedModel],
        *,
        dtype: torch.dtype,
        vocab_size: int,
        max_rows: int,
        unit_size: int,
        teacher: Teacher | None,
    ) -> None:
        if teacher is not None and not 1 <= teacher.num <= vocab_size:
            raise InputError(
                f"teacher_top_n, teacher_samples: must be 1 to {vocab_size}, the number of tokens; "
                f"got {teacher.num}"
            )
        self._load = load
        self._dtype = dtype
        self._vocab_size = vocab_size
        self._max_rows = max_rows
        self.unit_size = unit_size
        self.teacher = teacher

    @cached_property
    def engine(self) -> InProcessEngine:
        """The engine with its model.

        Raises:
            InputError: the model's cache cannot be used so; names the model.
        """
        return InProcessEngine(self._load(), vocab_size=self._vocab_size, max_rows=self._max_rows)

    @property
    def max_length(self) -> int | None:
        """The most positions of prompt and answer together; None: no limit."""
        return self.engine.max_length

    def stop(self) -> None:
        """Nothing: no call runs in another thread."""

    def identity(self) -> dict[str, Any]:
        """What decides the answers: float results depend on the dtype and on the batch's shape."""
        return {
            "writer": "in process",
            "dtype": str(self._dtype).removeprefix("torch."),
            "max_rows": self._max_rows,
            "unit_size": self.unit_size,
        }

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: Sampling,
        stopping: Stopping,
        seed: int,
        on_tokens: Callable[[int], None],
        with_teacher: bool = True,
    ) -> list[Answer | Failure]:
        """Answer every prompt, in the order of the prompts; none fails."""
        generator = torch.Generator(self.engine.model.device).manual_seed(seed)
        return [
            *self.engine.generate(
                prompts,
                sampling=sampling,
                stopping=stopping,
                generator=generator,
                teacher=self.teacher if with_teacher else None,
                on_step=on_tokens,
            )
        ]
