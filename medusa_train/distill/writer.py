"""Who writes the responses: the seam between a generation and the model that answers.

Two writers exist: one in this process (:mod:`medusa_train.distill.in_process`) and a pool of
servers (:mod:`medusa_train.distill.server`). A generation gives them token ids and gets token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from medusa_train.distill.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Teacher:
    """Which log-probabilities of the model are kept for each token that it writes.

    Attributes:
        kind: ``top``: of the most likely tokens; ``samples``: of independent draws from the
            model's own distribution (temperature 1, nothing cut off), an unbiased picture of it.
        num: N, how many per token.
    """

    kind: Literal["top", "samples"]
    num: int


@dataclass(frozen=True, slots=True, eq=False)
class TeacherLogprobs:
    """The model's own distribution at each token of an answer, before temperature and cut-offs.

    Attributes:
        token_ids: int32 [T, N], the most likely first, or in the order of the draws.
        logprobs: float32 [T, N], natural logarithms.
    """

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the model wrote after one prompt.

    Attributes:
        token_ids: all that it wrote; a stop token is the last one.
        finish_reason: ``stop``, or ``length`` where it was cut.
        retokenised: whether the ids were made from a text, since the server gives none.
        teacher: log-probabilities, one row for each of ``token_ids``, when they were asked for.
    """

    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length"]
    retokenised: bool = False
    teacher: TeacherLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why one prompt has no answer, although others may have one.

    Attributes:
        reason: what failures are counted by.
        detail: what was met.
    """

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Stopping:
    """When an answer is finished.

    Attributes:
        stop_ids: ids that end it.
        max_new_tokens: its most tokens.
        is_end: asked after each token, with all of the new tokens; None: only ids stop. A writer
            that sees no single tokens may leave it unasked.
        stop_text: a text that ends it, for a writer that leaves ``is_end`` unasked.
    """

    stop_ids: frozenset[int]
    max_new_tokens: int
    is_end: Callable[[Sequence[int]], bool] | None = None
    stop_text: str | None = None


class Writer(Protocol):
    """Writes what follows token ids.

    Attributes:
        max_length: the most positions of prompt and answer together; None: not known.
        unit_size: prompts that are written together: a block in process, one with servers. What
            :meth:`write` returns for them depends on its arguments alone.
        num_workers: calls of :meth:`write` that may run at once, each in a thread of its own.
        teacher: the log-probabilities that every answer has.
    """

    @property
    def max_length(self) -> int | None: ...

    @property
    def unit_size(self) -> int: ...

    @property
    def num_workers(self) -> int: ...

    @property
    def teacher(self) -> Teacher | None: ...

    def stop(self) -> None:
        """Let calls of :meth:`write` in other threads end soon, with an error."""

    def identity(self) -> dict[str, Any]:
        """What of the writer decides the answers, as JSON; another one is another generation."""

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
        """Answer every prompt, in the order of the prompts.

        Args:
            prompts: token ids, at least one each, shorter than ``max_length``.
            sampling: how tokens are drawn.
            stopping: when an answer ends.
            seed: of all draws of this call, 0 <= seed < 2**63.
            on_tokens: called now and then with the number of tokens written since.
            with_teacher: False for text that is not trained on (prompts), which needs none.

        Raises:
            InputError: no prompt can be answered, whatever is tried (a wrong key, say).
            MedusaTrainError: the writer is gone.
        """
