"""The base's processed distribution: logits processors in tree order.

A processor may look at the text before the token, and a node's text is its own path. So processors
run for the nodes that a walk visits, each with the ids that plain generation would have given it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from medusa_train.errors import ArgumentError

# These look at the logits alone, so many nodes go through them together.
_TEXT_FREE = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
# These count their own calls, and so cannot look at a node that is not accepted in the end.
_STATEFUL = (SynthIDTextWatermarkLogitsProcessor, UnbatchedClassifierFreeGuidanceLogitsProcessor)


class Processors:
    """The logits processors of a call of ``generate``, for one row's path at a time.

    Args:
        processors: as ``generate`` prepared them for the whole batch.
        num_rows: of that batch.

    Raises:
        ArgumentError: one of them keeps state from call to call.
    """

    def __init__(self, processors: LogitsProcessorList, *, num_rows: int) -> None:
        for processor in processors:
            if isinstance(processor, _STATEFUL):
                raise ArgumentError(
                    f"{type(processor).__name__}: counts its own calls, so it does not go with "
                    "decoding with heads; leave the option out or use plain generation"
                )
        self.is_empty = len(processors) == 0
        self.is_text_free = all(type(processor) in _TEXT_FREE for processor in processors)
        self._all = processors
        self._of_row = [processors] * num_rows
        if num_rows > 1 and not self.is_text_free:
            self._of_row = [
                LogitsProcessorList([_for_row(processor, row) for processor in processors])
                for row in range(num_rows)
            ]

    def __call__(
        self, logits: Tensor, *, rows: Sequence[int], text: Callable[[int], Tensor]
    ) -> Tensor:
        """Process logits [n, V] in fp32.

        Args:
            logits: of n nodes.
            rows: of the batch, of each node.
            text: the ids [1, length] up to the i-th node; asked for only where they are looked at.
        """
        scores = logits.to(torch.float32, copy=True)
        if self.is_empty:
            return scores
        if self.is_text_free:
            no_text = torch.zeros(len(scores), 0, dtype=torch.long, device=scores.device)
            return _run(self._all, no_text, scores)
        parts = [_run(self._of_row[row], text(i), scores[i : i + 1]) for i, row in enumerate(rows)]
        return torch.cat(parts)


def _run(processors: Callable[..., Any], text: Tensor, scores: Tensor) -> Tensor:
    # The library asks for a LongTensor, a type that no tensor has.
    processed: Tensor = processors(text, scores)
    return processed


def _for_row(processor: LogitsProcessor, row: int) -> Any:
    """A processor that does for a batch of this row alone what ``processor`` does for the row."""
    own: Any = copy.copy(processor)
    if isinstance(processor, RepetitionPenaltyLogitsProcessor):
        if isinstance(own.prompt_ignore_length, Tensor):
            own.prompt_ignore_length = own.prompt_ignore_length[row : row + 1]
    elif isinstance(processor, EncoderRepetitionPenaltyLogitsProcessor):
        own.encoder_input_ids = own.encoder_input_ids[row : row + 1]
    elif isinstance(processor, EncoderNoRepeatNGramLogitsProcessor):
        own.generated_ngrams = own.generated_ngrams[row : row + 1]
        own.batch_size = 1
    elif isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = own._prefix_allowed_tokens_fn
        own._prefix_allowed_tokens_fn = lambda _, ids: allowed(row, ids)
    return own
