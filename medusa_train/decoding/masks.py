"""Who sees whom when tree nodes run through the model: 4-D masks and position ids.

A node sees its row's text and its own ancestors. Masks are additive, which both of the library's
plain attention implementations take.

Shapes: B rows, N tree nodes, C cached columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Cache

from medusa_train.decoding.cache import SLIDING, CachePlan

Mask = Tensor | dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class TreeMasks:
    """Masks of one tree.

    Attributes:
        is_ancestor: [N, N] bool; a node is an ancestor of itself.
        depths: [N] depth of each node, 0 for the root.
        plan: how the model's layers attend.
        dtype: of the masks: the model's.
    """

    is_ancestor: Tensor
    depths: Tensor
    plan: CachePlan
    dtype: torch.dtype

    def position_ids(self, starts: Tensor, lengths: Tensor) -> Tensor:
        """[B, N] position of each node behind texts of ``lengths`` [B] columns.

        Args:
            starts: [B] columns of left padding.
            lengths: [B] columns of padding and text.
        """
        return (lengths - starts)[:, None] + self.depths

    def masks(self, cache: Cache, *, starts: Tensor, lengths: Tensor) -> Mask:
        """[B, 1, N, C + N] for the next pass over the nodes, one for each kind of layer.

        Args:
            cache: before the pass.
            starts: [B] columns of left padding.
            lengths: [B] columns of padding and text; columns behind it are hidden.
        """
        num_nodes = len(self.depths)
        positions = lengths[:, None] + self.depths
        masks = {}
        for kind, layer in self.plan.layers.items():
            num_columns, offset = cache.get_mask_sizes(num_nodes, layer)
            columns = torch.arange(offset, offset + num_columns - num_nodes, device=starts.device)
            is_text = (columns >= starts[:, None]) & (columns < lengths[:, None])
            past = is_text[:, None, :].expand(-1, num_nodes, -1)
            tree = self.is_ancestor
            if kind == SLIDING and self.plan.window is not None:
                past = past & (columns > positions[:, :, None] - self.plan.window)
                tree = tree & (self.depths > self.depths[:, None] - self.plan.window)
            visible = torch.cat([past, tree.expand(len(starts), -1, -1)], dim=2)
            mask = torch.zeros(visible.shape, dtype=self.dtype, device=starts.device)
            masks[kind] = mask.masked_fill_(~visible, torch.finfo(self.dtype).min)[:, None]
        return masks if len(masks) > 1 else next(iter(masks.values()))
