"""Hidden states computed when they are needed, and the rows and batches that ask for them.

Shapes: B batch, T sequence, N source positions in a batch, D hidden, K heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from medusa_train.base_model.features import hidden_states
from medusa_train.data.conversations import Conversation
from medusa_train.data.examples import pad_batch, valid_pairs
from medusa_train.data.packing import pack_rows
from medusa_train.data.teacher_logprobs import TeacherLogprobsReader
from medusa_train.errors import InputError

Batch = Mapping[str, Tensor]


class HiddenStateSource(Protocol):
    """Where hidden states come from: the base model now, or a cache that it filled before."""

    def __call__(self, batch: Batch) -> Tensor:
        """The states [N, D] of a collated batch's source positions, in the order of its labels."""


class OnlineHiddenStates:
    """Runs the frozen base model on every batch."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def __call__(self, batch: Batch) -> Tensor:
        """[N, D] for ``input_ids`` [B, T] and ``source_index`` [N] into the flattened [B · T]."""
        # A packed batch says by its positions where conversations begin.
        position_ids = batch.get("position_ids")
        with torch.no_grad():
            states = hidden_states(self.model, batch["input_ids"], position_ids=position_ids)
        return states.flatten(0, 1)[batch["source_index"]]


class OnlineExamples(Dataset[dict[str, Tensor]]):
    """One conversation per item: ``input_ids`` [T], ``positions`` [N] and ``labels`` [N, K].

    Args:
        conversations: the text.
        num_heads: K.
        with_last: with each span's last source position, as soft targets need it.
        stored: the base's log-probabilities of these conversations; an item then has those of the
            token after each source position, ``teacher_ids`` and ``teacher_logprobs`` [N, S]. Only
            ``with_last``.
    """

    def __init__(
        self,
        conversations: Sequence[Conversation],
        *,
        num_heads: int,
        with_last: bool = False,
        stored: TeacherLogprobsReader | None = None,
    ) -> None:
        assert with_last or stored is None
        self.conversations = conversations
        self.num_heads = num_heads
        self.with_last = with_last
        self.stored = stored

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.conversations[index]
        pairs = valid_pairs(row.input_ids, row.assistant_spans, num_heads=self.num_heads)
        pairs = pairs.trained(with_last=self.with_last)
        return {
            "input_ids": torch.tensor(row.input_ids),
            "positions": pairs.positions,
            "labels": pairs.labels,
            **({} if self.stored is None else stored_rows(self.stored, row)),
        }


def stored_rows(stored: TeacherLogprobsReader, row: Conversation) -> dict[str, Tensor]:
    """A row's stored entries, one line for each token that has a source position.

    A cut row has the first ones of the whole; a span that begins the row has a token without one.

    Raises:
        InputError: there are none of this row, or fewer than it has tokens.
    """
    ids, logprobs = stored.of(row.id)
    if len(ids) < row.num_supervised:
        raise InputError(
            f"{stored.directory}: row {row.id!r} has {row.num_supervised} tokens and "
            f"{len(ids)} log-probabilities; generate both together"
        )
    first = 0
    keep: list[int] = []
    for start, end in row.assistant_spans:
        keep += range(first + (start == 0), first + end - start)
        first += end - start
    return {
        "teacher_ids": torch.from_numpy(ids[keep]).long(),
        "teacher_logprobs": torch.from_numpy(logprobs[keep]),
    }


def _stored(items: Sequence[Batch]) -> dict[str, Tensor]:
    """The stored entries of a batch, one row after another, where the items have some."""
    names = [name for name in items[0] if name.startswith("teacher_")]
    return {name: torch.cat([item[name] for item in items]) for name in names}


def collate_online(items: Sequence[Batch]) -> dict[str, Tensor]:
    """Pad on the right: ``input_ids`` [B, T], ``source_index`` [N] and ``labels`` [N, K].

    No attention mask: a causal model's real tokens never see padding that stands after them.
    """
    input_ids, _ = pad_batch([item["input_ids"].tolist() for item in items], pad_id=0)
    width = input_ids.shape[1]
    index = [item["positions"] + row * width for row, item in enumerate(items)]
    return {
        "input_ids": input_ids,
        "source_index": torch.cat(index),
        "labels": torch.cat([item["labels"] for item in items]),
        **_stored(items),
    }


def collate_packed(items: Sequence[Batch], *, capacity: int) -> dict[str, Tensor]:
    """Put conversations side by side into rows of at most ``capacity`` tokens.

    The same as :func:`collate_online` with fewer tokens, for a model that
    :func:`medusa_train.base_model.packed.check_packed_rows` lets pass: ``input_ids`` and
    ``position_ids`` [R, T], ``source_index`` [N] and ``labels`` [N, K], these in the order of the
    items.
    """
    packed = pack_rows([item["input_ids"].tolist() for item in items], capacity=capacity)
    index = [item["positions"] + packed.starts[row] for row, item in enumerate(items)]
    return {
        "input_ids": packed.input_ids,
        "position_ids": packed.position_ids,
        "source_index": torch.cat(index),
        "labels": torch.cat([item["labels"] for item in items]),
        **_stored(items),
    }


@torch.no_grad()
def states_of_rows(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], *, positions: Sequence[Tensor]
) -> list[Tensor]:
    """The states of some rows at some of their positions, from one padded forward pass.

    Args:
        model: the base.
        rows: B rows of token ids.
        positions: B tensors [N_i] int64.

    Returns:
        B tensors [N_i, D].
    """
    input_ids, _ = pad_batch(rows, pad_id=0)
    states = hidden_states(model, input_ids.to(model.device))
    return [states[i, index.to(states.device)] for i, index in enumerate(positions)]


def length_batches(lengths: Sequence[int], *, max_tokens: int) -> Iterator[list[int]]:
    """Batches of indices of similar length, each of at most ``max_tokens`` tokens with padding.

    A row longer than ``max_tokens`` makes a batch of its own.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        # Ascending lengths: this row would be the widest of its batch.
        if batch and (len(batch) + 1) * lengths[index] > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
