"""Drawing tokens from temperature, top-k and top-p, exactly and without sorting the vocabulary.

One uniform number per token: the inverse of the cumulative distribution, found in two levels
(sums of chunks, then inside one chunk), so that nothing as long as the vocabulary is sorted or
accumulated. The order of the rules is the library's: temperature, top-k, top-p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

CHUNK = 256
# Tokens looked at before the whole vocabulary is sorted for a nucleus.
NUCLEUS_CANDIDATES = 256

# Weights are not less than e to this.
MIN_EXPONENT = -80.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
        temperature: 0 means greedy: the greatest logit, of equal ones the smallest id.
        top_p: the smallest set of most probable tokens with at least this mass; 1 is off.
        top_k: the most probable tokens only; 0 is off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        """Refuse values that mean nothing."""
        if not (self.temperature >= 0 and 0 < self.top_p <= 1 and self.top_k >= 0):
            raise ValueError(f"temperature >= 0, 0 < top_p <= 1 and top_k >= 0 needed, got {self}")


class Sampler:
    """Draws one token per row of logits; keeps its work space between calls."""

    def __init__(self, sampling: Sampling, *, generator: torch.Generator) -> None:
        self.sampling = sampling
        self.generator = generator
        self._space = torch.empty(0)

    def draw(self, logits: torch.Tensor) -> torch.Tensor:
        """Draw from ``logits`` [n, V]; returns ids [n]. Uses n uniform numbers, greedy none.

        Computes in fp32 whatever the dtype of the logits; the last sums are in fp64.
        """
        if self.sampling.temperature == 0:
            return greedy(logits)
        uniform = torch.rand(
            len(logits), generator=self.generator, dtype=torch.float64, device=logits.device
        )
        if self.sampling.top_k and self.sampling.top_k < logits.shape[1]:
            return self._draw_top_k(logits, uniform)
        weights = self.weights(logits)
        if self.sampling.top_p < 1:
            return self._draw_nucleus(weights, uniform)
        return inverse_cdf(weights, uniform)

    def weights(self, logits: torch.Tensor) -> torch.Tensor:
        """exp((logits - max) / T) in fp32, [n, V padded to whole chunks with zeros].

        Valid until the next call.
        """
        num_rows, vocab_size = logits.shape
        padded = -(-vocab_size // CHUNK) * CHUNK
        if (
            self._space.shape[0] < num_rows
            or self._space.shape[1:] != (padded,)
            or self._space.device != logits.device
        ):
            self._space = torch.zeros(num_rows, padded, device=logits.device)
        weights = self._space[:num_rows]
        used = weights[:, :vocab_size]
        used.copy_(logits)
        used.sub_(used.amax(dim=1, keepdim=True))
        if self.sampling.temperature != 1:
            used.div_(self.sampling.temperature)
        # Below e^-80 the results are denormal numbers, and a CPU takes ten times as long for each;
        # so raised, a whole vocabulary of them has a share of less than 1e-29.
        used.clamp_(min=MIN_EXPONENT).exp_()
        return weights

    def _draw_top_k(self, logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        best, ids = torch.topk(logits.float(), self.sampling.top_k, dim=1)
        weights = ((best - best[:, :1]) / self.sampling.temperature).exp()
        if self.sampling.top_p < 1:
            weights = _nucleus(weights, self.sampling.top_p * weights.sum(dim=1, keepdim=True))
        return ids.gather(1, inverse_cdf(weights, uniform)[:, None])[:, 0]

    def _draw_nucleus(self, weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
        mass = self.sampling.top_p * weights.sum(dim=1, keepdim=True)
        num_candidates = min(NUCLEUS_CANDIDATES, weights.shape[1])
        best, ids = torch.topk(weights, num_candidates, dim=1)
        tokens = ids.gather(1, inverse_cdf(_nucleus(best, mass), uniform)[:, None])[:, 0]
        short = (best.sum(dim=1, keepdim=True) < mass)[:, 0]
        if bool(short.any()):
            best, ids = weights[short].sort(dim=1, descending=True, stable=True)
            drawn = inverse_cdf(_nucleus(best, mass[short]), uniform[short])
            tokens[short] = ids.gather(1, drawn[:, None])[:, 0]
        return tokens


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The greatest logit of each row [n, V], of equal ones the smallest id; ids [n]."""
    best = logits.amax(dim=1, keepdim=True)
    return (logits == best).to(torch.uint8).argmax(dim=1)


def inverse_cdf(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The index in each row of ``weights`` [n, V] at the share ``uniform`` of its sum.

    Weights need not be normalised; an index of weight 0 is never returned.

    Args:
        weights: [n, V].
        uniform: [n], or [n, N] for N draws from each row.

    Returns:
        Indices in the shape of ``uniform``.
    """
    num_rows, width = weights.shape
    num_draws = uniform[0].numel()
    rows = torch.arange(num_rows, device=weights.device).repeat_interleave(num_draws)
    share = uniform.flatten()
    if width <= CHUNK or width % CHUNK:
        target = share * weights.sum(dim=1, dtype=torch.float64)[rows]
        return _pick(weights if num_draws == 1 else weights[rows], target)[0].view_as(uniform)
    chunks = weights.view(num_rows, -1, CHUNK)
    sums = chunks.sum(dim=2)
    chunk, rest = _pick(sums[rows], share * sums.sum(dim=1, dtype=torch.float64)[rows])
    # The sum of a chunk is rounded; the share of it keeps the rest inside the chunk.
    share = rest / sums[rows, chunk]
    inside = chunks[rows, chunk]
    index, _ = _pick(inside, share * inside.sum(dim=1, dtype=torch.float64))
    return (chunk * CHUNK + index).view_as(uniform)


def _pick(weights: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first index whose cumulative weight exceeds ``target`` [n], and what is left there."""
    cumulative = weights.cumsum(dim=1, dtype=torch.float64)
    index = (cumulative <= target[:, None]).sum(dim=1)
    # Rounding can put the target at the very end: the last index of positive weight is meant.
    last = (cumulative < cumulative[:, -1:]).sum(dim=1)
    index = torch.minimum(index, last)
    before = cumulative.gather(1, index[:, None])[:, 0] - weights.gather(1, index[:, None])[:, 0]
    return index, (target - before).clamp_min(0)


def _nucleus(sorted_weights: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Zero all of the descending weights [n, C] behind the first that reach ``mass`` [n, 1]."""
    before = sorted_weights.cumsum(dim=1, dtype=torch.float64) - sorted_weights
    return torch.where(before < mass, sorted_weights, 0)
