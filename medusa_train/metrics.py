"""Per-head counts that add over batches and over ranks, and the decoder's walk. Pure tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LOGGED_TOP_K = (1, 5)
"""The top-n accuracies in the training log."""


@dataclass(frozen=True, slots=True)
class HeadCounts:
    """Sums over valid pairs, per head; every ratio that is logged is a ratio of these.

    Attributes:
        loss_sum: [K] summed cross-entropy.
        hits: [K, len(LOGGED_TOP_K)] pairs whose true token is among the head's top n.
        pairs: [K] valid pairs whose true token the head can name.
        ranked: [K] those of the pairs whose rank was taken (ranks are not taken at every step).
    """

    loss_sum: Tensor
    hits: Tensor
    pairs: Tensor
    ranked: Tensor

    @classmethod
    def zeros(cls, num_heads: int, *, device: torch.device | str = "cpu") -> HeadCounts:
        """Nothing counted yet, for K heads."""
        return cls(
            loss_sum=torch.zeros(num_heads, dtype=torch.float64, device=device),
            hits=torch.zeros(num_heads, len(LOGGED_TOP_K), dtype=torch.float64, device=device),
            pairs=torch.zeros(num_heads, dtype=torch.float64, device=device),
            ranked=torch.zeros(num_heads, dtype=torch.float64, device=device),
        )

    def __add__(self, other: HeadCounts) -> HeadCounts:
        return HeadCounts.from_stacked(self.stacked() + other.stacked())

    def stacked(self) -> Tensor:
        """[K, 3 + len(LOGGED_TOP_K)] one tensor, so that processes can sum it in one call."""
        columns = [self.loss_sum[:, None], self.hits, self.pairs[:, None], self.ranked[:, None]]
        return torch.cat(columns, dim=1)

    @classmethod
    def from_stacked(cls, stacked: Tensor) -> HeadCounts:
        """The inverse of :meth:`stacked`."""
        return cls(stacked[:, 0], stacked[:, 1:-2], stacked[:, -2], stacked[:, -1])

    def log_values(self) -> dict[str, float]:
        """The figures of the log: ``head1_loss``, ``head1_top1``, ``head1_top5`` and so on.

        A head without valid pairs has no figures, rather than a zero that looks like one.
        """
        values: dict[str, float] = {}
        for k, (pairs, ranked) in enumerate(
            zip(self.pairs.tolist(), self.ranked.tolist(), strict=True)
        ):
            if pairs:
                values[f"head{k + 1}_loss"] = self.loss_sum[k].item() / pairs
            if ranked:
                for column, top in enumerate(LOGGED_TOP_K):
                    values[f"head{k + 1}_top{top}"] = self.hits[k, column].item() / ranked
        return values


def hits_from_ranks(ranks: Tensor) -> Tensor:
    """[len(LOGGED_TOP_K)] how many of the ranks [N] are below each logged n."""
    return torch.stack([(ranks < top).sum() for top in LOGGED_TOP_K]).double()


def leading_hits(is_hit: Tensor) -> Tensor:
    """[N] int64 how many heads in a row, from the first one, are right: is_hit [N, K] bool.

    This is what a top-1 chain gets accepted when a decoder stands on the position.
    """
    return is_hit.long().cumprod(dim=1).sum(dim=1)


def walked_rows(accepted: Sequence[int], spans: Iterable[tuple[int, int]]) -> list[int]:
    """The rows at which a decoder stands when it takes a step.

    On row t it emits the root token and ``accepted[t]`` candidates, and goes on from row
    t + accepted[t] + 1, until the span has no row left. A last step whose root ends the answer is
    on the span's last row, and counts. Prefill is no step.

    Args:
        accepted: [N] accepted candidates at each row.
        spans: half-open ranges of rows, one for each assistant span; a row stands for one token
            that is emitted.
    """
    rows = []
    for start, end in spans:
        row = start
        while row < end:
            rows.append(row)
            row += accepted[row] + 1
    return rows
