"""Which nodes of a tree are kept.

Exact acceptance, greedy or sampling: at each node the base says its next token, the greatest logit
or a draw from its processed distribution. A child that carries this token is accepted and the walk
goes on there; without one, the token is the next step's root. Candidates are fixed before anything
is drawn, so the tokens are distributed as the base's own.

Typical acceptance (paper, section 3.2) keeps candidates that the base finds plausible; it changes
the distribution.

Shapes: B rows, N tree nodes, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_train.errors import ArgumentError

# The original implementation's entropy is -Σ p·log(p + 1e-5), which keeps 0·log 0 finite.
ENTROPY_OFFSET = 1e-5


@dataclass(frozen=True, slots=True)
class Typical:
    """Typical acceptance: a candidate x passes if p(x) > min(ε, δ·exp(−H(p))).

    Attributes:
        epsilon: ε, the hard threshold.
        delta: δ, the factor of the threshold that falls with the entropy H.

    Raises:
        ArgumentError: values that mean nothing.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        if not (_is_number(self.epsilon) and 0 < self.epsilon < 1):
            raise ArgumentError(
                f"typical: epsilon must be a number between 0 and 1, got {self.epsilon!r}"
            )
        if not (_is_number(self.delta) and self.delta > 0):
            raise ArgumentError(f"typical: delta must be a number above 0, got {self.delta!r}")

    def thresholds(self, probabilities: Tensor) -> Tensor:
        """[..., V] → [...]: what a token's probability has to exceed."""
        entropy = -(probabilities * torch.log(probabilities + ENTROPY_OFFSET)).sum(dim=-1)
        return torch.clamp(self.delta * torch.exp(-entropy), max=self.epsilon)

    def kept(self, probabilities: Tensor) -> Tensor:
        """[..., V] → [..., V]: what passes, renormalised; the best token always does."""
        passing = probabilities > self.thresholds(probabilities)[..., None]
        best = probabilities == probabilities.amax(dim=-1, keepdim=True)
        kept = torch.where(passing | best, probabilities, 0)
        return kept / kept.sum(dim=-1, keepdim=True)


def _is_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value)


def matching_child(token: int, *, children: Sequence[int], tokens: Sequence[int]) -> int | None:
    """The child that carries ``token``, if one does.

    Args:
        token: what the base says after the node.
        children: the node's children.
        tokens: of all nodes of the row.
    """
    for child in children:
        if tokens[child] == token:
            return child
    return None


def typical_node(
    probabilities: Tensor, *, tokens: Tensor, parents: Sequence[int], typical: Typical
) -> int:
    """The last node of the longest path on which every candidate passes; 0 if there is none.

    Of paths of equal length, the one that the base finds most likely.

    Args:
        probabilities: [N, V] the base's processed distribution after each node.
        tokens: [N] of each node.
        parents: of each node, -1 for the root; parents stand before their children.
        typical: the thresholds.
    """
    above = torch.tensor([max(parent, 0) for parent in parents], device=probabilities.device)
    own = probabilities[above, tokens]
    passes = (own > typical.thresholds(probabilities)[above]).tolist()
    logs = own.log().tolist()
    length, score = [0] * len(parents), [0.0] * len(parents)
    best = 0
    for node in range(1, len(parents)):
        parent = parents[node]
        if not passes[node] or (parent and not length[parent]):
            continue
        length[node] = length[parent] + 1
        score[node] = score[parent] + logs[node]
        if (length[node], score[node]) > (length[best], score[best]):
            best = node
    return best
