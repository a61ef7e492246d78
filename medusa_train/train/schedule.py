"""λ0, the weight of all heads' loss against the base's, step by step (paper, section 2.2.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class HeadLossSchedule:
    """How λ0 rises from 0 to its value.

    Attributes:
        weight: λ0 at the end.
        kind: ``constant``: all of it at once; ``linear``; ``sine``: a quarter of its period.
        share: of the steps, over which it rises.
        delay: steps before it begins; below 1, a share of all steps.
    """

    weight: float
    kind: Literal["constant", "linear", "sine"] = "sine"
    share: float = 1.0
    delay: float = 0.0

    def at(self, step: int, *, num_steps: int) -> float:
        """λ0 at a step, counted from 0, of ``num_steps``."""
        delay = self.delay if self.delay >= 1 else self.delay * num_steps
        if step < delay:
            return 0.0
        progress = min(1.0, (step - delay) / max(self.share * num_steps, 1e-9))
        match self.kind:
            case "constant":
                return self.weight
            case "linear":
                return self.weight * progress
            case "sine":
                return self.weight * math.sin(progress * math.pi / 2)
