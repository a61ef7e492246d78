"""Evaluation while training: the held-out conversations, as the accuracy report measures them.

Ranks are fp32 whatever dtype the training computes in, since in bf16 most positions have a tie, and
the walk of the acceptance length (docs/method.md) goes over whole conversations. So processes share
whole conversations, each once, and a batch is never filled up with rows that count twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from medusa_train.data.conversations import Conversation
from medusa_train.data.examples import valid_pairs
from medusa_train.hidden_states.cache import CachedExamples
from medusa_train.hidden_states.online import OnlineExamples
from medusa_train.losses import IGNORE
from medusa_train.metrics import HeadCounts, leading_hits, walked_rows
from medusa_train.train.module import HeadsModule

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over the processes."""


@torch.no_grad()
def evaluate_held_out(
    module: HeadsModule,
    examples: CachedExamples | OnlineExamples,
    *,
    args: TrainingArguments,
    collate: Callable[[Sequence[Any]], dict[str, Tensor]],
    reduce: Reduce,
) -> dict[str, float]:
    """Per-head loss, top-1 and top-5, and the acceptance length of the top-1 chain.

    With a base that is trained, also its loss: ``base_kl`` or ``base_cross_entropy``.

    Args:
        module: base and heads.
        examples: one item per conversation.
        args: batch size, data loading, and which process of how many this is.
        collate: items → batch.
        reduce: sums over the processes.

    Returns:
        The figures by name; ``acceptance_length`` is left out where no conversation has an answer.
    """
    num_heads = module.heads.config.num_heads
    mine, num_rounds = _shares(len(examples), args)
    loader = DataLoader(
        examples,
        batch_sampler=[*mine, [0]] if len(mine) < num_rounds else mine,
        collate_fn=collate,
        num_workers=args.dataloader_num_workers,
    )
    counts = HeadCounts.zeros(num_heads, device=module.device)
    emitted, steps = 0, 0
    base_loss, base_rows = 0.0, 0
    module.eval()
    for index, batch in enumerate(loader):
        inputs = {name: value.to(module.device) for name, value in batch.items()}
        pairs = module.count_pairs(inputs["labels"])
        outputs = module(**inputs, num_pairs=pairs, with_ranks=True, compute_dtype=torch.float32)
        if index == len(mine):
            # Not this process's: sharded weights are gathered by all processes or by none.
            break
        counts += outputs["counts"]
        if module.joint is not None:
            base_loss += outputs["base_loss_sum"].item()
            base_rows += len(inputs["labels"])
        rows = [examples.conversations[i] for i in mine[index]]
        # With soft targets a batch also holds each span's last position, which has no pair.
        has_pair = (batch["labels"] != IGNORE).any(dim=1)
        walked = walk(outputs["is_first"].cpu()[has_pair], rows)
        emitted, steps = emitted + walked[0], steps + walked[1]
    name = None if module.joint is None else module.joint.loss_name
    module.train()
    values = HeadCounts.from_stacked(reduce(counts.stacked())).log_values()
    sums = [emitted, steps, base_loss, base_rows]
    total = reduce(torch.tensor(sums, dtype=torch.float64, device=module.device))
    tokens, taken, base_loss, base_rows = total.tolist()
    if name is not None and base_rows:
        values[f"base_{name}"] = base_loss / base_rows
    return {**values, "acceptance_length": tokens / taken} if taken else values


def walk(is_first: Tensor, conversations: Sequence[Conversation]) -> tuple[int, int]:
    """Tokens emitted and steps taken by a decoder with a top-1 chain, summed over conversations.

    Args:
        is_first: [N, K] whether a head ranks the true token first, at the conversations' source
            positions with a valid pair, one conversation after the other.
        conversations: whose positions they are.
    """
    accepted = leading_hits(is_first)
    num_heads = is_first.shape[1]
    emitted, steps, start = 0, 0, 0
    for row in conversations:
        pairs = valid_pairs(row.input_ids, row.assistant_spans, num_heads=num_heads)
        has_pair = (pairs.labels != IGNORE).any(dim=1)
        end = start + int(has_pair.sum())
        # A span's last position has no pair, so nothing is accepted there, but a step may be taken.
        at_row = torch.zeros(len(has_pair), dtype=torch.int64)
        at_row[has_pair] = accepted[start:end]
        ends = pairs.spans.bincount().cumsum(0).tolist()
        steps += len(walked_rows(at_row.tolist(), zip([0, *ends[:-1]], ends, strict=True)))
        emitted += len(has_pair)
        start = end
    assert start == len(is_first), "every position belongs to one of the conversations"
    return emitted, steps


def _shares(count: int, args: TrainingArguments) -> tuple[list[list[int]], int]:
    """This process's batches of indices, and how many batches the process with the most has."""
    size = args.per_device_eval_batch_size
    batches = [list(range(first, min(first + size, count))) for first in range(0, count, size)]
    return batches[args.process_index :: args.world_size], -(-len(batches) // args.world_size)
