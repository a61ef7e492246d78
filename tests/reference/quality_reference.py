"""The drift of a changed model, one token at a time with two whole models: no batch, no chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from medusa_train.data.conversations import Conversation


class Place(NamedTuple):
    """One supervised token."""

    conversation: int
    place: int
    kl: float
    original_nll: float
    changed_nll: float
    agrees: bool


@torch.no_grad()
def drift(
    original: PreTrainedModel,
    changed: PreTrainedModel,
    rows: Sequence[Conversation],
    *,
    num_tokens: int,
) -> list[Place]:
    """Each supervised token that has something before it, in order."""
    places = []
    for number, row in enumerate(rows):
        for start, end in row.assistant_spans:
            for index in range(max(start, 1), end):
                before = torch.tensor([row.input_ids[:index]])
                p, q = (
                    torch.softmax(
                        model(before, use_cache=False).logits[0, -1, :num_tokens].double(), 0
                    ).tolist()
                    for model in (original, changed)
                )
                token = row.input_ids[index]
                places.append(
                    Place(
                        conversation=number,
                        place=index - start + 1,
                        kl=sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)),
                        original_nll=-math.log(p[token]),
                        changed_nll=-math.log(q[token]),
                        agrees=p.index(max(p)) == q.index(max(q)),
                    )
                )
    return places
