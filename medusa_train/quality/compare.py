"""One teacher-forced pass of both models over a text: the drift at each supervised position.

A position's token is one of the assistant's, and its distribution is what a model gives after all
tokens before it. Ids beyond the tokenizer are left out of both distributions, as no decoder draws
them.

Shapes: N positions of a conversation, D hidden, V ids of the tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from medusa_train.base_model.load import BaseModel
from medusa_train.console import progress
from medusa_train.data.conversations import Conversation
from medusa_train.data.examples import valid_pairs
from medusa_train.distill.sampling import greedy
from medusa_train.evaluate.quality import Drift
from medusa_train.hidden_states.online import length_batches, states_of_rows
from medusa_train.host_memory import freed_memory_kept
from medusa_train.quality.pair import SIDES, Pair, Side

MAX_BATCH_TOKENS = 4_096
CHUNK_ELEMENTS = 1 << 23
"""Logits of one model in memory at a time."""

_Rows = tuple[Tensor, Tensor, Tensor, Tensor]


@torch.no_grad()
def measure_drift(pair: Pair, conversations: Sequence[Conversation]) -> Drift:
    """Compare both models at every supervised token of ``conversations``.

    Args:
        pair: the models.
        conversations: those without a supervised token after another one are left out; at least
            one has to remain.
    """
    texts = [_Text(row) for row in conversations]
    texts = [text for text in texts if len(text.positions)]
    assert texts, "there is something to measure on"
    found: list[_Rows] = [(torch.empty(0),) * 4] * len(texts)
    with freed_memory_kept(), progress("drift", len(texts)) as bar:
        lengths = [len(text.ids) for text in texts]
        for batch in length_batches(lengths, max_tokens=MAX_BATCH_TOKENS):
            states = {side: _states(pair, side, [texts[i] for i in batch]) for side in SIDES}
            for place, i in enumerate(batch):
                both = {side: states[side][place] for side in SIDES}
                found[i] = _compare(pair, both, texts[i].labels)
            bar.update(len(batch), detail="conversations")
    counts = torch.tensor([len(text.positions) for text in texts])
    kl, original_nll, changed_nll, agrees = (
        torch.cat(column).cpu().numpy() for column in zip(*found, strict=True)
    )
    return Drift(
        conversation=torch.arange(len(texts)).repeat_interleave(counts).numpy(),
        place=np.concatenate([text.places for text in texts]),
        kl=kl.astype(np.float64),
        original_nll=original_nll.astype(np.float64),
        changed_nll=changed_nll.astype(np.float64),
        agrees=agrees,
    )


class _Text:
    """The source positions [N] of a conversation, the tokens [N] after them, and their places."""

    def __init__(self, row: Conversation) -> None:
        self.ids = row.input_ids
        pairs = valid_pairs(row.input_ids, row.assistant_spans, num_heads=1)
        self.positions = pairs.positions
        self.labels = torch.tensor(row.input_ids)[self.positions + 1]
        starts = torch.tensor([start for start, _ in row.assistant_spans])
        self.places = (self.positions + 2 - starts[pairs.spans]).numpy()


def _states(pair: Pair, side: Side, texts: Sequence[_Text]) -> list[Tensor]:
    with pair.using(side) as base:
        return states_of_rows(
            base.model,
            [text.ids for text in texts],
            positions=[text.positions for text in texts],
        )


def _compare(pair: Pair, states: dict[Side, Tensor], labels: Tensor) -> _Rows:
    """KL, the two −log p, and agreement, each [N], for states [N, D] and labels [N]."""
    step = max(1, CHUNK_ELEMENTS // pair.original.num_tokens)
    chunks: list[_Rows] = []
    for start in range(0, len(labels), step):
        rows = slice(start, start + step)
        logits = {side: _logits(pair, side, states[side][rows]) for side in SIDES}
        agrees = greedy(logits["original"]) == greedy(logits["changed"])
        original = torch.log_softmax(logits["original"], dim=1)
        changed = torch.log_softmax(logits["changed"], dim=1)
        kl = (original.exp() * (original - changed)).sum(dim=1)
        true = labels[rows, None].to(original.device)
        chunks.append((kl, -original.gather(1, true)[:, 0], -changed.gather(1, true)[:, 0], agrees))
    kl, original_nll, changed_nll, agrees = map(torch.cat, zip(*chunks, strict=True))
    return kl, original_nll, changed_nll, agrees


def _logits(pair: Pair, side: Side, states: Tensor) -> Tensor:
    """[n, V] through the model's own ``lm_head``, which may have an adapter."""
    with pair.using(side) as base:
        return _projected(base, states)


def _projected(base: BaseModel, states: Tensor) -> Tensor:
    logits: Tensor = base.model.get_output_embeddings()(states)
    return base.logit_rule.apply(logits[:, : base.num_tokens])
