"""What the heads propose: tokens for the nodes of a tree.

Shapes: B rows, D hidden, V rows of a head's projection, N tree nodes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from medusa_train.base_model.features import output_projection
from medusa_train.errors import ArgumentError
from medusa_train.heads.model import MedusaHeads, num_candidate_rows
from medusa_train.tree.topology import Tree, TreeError


class CandidateHeads:
    """Heads that propose tokens, in fp32 (fp64 for an fp64 base): in bf16 most ranks are ties.

    Args:
        model: the base model, with its current ``lm_head``.
        heads: moved to the model's device and to the dtype above.
        num_tokens: ids from here on are no tokens (``lm_head`` may have more rows) and are never
            proposed.
    """

    def __init__(self, model: PreTrainedModel, heads: MedusaHeads, *, num_tokens: int) -> None:
        weight, bias = output_projection(model)
        self.dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
        self.heads = heads.to(device=weight.device, dtype=self.dtype)
        self.num_heads = heads.config.num_heads
        self.num_rows = num_candidate_rows(heads, num_tokens)
        self.is_shared = heads.config.layout == "shared"
        self.projections: list[tuple[Tensor, Tensor | None]] = []
        for head in range(1 if self.is_shared else self.num_heads):
            own, shift = heads.output_weight(head, lm_head_weight=weight, lm_head_bias=bias)
            rows = own[: self.num_rows].to(self.dtype)
            self.projections.append(
                (rows, None if shift is None else shift[: self.num_rows].to(self.dtype))
            )
        self.blocks = [self._stacked(layer) for layer in range(heads.config.num_layers)]

    @torch.no_grad()
    def _stacked(self, layer: int) -> tuple[Tensor, Tensor]:
        """One layer of ResBlocks: all heads' matrices [K, D, D] and biases [K, 1, D]."""
        linears = [self.heads.block(head, layer=layer).linear for head in range(self.num_heads)]
        weights = torch.stack([linear.weight for linear in linears])
        for linear, weight in zip(linears, weights, strict=True):
            # The heads keep no second copy.
            linear.weight.data = weight
        return weights, torch.stack([linear.bias.detach() for linear in linears])[:, None]

    def check_fits(self, tree: Tree) -> None:
        """Refuse a tree that is deeper than there are heads, or wider than their tokens.

        Raises:
            ArgumentError: it names the path.
        """
        try:
            tree.check_fits(num_heads=self.num_heads, top_k=self.num_rows)
        except TreeError as error:
            raise ArgumentError(f"tree: {error}; give a tree that the heads can fill") from error

    def propose(self, states: Tensor, tree: Tree) -> Tensor:
        """[B, N - 1] a token for each node but the root, from hidden states [B, D]."""
        if not tree.depth:
            return torch.zeros(len(states), 0, dtype=torch.long, device=states.device)
        tokens = []
        for head, logits in enumerate(self._logits(states.to(self.dtype), tree.depth)):
            ranks = tree.ranks[tree.depths == head + 1].to(states.device)
            rows = top_rows(logits, int(ranks.max()) + 1)
            # Nodes are sorted by depth, so those of one head are side by side.
            tokens.append(self.heads.rows_to_tokens(rows)[:, ranks])
        return torch.cat(tokens, dim=1)

    def _logits(self, states: Tensor, num_heads: int) -> list[Tensor]:
        """[B, V] of each of the first heads: one product for all ResBlocks of a layer."""
        trunks = states.expand(num_heads, -1, -1)
        for weights, biases in self.blocks:
            trunks = trunks + F.silu(
                torch.baddbmm(biases[:num_heads], trunks, weights[:num_heads].mT)
            )
        if self.is_shared:
            logits = F.linear(trunks.flatten(0, 1), *self.projections[0])
            return list(logits.unflatten(0, (num_heads, -1)))
        return [
            F.linear(trunk, *projection)
            for trunk, projection in zip(trunks, self.projections[:num_heads], strict=True)
        ]


def top_rows(logits: Tensor, count: int) -> Tensor:
    """The ``count`` greatest of each row [B, V] by rank: of equal ones, the smaller index first.

    Returns:
        Indices [B, count].
    """
    if count >= logits.shape[1]:
        return logits.sort(dim=1, descending=True, stable=True).indices[:, :count]
    values, rows = logits.topk(count + 1, dim=1)
    if bool((values[:, count - 1] == values[:, count]).any()):
        # A tie at the border: topk may have taken any of the equal ones.
        return logits.sort(dim=1, descending=True, stable=True).indices[:, :count]
    rows, order = rows[:, :count].sort(dim=1)
    by_value = values[:, :count].gather(1, order).sort(dim=1, descending=True, stable=True).indices
    return rows.gather(1, by_value)
