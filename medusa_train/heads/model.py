"""The heads: ResBlocks over the base's hidden state, and a projection to the vocabulary.

Shapes: N positions (or any leading dimensions), D hidden, V vocabulary, K heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medusa_train.heads.config import HeadsConfig


class ResBlock(nn.Module):
    """``x + SiLU(W x + b)`` with W and b zero at the start (paper, section 2.1.1, eq. of p_t^(k)).

    Zero makes a new block the identity, so that a new head predicts what ``lm_head`` does.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden_size, hidden_size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., D] → [..., D]."""
        return hidden_states + F.silu(self.linear(hidden_states))


class MedusaHeads(nn.ModuleList):
    """K heads.

    Parameter names are those of the FasterDecoding layout (``docs/formats.md``):
    ``{h}.{l}.linear.weight``, ``{h}.{l}.linear.bias`` and, where a head has its own ``lm_head``,
    ``{h}.{L}.weight``.

    The base's ``lm_head`` is not a part of this module: it is handed to :meth:`output_weight`, so
    that shared heads always use the base's current one.

    Args:
        config: the shape of the heads.
        token_map: [truncated_vocab_size] int64 ids that the heads can name, ascending; needed
            exactly when the vocabulary is truncated.
        dtype: of the parameters; fp32 master weights for training.
        device: of the parameters.
    """

    token_map: Tensor | None

    def __init__(
        self,
        config: HeadsConfig,
        *,
        token_map: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        if (token_map is None) != (config.truncated_vocab_size is None):
            raise ValueError("a token_map goes with a truncated vocabulary, and only with one")
        super().__init__(_new_head(config) for _ in range(config.num_heads))
        self.config = config
        if token_map is not None:
            check_token_map(token_map, config)
            token_map = token_map.to(torch.int64)
        self.register_buffer("token_map", token_map)
        self.to(dtype=dtype, device=device)

    @torch.no_grad()
    def init_from_base(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Copy the base's ``lm_head`` into every head's own; ``shared`` heads have none.

        Args:
            weight: [V, D].
            bias: [V] or None.
        """
        if self.config.layout == "shared":
            return
        rows = slice(None) if self.token_map is None else self.token_map.to(weight.device)
        for head in self:
            projection = cast("nn.Linear", cast("nn.ModuleList", head)[-1])
            projection.weight.copy_(weight[rows])
            if bias is not None:
                projection.bias.copy_(bias[rows])

    def trunk(self, hidden_states: Tensor, *, head: int) -> Tensor:
        """The ResBlocks of one head (0-based): [..., D] → [..., D]."""
        for layer in self._head(head)[: self.config.num_layers]:
            hidden_states = layer(hidden_states)
        return hidden_states

    def block(self, head: int, *, layer: int) -> ResBlock:
        """A ResBlock; head and layer from 0."""
        return cast("ResBlock", self._head(head)[layer])

    def output_weight(
        self, head: int, *, lm_head_weight: Tensor | None, lm_head_bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The projection of one head: ([V, D], [V] or None), rows in the order of its logits.

        Args:
            head: 0-based.
            lm_head_weight: [V, D] the base's; used by the layout ``shared`` only.
            lm_head_bias: [V] the base's, or None.
        """
        if self.config.layout == "full":
            projection = cast("nn.Linear", self._head(head)[-1])
            return projection.weight, projection.bias
        assert lm_head_weight is not None, "shared heads need the base's lm_head"
        if self.token_map is None:
            return lm_head_weight, lm_head_bias
        bias = None if lm_head_bias is None else lm_head_bias[self.token_map]
        return lm_head_weight[self.token_map], bias

    def logits(
        self, hidden_states: Tensor, *, lm_head_weight: Tensor, lm_head_bias: Tensor | None = None
    ) -> Tensor:
        """All heads' logits [K, ..., V] of ``hidden_states`` [..., D]; for few positions only."""
        rows = []
        for head in range(self.config.num_heads):
            weight, bias = self.output_weight(
                head, lm_head_weight=lm_head_weight, lm_head_bias=lm_head_bias
            )
            trunk = self.trunk(hidden_states, head=head)
            rows.append(F.linear(trunk, weight.to(trunk.dtype), _like(bias, trunk)))
        return torch.stack(rows)

    def labels_to_rows(self, labels: Tensor, *, ignore: int) -> Tensor:
        """Token ids → rows of a head's logits.

        ``ignore`` stays, and so becomes any id that a truncated vocabulary does not have.
        """
        if self.token_map is None:
            return labels
        position = torch.searchsorted(self.token_map, labels.clamp(min=0))
        position = position.clamp(max=self.token_map.numel() - 1)
        known = self.token_map[position] == labels
        return torch.where(known, position, torch.full_like(labels, ignore))

    def rows_to_tokens(self, rows: Tensor) -> Tensor:
        """Rows of a head's logits → token ids."""
        return rows if self.token_map is None else self.token_map[rows]

    def _head(self, head: int) -> nn.ModuleList:
        return cast("nn.ModuleList", self[head])


def num_candidate_rows(heads: MedusaHeads, num_tokens: int) -> int:
    """How many of a head's logits stand for real tokens.

    ``lm_head`` may have more rows than the tokenizer has ids (``num_tokens``); those rows are never
    candidates. Ids ascend in a truncated vocabulary too, so the real ones come first.
    """
    if heads.token_map is None:
        return min(num_tokens, heads.config.vocab_size)
    return int((heads.token_map < num_tokens).sum())


def most_frequent_tokens(labels: Iterable[int], *, size: int, vocab_size: int) -> Tensor:
    """The ``size`` most frequent of ``labels``, as an ascending token map [size].

    Equal counts go by the smaller id; when the data has fewer kinds of token, the smallest ids that
    do not occur fill the rest.
    """
    counts = torch.bincount(torch.as_tensor(list(labels), dtype=torch.int64), minlength=vocab_size)[
        :vocab_size
    ]
    order = torch.argsort(counts, descending=True, stable=True)
    return order[:size].sort().values


def check_token_map(token_map: Tensor, config: HeadsConfig) -> None:
    """Raise ValueError unless ``token_map`` is an ascending list of the vocabulary's ids."""
    size = config.truncated_vocab_size
    if token_map.dim() != 1 or token_map.numel() != size:
        raise ValueError(f"token_map must have shape [{size}], got {list(token_map.shape)}")
    if token_map.is_floating_point() or token_map.is_meta:
        raise ValueError(f"token_map must hold whole numbers, got {token_map.dtype}")
    is_ascending = bool((token_map[1:] > token_map[:-1]).all())
    if not is_ascending or int(token_map[0]) < 0 or int(token_map[-1]) >= config.vocab_size:
        raise ValueError(f"token_map must be ascending ids below {config.vocab_size}")


def _new_head(config: HeadsConfig) -> nn.ModuleList:
    head = nn.ModuleList(ResBlock(config.hidden_size) for _ in range(config.num_layers))
    if config.layout == "full":
        head.append(nn.Linear(config.hidden_size, config.num_logits, bias=config.lm_head_bias))
    return head


def _like(bias: Tensor | None, other: Tensor) -> Tensor | None:
    return None if bias is None else bias.to(other.dtype)
