"""What each head adds to the top-1 chain, and which heads are worth their time.

A head of a chain is used only where all heads before it are right, so later heads add less, and
each makes a step longer by the same. At batch size 1 the time of a step is mostly that of reading
its weights. So with S(n) the bytes that a step with n heads reads and A(n) the acceptance length of
their chain, the first n heads are worth most where A(n) ÷ S(n) is greatest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor

from medusa_train.base_model.features import output_projection
from medusa_train.base_model.load import BaseModel
from medusa_train.heads.config import HeadsConfig


@dataclass(frozen=True, slots=True)
class StepWeights:
    """Bytes of the weights that a step reads.

    Attributes:
        base: of the base model.
        head: of each head.
        first: that the first head brings once for all: the base's ``lm_head``, read once more for
            the candidates of shared heads.
    """

    base: int
    head: int
    first: int = 0

    def with_heads(self, count: int) -> int:
        """Bytes of a step with the first ``count`` heads."""
        return self.base + count * self.head + (self.first if count else 0)

    def growth(self, count: int) -> float:
        """By what share head ``count`` (1-based) makes a step's weights more."""
        return self.with_heads(count) / self.with_heads(count - 1) - 1.0


def step_weights(base: BaseModel, config: HeadsConfig) -> StepWeights:
    """The weights of a step in the base's dtype.

    The input embeddings, of which a step reads a few rows, are left out where they are not tied to
    ``lm_head``. All experts of a mixture are counted: several tokens of a step need many of them.

    Args:
        base: the base model, quantised or not.
        config: of the heads.
    """
    weight, _ = output_projection(base.model)
    embeddings = cast("Tensor", base.model.get_input_embeddings().weight)
    size = sum(p.numel() * p.element_size() for p in base.model.parameters())
    if embeddings is not weight:
        size -= embeddings.numel() * embeddings.element_size()
    width = base.model.dtype.itemsize
    shared = config.num_logits * config.hidden_size if config.layout == "shared" else 0
    return StepWeights(size, config.head_parameters * width, shared * width)


def num_heads_that_pay(by_length: Sequence[Mapping[str, Any]]) -> int | None:
    """How many of the first heads give the most tokens for the weights that a step reads.

    Args:
        by_length: of the chain in ``heads_accuracy.json``.

    Returns:
        The number, 0 where plain decoding reads least; None where lengths or weights are not known.
    """
    best, most, weights = 0, 1.0, 1.0
    for row in by_length:
        if row["acceptance_length"] is None or row["weights_growth"] is None:
            return None
        weights *= 1.0 + row["weights_growth"]
        if row["acceptance_length"] / weights > most:
            best, most = row["num_heads"], row["acceptance_length"] / weights
    return best


def of_first_heads(report: Mapping[str, Any], num_heads: int) -> dict[str, Any]:
    """``heads_accuracy.json`` of the first heads alone; ``tree`` and what is not known are null.

    Args:
        report: of all heads.
        num_heads: how many are kept.
    """
    by_length = (report["chain"] or {}).get("by_length", [])[:num_heads]
    chain = None
    if by_length:
        last = by_length[-1]
        chain = {
            "acceptance_length": last["acceptance_length"],
            "ci95": last["ci95"],
            "by_length": by_length,
            "num_heads_that_pay": num_heads_that_pay(by_length),
        }
    heads = report["heads"][:num_heads]
    return {**report, "num_heads": num_heads, "heads": heads, "chain": chain, "tree": None}
