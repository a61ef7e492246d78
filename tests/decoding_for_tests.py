"""Heads and trees for the tests of decoding: ``from tests.decoding_for_tests import …``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from medusa_train.base_model.features import hidden_states, output_projection
from medusa_train.base_model.fingerprint import base_fingerprint
from medusa_train.heads.checkpoint import save_heads
from medusa_train.heads.config import BaseIdentity, HeadsConfig
from medusa_train.heads.model import MedusaHeads
from medusa_train.tree.topology import Tree

CHAIN = Tree.chain(3)
# Every node that is not a leaf has its head's two most likely tokens as children.
FULL_TREE = Tree.from_paths(
    [path for depth in (1, 2, 3) for path in product(range(2), repeat=depth)]
)


def heads_config(model: PreTrainedModel, *, num_heads: int = 3, **options: object) -> HeadsConfig:
    weight, bias = output_projection(model)
    return HeadsConfig(
        num_heads=num_heads,
        hidden_size=weight.shape[1],
        vocab_size=weight.shape[0],
        lm_head_bias=bias is not None,
        **{"num_layers": 1, "layout": "shared", **options},
    )


def random_heads(
    model: PreTrainedModel, *, seed: int = 0, token_map: Tensor | None = None, **options: object
) -> MedusaHeads:
    """Untrained heads with weights at random."""
    size = None if token_map is None else len(token_map)
    heads = MedusaHeads(
        heads_config(model, truncated_vocab_size=size, **options), token_map=token_map
    )
    generator = torch.Generator().manual_seed(seed)
    for parameter in heads.parameters():
        parameter.requires_grad_(False).normal_(0.0, 0.3, generator=generator)
    return heads


def fitted_heads(
    model: PreTrainedModel, texts: Sequence[Tensor], *, start: int, num_heads: int = 3
) -> MedusaHeads:
    """Heads that are right on ``texts`` by construction: each solves for the tokens it predicts.

    With fewer positions than dimensions a projection can give every position its own token.
    """
    heads = MedusaHeads(
        heads_config(model, num_heads=num_heads, layout="full"), dtype=torch.float64
    )
    states = [hidden_states(model, text[None])[0] for text in texts]
    num_tokens = heads.config.vocab_size
    for k, head in enumerate(heads):
        rows, labels = [], []
        for text, state in zip(texts, states, strict=True):
            sources = range(start - 1, len(text) - 2 - k)
            rows += [state[t] for t in sources]
            labels += [int(text[t + 2 + k]) for t in sources]
        wanted = torch.nn.functional.one_hot(torch.tensor(labels), num_tokens).double()
        head[-1].weight.data.copy_((torch.linalg.pinv(torch.stack(rows)) @ wanted).T)
    return heads.requires_grad_(False)


def save_heads_directory(directory: Path, *, base: Path, **options: object) -> Path:
    """Heads at random, saved for the base model in the directory ``base``."""
    model = AutoModelForCausalLM.from_pretrained(base)
    heads = random_heads(model, **options)
    identity = BaseIdentity(str(base), base_fingerprint(str(base)))
    save_heads(heads, directory, base=identity)
    return directory
