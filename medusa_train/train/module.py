"""The heads as one module under the Trainer, with the loss inside its forward.

Medusa-1: ``L = Σ_k λ_k · Σ_pairs cross-entropy ÷ pairs_k`` (paper, eq. 1), where ``pairs_k`` counts
the valid pairs of head k in the whole accumulated batch of all processes, so that accumulation and
the number of devices do not change the loss. Medusa-2: ``L_base + λ0 · L`` (eq. 2), with the
``L_base`` of :mod:`medusa_train.train.joint`.

Shapes: N source positions, D hidden, V vocabulary, K heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from medusa_train.heads.model import MedusaHeads
from medusa_train.hidden_states.online import HiddenStateSource
from medusa_train.loss_memory import LossMemory
from medusa_train.loss_targets import Teacher
from medusa_train.losses import IGNORE, chunked_cross_entropy, label_offset
from medusa_train.metrics import HeadCounts, hits_from_ranks
from medusa_train.train.joint import JointBase


class HeadObjective(nn.Module):
    """One head with its loss: a module of its own, whose forward finds sharded weights whole.

    Args:
        heads: all heads.
        head: which of them, 0-based.
        teacher: gives soft targets, or None.
        chunk_size: rows of logits that exist at one time; None chooses by V.
        num_candidates: how many of the head's logits stand for tokens, so that they have a rank.
    """

    heads: MedusaHeads

    def __init__(
        self,
        heads: MedusaHeads,
        *,
        head: int,
        teacher: Teacher | None,
        chunk_size: int | None,
        num_candidates: int,
    ) -> None:
        super().__init__()
        self.layers = heads[head]
        object.__setattr__(self, "heads", heads)  # this module has no other head's parameters
        self.head = head
        self.teacher = teacher
        self.chunk_size = chunk_size
        self.num_candidates = num_candidates
        self.gradient_memory = LossMemory()

    def forward(
        self,
        states: Tensor,
        labels: Tensor,
        *,
        teacher_states: Tensor | None,
        lm_head: tuple[Tensor, Tensor | None] | None,
        with_ranks: bool,
        compute_dtype: torch.dtype,
        memory: LossMemory | None,
    ) -> tuple[Tensor, Tensor]:
        """The summed loss [] of ``states`` [N, D] against rows ``labels`` [N], and the ranks."""
        lm_head_weight, lm_head_bias = (None, None) if lm_head is None else lm_head
        weight, bias = self.heads.output_weight(
            self.head, lm_head_weight=lm_head_weight, lm_head_bias=lm_head_bias
        )
        # A gradient that is still there (accumulation) must not be overwritten.
        has_gradient = weight.is_leaf and weight.grad is not None
        result = chunked_cross_entropy(
            self.heads.trunk(states, head=self.head),
            weight,
            bias=bias,
            labels=labels,
            teacher=self.teacher,
            teacher_states=teacher_states,
            chunk_size=self.chunk_size,
            compute_dtype=compute_dtype,
            with_ranks=with_ranks,
            num_candidates=self.num_candidates,
            memory=memory,
            gradient_memory=None if memory is None or has_gradient else self.gradient_memory,
        )
        return result.loss_sum, result.ranks


class HeadsModule(nn.Module):
    """The heads, and where hidden states come from. A frozen base is no part of it.

    Args:
        heads: trained; fp32 master weights.
        source: gives the hidden states of a batch: a cache, a frozen base, or the base that is
            trained with the heads; rows are then every source position of a span.
        base_config: the base's config; DeepSpeed's "auto" keys read the hidden size from it.
        lm_head: the base's (weight [V, D], bias [V] or None), for the layout ``shared``.
        head_weights: [K] λ of each head.
        chunk_size: rows of logits that exist at one time; None chooses by V.
        compute_dtype: dtype of the projections to the vocabulary.
        num_candidates: how many of a head's logits stand for tokens, so that they have a rank.
        teacher: gives soft targets from the base's own states; then the rows of a batch hold every
            source position of a span, one after another, its last one included.
        keeps_memory: keep the large tensors of the loss for the next step. The gradient of a head's
            projection is then overwritten by the next step's, once it has been dropped.
    """

    _no_split_modules = ("HeadObjective",)
    """FSDP makes the weights of one head whole at a time."""

    heads: MedusaHeads
    lm_head_weight: Tensor | None
    lm_head_bias: Tensor | None

    def __init__(
        self,
        heads: MedusaHeads,
        *,
        source: HiddenStateSource | JointBase,
        base_config: Any,
        lm_head: tuple[Tensor, Tensor | None] | None,
        head_weights: list[float],
        chunk_size: int | None,
        compute_dtype: torch.dtype,
        num_candidates: int,
        teacher: Teacher | None = None,
        keeps_memory: bool = False,
    ) -> None:
        super().__init__()
        self.memory = LossMemory() if keeps_memory else None
        object.__setattr__(self, "heads", heads)  # their parameters are the objectives'
        self.config = base_config
        self.source = source  # a trained base is a module, and so a part of this one
        self.head_weights = head_weights
        self.compute_dtype = compute_dtype
        self.teacher = teacher
        self.objectives = nn.ModuleList(
            HeadObjective(
                heads,
                head=head,
                teacher=teacher,
                chunk_size=chunk_size,
                num_candidates=num_candidates,
            )
            for head in range(heads.config.num_heads)
        )
        weight, bias = lm_head if lm_head is not None else (None, None)
        self.register_buffer("lm_head_weight", weight, persistent=False)
        self.register_buffer("lm_head_bias", bias, persistent=False)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """What is frozen may be missing: a checkpoint has what is trained."""
        if self.joint is None:
            return super().load_state_dict(state_dict, strict=strict, assign=assign)
        result = super().load_state_dict(state_dict, strict=False, assign=assign)
        trained = {name for name, p in self.named_parameters() if p.requires_grad}
        wrong = [*trained.intersection(result.missing_keys), *result.unexpected_keys]
        if strict and wrong:
            raise RuntimeError(f"a checkpoint of another module: {min(wrong)}")
        return result

    @property
    def joint(self) -> JointBase | None:
        """The base that is trained with the heads, or None."""
        return self.source if isinstance(self.source, JointBase) else None

    @property
    def num_denominators(self) -> int:
        """Entries of :meth:`count_pairs`."""
        return self.heads.config.num_heads + (self.joint is not None)

    def count_pairs(self, labels: Tensor) -> Tensor:
        """[K] float64: valid pairs per head in ``labels`` [N, K] that the heads can name.

        With a base that is trained one more: its N supervised tokens.
        """
        rows = self.heads.labels_to_rows(labels.to(self.device), ignore=IGNORE)
        pairs = (rows != IGNORE).sum(dim=0).double()
        return pairs if self.joint is None else torch.cat([pairs, pairs.new_tensor([len(rows)])])

    @property
    def device(self) -> torch.device:
        """Where the heads are."""
        return next(self.heads.parameters()).device

    def forward(
        self,
        *,
        labels: Tensor,
        num_pairs: Tensor,
        with_ranks: bool = False,
        compute_dtype: torch.dtype | None = None,
        head_loss_weight: float = 1.0,
        **batch: Tensor,
    ) -> dict[str, Any]:
        """The weighted loss of a batch.

        Args:
            labels: [N, K] int64 token ids, ``IGNORE`` where a pair is not valid.
            num_pairs: denominators of the whole accumulated batch, as :meth:`count_pairs` counts.
            with_ranks: also count the top-n hits.
            compute_dtype: dtype of the projections; None is the module's.
            head_loss_weight: λ0, with a base that is trained.
            **batch: what :attr:`source` reads.

        Returns:
            ``loss`` []; ``counts``, the batch's :class:`HeadCounts`; with ranks, ``is_first``
            [N, K] bool: the head ranks the true token first; with a base that is trained,
            ``base_loss_sum`` [].
        """
        compute_dtype = compute_dtype or self.compute_dtype
        passed = None
        if self.joint is not None:
            passed = self.joint(batch, compute_dtype=compute_dtype)
            states, originals = passed.states, passed.original_states
            is_shared = self.heads.config.layout == "shared"
            lm_head = self.joint.lm_head() if is_shared else None
        else:
            assert not isinstance(self.source, JointBase)
            states = originals = self.source(batch)
            weight = self.lm_head_weight
            lm_head = None if weight is None else (weight, self.lm_head_bias)
        states = states.to(next(self.heads.parameters()).dtype)
        rows = self.heads.labels_to_rows(labels, ignore=IGNORE)
        loss = states.new_zeros(())
        parts, firsts = [], []
        # The products choose their own dtype; autocast must not choose it again.
        with torch.autocast(states.device.type, enabled=False):
            for k in range(self.heads.config.num_heads):
                is_valid = rows[:, k] != IGNORE
                loss_sum, ranks = self.objectives[k](
                    states[is_valid],
                    rows[is_valid, k],
                    teacher_states=self._teacher_states(originals, is_valid, head=k),
                    lm_head=lm_head,
                    with_ranks=with_ranks,
                    compute_dtype=compute_dtype,
                    memory=self.memory,
                )
                share = self.head_weights[k] / num_pairs[k].clamp(min=1)
                loss = loss + loss_sum * share.to(loss_sum.dtype)
                parts.append(_counts(loss_sum, ranks, is_valid, with_ranks=with_ranks))
                if with_ranks:
                    firsts.append(torch.zeros_like(is_valid).masked_scatter(is_valid, ranks == 0))
        outputs = {"loss": loss, "counts": HeadCounts.from_stacked(torch.stack(parts))}
        if passed is not None:
            base_loss = passed.loss_sum / num_pairs[-1].clamp(min=1).to(passed.loss_sum.dtype)
            outputs["loss"] = base_loss + head_loss_weight * loss
            outputs["base_loss_sum"] = passed.loss_sum.detach()
        return {**outputs, "is_first": torch.stack(firsts, dim=1)} if with_ranks else outputs

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Keep few of the trained base's activations, and compute the others again."""
        assert self.joint is not None, "a frozen base keeps no activations"
        # The other kind gives no gradient where only adapters inside a layer have one.
        kwargs = {"use_reentrant": False, **(activation_checkpointing_kwargs or {})}
        self.joint.model.activation_checkpointing_enable(
            activation_checkpointing_kwargs=kwargs, every_n_layers=every_n_layers, offload=offload
        )

    def _teacher_states(
        self, states: Tensor | None, is_valid: Tensor, *, head: int
    ) -> Tensor | None:
        """The base's state one token before each target, from which it predicts the target."""
        if self.teacher is None:
            return None
        assert states is not None, "soft targets come from the original"
        return states[is_valid.nonzero().squeeze(1) + label_offset(head) - 1]


def _counts(loss_sum: Tensor, ranks: Tensor, is_valid: Tensor, *, with_ranks: bool) -> Tensor:
    """One row of :meth:`HeadCounts.stacked`."""
    pairs = is_valid.sum().double()
    ranked = pairs if with_ranks else torch.zeros_like(pairs)
    return torch.stack([loss_sum.detach().double(), *hits_from_ranks(ranks), pairs, ranked])
