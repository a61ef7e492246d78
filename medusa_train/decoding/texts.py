"""The rows' texts while they are written, and when each of them ends."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

ROOM = 256


class Texts:
    """Prompts and what is written behind them.

    Args:
        input_ids: [B, P] prompts, padded on the left.
        criteria: as ``generate`` prepared them. Each is asked after each token, with one row.
        streamer: gets each token of a single row.
    """

    def __init__(
        self,
        input_ids: Tensor,
        *,
        criteria: StoppingCriteriaList,
        streamer: BaseStreamer | None = None,
    ) -> None:
        self.lengths = [input_ids.shape[1]] * len(input_ids)
        self.streamer = streamer
        self._ids = input_ids
        self._max_length: int | None = criteria.max_length
        self._stop_ids: set[int] = set()
        self._others = StoppingCriteriaList()
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self._stop_ids.update(criterion.eos_token_id.tolist())
            elif type(criterion) is not MaxLengthCriteria:
                self._others.append(criterion)

    @property
    def max_length(self) -> int | None:
        """The most columns that a row can have, None for no limit."""
        return self._max_length

    def row(self, row: int) -> Tensor:
        """[1, length] ids of a row, its padding included."""
        return self._ids[row : row + 1, : self.lengths[row]]

    def append(self, row: int, token: int) -> bool:
        """Write a token behind a row; returns whether the row goes on."""
        length = self.lengths[row]
        if length == self._ids.shape[1]:
            room = self._ids.new_zeros(len(self._ids), ROOM)
            self._ids = torch.cat([self._ids, room], dim=1)
        self._ids[row, length] = token
        self.lengths[row] = length + 1
        if self.streamer is not None:
            self.streamer.put(torch.tensor([token]))
        if token in self._stop_ids or length + 1 == self._max_length:
            return False
        return not (self._others and bool(self._others(self.row(row), None)))

    def result(self, *, pad: int) -> Tensor:
        """[B, longest] all rows, padded on the right."""
        longest = max(self.lengths)
        result = self._ids[:, :longest].clone()
        for row, length in enumerate(self.lengths):
            result[row, length:] = pad
        return result
