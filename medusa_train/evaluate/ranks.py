"""The rank of the true token for every valid pair, from one teacher-forced pass.

From this one matrix the acceptance length of any chain or tree follows exactly, without decoding:
for greedy text under greedy decoding, and for sampled text under lossless sampling with the same
settings.

Shapes: N source positions, D hidden, V logits of a head, K heads.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from medusa_train.base_model.features import output_projection
from medusa_train.base_model.load import BaseModel
from medusa_train.console import progress
from medusa_train.data.conversations import Conversation
from medusa_train.data.examples import valid_pairs
from medusa_train.errors import InputError
from medusa_train.heads.model import MedusaHeads, num_candidate_rows
from medusa_train.hidden_states.online import length_batches, states_of_rows
from medusa_train.host_memory import freed_memory_kept
from medusa_train.losses import IGNORE, ranks_of
from medusa_train.run_dir import atomic_path

RANKS_FILE = "ranks.safetensors"
SCHEMA_VERSION = 1
MISS = -1
MAX_BATCH_TOKENS = 4_096
CHUNK_ELEMENTS = 1 << 23


@dataclass(frozen=True, slots=True)
class Ranks:
    """What each head said at each source position of some conversations, in their order.

    A span's positions are consecutive rows, its last one (which has no valid pair) included, so
    that a decoder's walk over the rows is the decoder's walk over the answer.

    Attributes:
        ranks: [N, K] int16; the rank of the true token, or ``MISS`` where it is not among the first
            ``top_k`` or the pair is not valid.
        num_valid: [N] int16; the first so many heads have a valid pair there.
        conversation: [N] int32; index of the conversation.
        position: [N] int32; the source position t within the conversation.
        span: [N] int32; index of the assistant span within the conversation.
        metadata: ``top_k``, the text's sampling, the fingerprints.
    """

    ranks: Tensor
    num_valid: Tensor
    conversation: Tensor
    position: Tensor
    span: Tensor
    metadata: dict[str, Any]

    @property
    def num_heads(self) -> int:
        """K."""
        return self.ranks.shape[1]

    @property
    def top_k(self) -> int:
        """Ranks from here on are not told apart from a miss."""
        return int(self.metadata["top_k"])

    @property
    def valid(self) -> Tensor:
        """[N, K] bool: the valid pairs."""
        return torch.arange(self.num_heads)[None, :] < self.num_valid[:, None]

    def of_conversations(self, kept: Tensor) -> Ranks:
        """The rows of the conversations of which ``kept`` [C] is true, counted anew."""
        rows = kept[self.conversation.long()]
        number = kept.cumsum(dim=0) - 1
        metadata = dict(self.metadata)
        if "conversation_ids" in metadata:
            ids = metadata["conversation_ids"]
            metadata["conversation_ids"] = [ids[i] for i in kept.nonzero().squeeze(1).tolist()]
        return Ranks(
            ranks=self.ranks[rows],
            num_valid=self.num_valid[rows],
            conversation=number[self.conversation[rows].long()].int(),
            position=self.position[rows],
            span=self.span[rows],
            metadata=metadata,
        )


@torch.no_grad()
def compute_ranks(
    base: BaseModel,
    heads: MedusaHeads,
    *,
    conversations: Sequence[Conversation],
    top_k: int,
    metadata: dict[str, Any],
) -> Ranks:
    """Run the base over the conversations once, and rank the true tokens at every head in fp32.

    Args:
        base: the base that the heads belong to.
        heads: K heads.
        conversations: the text, with its exact ids and spans.
        top_k: ranks below it are kept.
        metadata: stored with the ranks.
    """
    pairs = [
        valid_pairs(row.input_ids, row.assistant_spans, num_heads=heads.config.num_heads)
        for row in conversations
    ]
    ranker = _Ranker(base, heads)
    ranks: list[Tensor] = [torch.empty(0)] * len(conversations)
    lengths = [len(row.input_ids) for row in conversations]
    with freed_memory_kept(), progress("accuracy", len(conversations)) as bar:
        for batch in length_batches(lengths, max_tokens=MAX_BATCH_TOKENS):
            states = states_of_rows(
                base.model,
                [conversations[i].input_ids for i in batch],
                positions=[pairs[i].positions for i in batch],
            )
            for i, state in zip(batch, states, strict=True):
                ranks[i] = ranker(state, pairs[i].labels, top_k=top_k)
            bar.update(len(batch), detail="conversations")
    counts = torch.tensor([len(rank) for rank in ranks])
    return Ranks(
        ranks=torch.cat(ranks),
        num_valid=torch.cat([(pair.labels != IGNORE).sum(dim=1) for pair in pairs]).short(),
        conversation=torch.arange(len(ranks)).repeat_interleave(counts).int(),
        position=torch.cat([pair.positions for pair in pairs]).int(),
        span=torch.cat([pair.spans for pair in pairs]).int(),
        metadata={"schema_version": SCHEMA_VERSION, "top_k": top_k, **metadata},
    )


class _Ranker:
    """Ranks one conversation's true tokens; holds the heads in fp32 (fp64 for an fp64 base)."""

    def __init__(self, base: BaseModel, heads: MedusaHeads) -> None:
        weight, bias = output_projection(base.model)
        self.dtype = torch.float64 if base.model.dtype == torch.float64 else torch.float32
        self.heads = heads.to(device=weight.device, dtype=self.dtype)
        self.num_rows = num_candidate_rows(heads, base.num_tokens)
        self.projections: list[tuple[Tensor, Tensor | None]] = []
        for head in range(heads.config.num_heads):
            own, own_bias = heads.output_weight(head, lm_head_weight=weight, lm_head_bias=bias)
            # Shared heads have one projection: convert it once.
            if head and heads.config.layout == "shared":
                self.projections.append(self.projections[0])
                continue
            rows = own[: self.num_rows].to(self.dtype)
            shift = None if own_bias is None else own_bias[: self.num_rows].to(self.dtype)
            self.projections.append((rows, shift))

    def __call__(self, states: Tensor, labels: Tensor, *, top_k: int) -> Tensor:
        """[N, K] int16 ranks for states [N, D] and labels [N, K]."""
        result = torch.full(labels.shape, MISS, dtype=torch.int16)
        rows = self.heads.labels_to_rows(labels.to(states.device), ignore=IGNORE)
        step = max(1, CHUNK_ELEMENTS // self.num_rows)
        for head, (weight, bias) in enumerate(self.projections):
            known = (rows[:, head] != IGNORE).nonzero().squeeze(1)
            for chunk in known.split(step):
                trunk = self.heads.trunk(states[chunk].to(self.dtype), head=head)
                logits = torch.nn.functional.linear(trunk, weight, bias)
                found = ranks_of(logits, rows[chunk, head])
                found = torch.where(found < top_k, found, torch.full_like(found, MISS))
                result[chunk.cpu(), head] = found.short().cpu()
        return result


def write_ranks(path: Path, ranks: Ranks) -> None:
    """Write ``ranks.safetensors`` atomically."""
    tensors = {
        "ranks": ranks.ranks,
        "num_valid": ranks.num_valid,
        "conversation": ranks.conversation,
        "position": ranks.position,
        "span": ranks.span,
    }
    # One key only: safetensors writes several in no fixed order, and equal ranks are equal bytes.
    metadata = {"ranks": json.dumps(ranks.metadata, sort_keys=True)}
    with atomic_path(path) as temporary:
        save_file({name: t.contiguous() for name, t in tensors.items()}, temporary, metadata)


def read_ranks(path: Path) -> Ranks:
    """Read ``ranks.safetensors``.

    Raises:
        InputError: it is missing or no such file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {})["ranks"])
            names = ("ranks", "num_valid", "conversation", "position", "span")
            tensors = {name: file.get_tensor(name) for name in names}
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise InputError(f"{path}: not a file of ranks: {error}") from error
    return Ranks(**tensors, metadata=metadata)
