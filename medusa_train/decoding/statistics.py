"""What decoding with heads did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Statistics:
    """Counts of one call, per row of the batch.

    A step is one root token, the base's own, and the candidates that were accepted after it. A last
    step whose root ends the answer counts although it needs no forward pass; prefill is no step.

    Attributes:
        accepted: of each row, num_accepted of each of its steps.
        num_passes: forward passes over the tree, each for all rows that were not done.
        prefill_seconds: wall-clock time up to the first token.
        decode_seconds: wall-clock time after it.
    """

    accepted: list[list[int]]
    num_passes: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def num_steps(self) -> int:
        """Steps of all rows."""
        return sum(len(steps) for steps in self.accepted)

    @property
    def num_tokens(self) -> int:
        """Tokens that were emitted, in all rows."""
        return self.num_steps + sum(sum(steps) for steps in self.accepted)

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted ÷ steps."""
        return self.num_tokens / max(1, self.num_steps)
