"""The model's own log-probabilities, kept from the very logits that tokens were drawn from.

They cost no forward pass: one log-sum-exp of each row of logits, and the most likely tokens or
some draws. The draws have a generator of their own, so that asking for a teacher changes no token
of an answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from medusa_train.distill.sampling import Sampler, Sampling, inverse_cdf
from medusa_train.distill.writer import Teacher, TeacherLogprobs

# Neighbouring tokens of which only the greatest is looked at first.
BLOCK = 64


class TeacherRecorder:
    """Keeps what the model thought at each step of one call, on the CPU: 8 bytes per entry.

    Args:
        teacher: what is kept.
        generator: of the answers' tokens, before its first draw; it is only looked at. What is
            drawn here depends on its state, so it can be repeated with the call.

    Raises:
        ValueError: ``teacher.num`` is less than 1.
    """

    def __init__(self, teacher: Teacher, *, generator: torch.Generator) -> None:
        if teacher.num < 1:
            raise ValueError(f"a teacher needs 1 or more tokens per position, got {teacher.num}")
        self.teacher = teacher
        digest = hashlib.sha256(generator.get_state().numpy().tobytes()).digest()
        seed = int.from_bytes(digest[:8], "big") >> 1
        own = torch.Generator(generator.device).manual_seed(seed)
        self._sampler = Sampler(Sampling(1.0), generator=own)
        self._requests: list[NDArray[np.int64]] = []
        self._token_ids: list[NDArray[np.int32]] = []
        self._logprobs: list[NDArray[np.float32]] = []

    def record(self, logits: torch.Tensor, requests: Sequence[int]) -> None:
        """Keep log-probabilities of one step.

        Args:
            logits: raw, [n, V], over the tokenizer's ids only.
            requests: which answer each row belongs to; an answer's steps come in order.
        """
        weights = self._sampler.weights(logits)
        greatest = logits.amax(dim=1, keepdim=True).float()
        log_sum = greatest + weights.sum(dim=1, keepdim=True).log()
        if self.teacher.kind == "top":
            token_ids = most_likely(logits, self.teacher.num)
        else:
            token_ids = self._draw(weights)
        logprobs = logits.gather(1, token_ids).float() - log_sum
        self._requests.append(np.array(requests, dtype=np.int64))
        self._token_ids.append(token_ids.to(torch.int32).cpu().numpy())
        self._logprobs.append(logprobs.cpu().numpy())

    def _draw(self, weights: torch.Tensor) -> torch.Tensor:
        """Independent draws with replacement, ids [n, N].

        Each sample has the same weight 1/N, so that a sum over samples is an unbiased estimate of
        the sum over the vocabulary; the N most likely tokens give none, however they are scaled
        (Anshumann et al. 2025, Sparse Logit Sampling, arXiv 2503.16870).
        """
        uniform = torch.rand(
            len(weights),
            self.teacher.num,
            generator=self._sampler.generator,
            dtype=torch.float64,
            device=weights.device,
        )
        return inverse_cdf(weights, uniform)

    def results(self, num_answers: int) -> list[TeacherLogprobs]:
        """What was kept for the answers 0 … ``num_answers`` - 1; an answer may have no tokens."""
        empty = np.zeros((0, self.teacher.num))
        requests = np.concatenate([np.zeros(0, np.int64), *self._requests])
        order = np.argsort(requests, kind="stable")
        ends = np.cumsum(np.bincount(requests, minlength=num_answers))[:-1]
        token_ids = np.concatenate([empty.astype(np.int32), *self._token_ids])[order]
        logprobs = np.concatenate([empty.astype(np.float32), *self._logprobs])[order]
        parts = zip(np.split(token_ids, ends), np.split(logprobs, ends), strict=True)
        return [TeacherLogprobs(ids, values) for ids, values in parts][:num_answers]


def most_likely(logits: torch.Tensor, num: int) -> torch.Tensor:
    """The ``num`` greatest of ``logits`` [n, V], descending, of equal ones the smaller id first.

    Only the ``num`` blocks with the greatest first tokens can hold one of them, so the vocabulary
    is read once and never sorted.

    Returns:
        Ids [n, num].
    """
    vocab_size = logits.shape[1]
    if num * BLOCK >= vocab_size:
        return _ordered(logits, torch.arange(vocab_size, device=logits.device)).topk(num).indices
    if rest := -vocab_size % BLOCK:
        logits = F.pad(logits, (0, rest), value=-torch.inf)
    greatest = logits.unflatten(1, (-1, BLOCK)).amax(dim=2)
    numbers = torch.arange(greatest.shape[1], device=logits.device)
    blocks = _ordered(greatest, numbers).topk(num).indices
    inside = torch.arange(BLOCK, device=logits.device)
    ids = (blocks[:, :, None] * BLOCK + inside).flatten(1)
    best = _ordered(logits.gather(1, ids), ids).topk(num).indices
    return ids.gather(1, best)


def _ordered(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Integers [n, C] in the order of (value, -id): no two are equal, so ``topk`` has no choice."""
    # As integers, floats are in their order but for negative ones, whose order is the reverse;
    # adding zero makes -0.0 equal to 0.0.
    bits = (values.float() + 0.0).view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.long() * 2**32 - ids
