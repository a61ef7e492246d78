"""The ways of decoding that are compared, each timed alike: same prompts, limit and stop tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from medusa_train.decoding.generate import Generated
from medusa_train.evaluate.speedup import BASELINE, SELF, Timing
from medusa_train.medusa_model import GREEDY, MedusaModel

# Nor do beams and penalties, in a comparison of speed.
_GREEDY = {**GREEDY, "num_beams": 1, "repetition_penalty": 1.0}


@dataclass(frozen=True, slots=True)
class Run:
    """One call.

    Attributes:
        answers: the ids that were written for each prompt, a stop token included.
        timing: what it took.
    """

    answers: list[list[int]]
    timing: Timing


class Ways:
    """All ways of decoding with one base model in one dtype.

    Args:
        model: the base with its heads.
        max_new_tokens: of an answer.
    """

    def __init__(self, model: MedusaModel, *, max_new_tokens: int) -> None:
        self.model = model
        stop_ids = list(model.base.stop_ids)
        self._stop_ids = frozenset(stop_ids)
        self._pad_id = stop_ids[0] if stop_ids else 0
        self._options: dict[str, Any] = {
            **_GREEDY,
            "max_new_tokens": max_new_tokens,
            "eos_token_id": stop_ids or None,
            "pad_token_id": self._pad_id,
        }

    def run(self, way: str, prompts: Sequence[Sequence[int]]) -> Run:
        """Answer some prompts as one batch.

        Args:
            way: one of :data:`medusa_train.evaluate.speedup.WAYS`.
            prompts: ids of each.
        """
        ids, mask = self._batch(prompts)
        return self._plain(ids, mask) if way == BASELINE else self._ours(ids, mask, way=way)

    def logits_after(self, ids: Sequence[int]) -> Tensor:
        """[V] the base's logits after ``ids``, by one pass over all of them."""
        inputs = torch.tensor([list(ids)], device=self.model.device)
        with torch.inference_mode():
            logits: Tensor = self.model.base.model(
                input_ids=inputs, logits_to_keep=1, use_cache=False
            ).logits
        return logits[0, -1]

    def _plain(self, ids: Tensor, mask: Tensor) -> Run:
        first = _FirstToken()
        begin = _now()
        model: Any = self.model.base.model
        sequences: Tensor = model.generate(
            ids,
            attention_mask=mask,
            stopping_criteria=StoppingCriteriaList([first]),
            **self._options,
        )
        end = _now()
        answers = self._answers(sequences, ids)
        num_tokens = sum(map(len, answers))
        assert first.time is not None
        timing = Timing(
            num_tokens=num_tokens,
            seconds=end - begin,
            prefill_seconds=first.time - begin,
            num_steps=num_tokens,
            num_passes=max(map(len, answers)) - 1,
            num_rows=len(answers),
        )
        return Run(answers, timing)

    def _ours(self, ids: Tensor, mask: Tensor, *, way: str) -> Run:
        begin = _now()
        generated = self.model.generate(
            ids,
            attention_mask=mask,
            tree=() if way == SELF else None,
            return_dict_in_generate=True,
            **self._options,
        )
        end = _now()
        assert isinstance(generated, Generated)
        statistics = generated.statistics
        answers = self._answers(generated.sequences, ids)
        timing = Timing(
            num_tokens=sum(map(len, answers)),
            seconds=end - begin,
            prefill_seconds=end - begin - statistics.decode_seconds,
            num_steps=statistics.num_steps,
            num_passes=statistics.num_passes,
            num_rows=len(answers),
        )
        return Run(answers, timing)

    def _batch(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """[B, P] ids and mask, padded on the left."""
        width = max(map(len, prompts))
        ids = [[self._pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        device = self.model.device
        return torch.tensor(ids, device=device), torch.tensor(mask, device=device)

    def _answers(self, sequences: Tensor, ids: Tensor) -> list[list[int]]:
        rows: list[list[int]] = sequences[:, ids.shape[1] :].tolist()
        return [row[: self._length(row)] for row in rows]

    def _length(self, row: Sequence[int]) -> int:
        stops = (place for place, token in enumerate(row, start=1) if token in self._stop_ids)
        return next(stops, len(row))


class _FirstToken:
    """A stopping criterion that stops nothing: it notes when the first token was there."""

    def __init__(self) -> None:
        self.time: float | None = None

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        del scores
        if self.time is None:
            self.time = _now()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _now() -> float:
    """Seconds, when an accelerator has done what it was given."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()
