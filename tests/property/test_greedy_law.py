"""The law: greedy decoding with any heads and any tree is plain greedy decoding."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from medusa_train.decoding.generate import Generated, Generator
from medusa_train.heads.model import MedusaHeads
from medusa_train.tree.topology import Tree
from tests.decoding_for_tests import CHAIN, FULL_TREE, fitted_heads, random_heads
from tests.models_for_tests import ARCHITECTURES, make_model

VOCAB = 64
PAD = 0
# deepseek_v3 has latent attention: its keys and values have sizes of their own.
DECODED = sorted({*ARCHITECTURES, "deepseek_v3"})
# Two logits closer than this are a tie: their order is a matter of rounding.
TIE = 1e-6


@functools.cache
def model_of(architecture: str, seed: int) -> PreTrainedModel:
    return make_model(architecture, seed=seed, dtype=torch.float64, vocab_size=VOCAB)


def prompts(lengths: list[int], *, seed: int) -> dict[str, Tensor]:
    """Prompts of these lengths, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.randint(1, VOCAB, (len(lengths), width), generator=generator)
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    return {"input_ids": ids * mask + PAD * ~mask, "attention_mask": mask.long()}


def check_equal(model: PreTrainedModel, inputs: dict[str, Tensor], ours: Tensor, plain: Tensor):
    """Equal up to ties; what comes after a tie is another text."""
    width = max(ours.shape[1], plain.shape[1])
    for row, mask in enumerate(inputs["attention_mask"]):
        a, b = (
            torch.nn.functional.pad(x[row], (0, width - x.shape[1]), value=PAD)
            for x in (ours, plain)
        )
        if torch.equal(a, b):
            continue
        place = int((a != b).nonzero()[0])
        start = int((mask == 0).sum())
        logits = model(a[None, start:place]).logits[0, -1]
        gap = (logits[a[place]] - logits[b[place]]).abs()
        assert gap < TIE, f"row {row}: token {place}: {int(a[place])}, plain {int(b[place])}"


def decode_both(
    model: PreTrainedModel,
    heads: MedusaHeads,
    inputs: dict[str, Tensor],
    *,
    tree: Tree,
    **options: Any,
) -> Generated:
    options = {"pad_token_id": PAD, "do_sample": False, **options}
    plain = model.generate(**inputs, **options)
    ours = Generator(model, heads, num_tokens=VOCAB).generate(
        **inputs, tree=tree, return_dict_in_generate=True, **options
    )
    check_equal(model, inputs, ours.sequences, plain)
    return ours


@st.composite
def trees(draw: Any) -> Tree:
    """Any tree of up to three heads and four ranks, the root alone too."""
    ends = draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=10))
    paths = {tuple(end[:length]) for end in ends for length in range(1, len(end) + 1)}
    return Tree.from_paths(paths)


@pytest.mark.parametrize(
    ("lengths", "tree"),
    [([9], FULL_TREE), ([9, 3, 6], CHAIN)],
    ids=["one-row-2x2x2", "three-rows-chain"],
)
@pytest.mark.parametrize("architecture", DECODED)
def test_every_architecture_writes_what_it_writes_alone(
    architecture: str, tree: Tree, lengths: list[int]
) -> None:
    model = model_of(architecture, 1)
    inputs = prompts(lengths, seed=1)
    plain = model.generate(**inputs, do_sample=False, pad_token_id=PAD, max_new_tokens=24)
    texts = [
        text[mask.eq(0).sum() :] for text, mask in zip(plain, inputs["attention_mask"], strict=True)
    ]
    # One row is fitted: a projection of 32 dimensions can tell so many positions apart.
    heads = fitted_heads(model, texts[:1], start=lengths[0])
    ours = decode_both(model, heads, inputs, tree=tree, max_new_tokens=24)
    assert sum(ours.statistics.accepted[0]) >= 16
    ours = decode_both(model, random_heads(model), inputs, tree=tree, max_new_tokens=24)
    assert ours.statistics.num_tokens == 24 * len(lengths)


@given(
    architecture=st.sampled_from(DECODED),
    tree=trees(),
    lengths=st.sampled_from([[1], [7], [40], [1, 1, 1], [5, 17, 2], [20, 20, 20]]),
    seed=st.integers(0, 3),
    layout=st.sampled_from(["full", "shared"]),
    num_new=st.integers(1, 20),
    stops=st.lists(st.integers(1, VOCAB - 1), max_size=6, unique=True),
    is_truncated=st.booleans(),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_any_heads_and_any_tree(
    *,
    architecture: str,
    tree: Tree,
    lengths: list[int],
    seed: int,
    layout: str,
    num_new: int,
    stops: list[int],
    is_truncated: bool,
) -> None:
    model = model_of(architecture, seed % 2)
    token_map = torch.arange(0, VOCAB, 3) if is_truncated else None
    heads = random_heads(model, seed=seed, layout=layout, token_map=token_map)
    ours = decode_both(
        model,
        heads,
        prompts(lengths, seed=seed),
        tree=tree,
        max_new_tokens=num_new,
        eos_token_id=stops or None,
    )
    assert ours.sequences.shape[1] <= max(lengths) + num_new
    for row, accepted in enumerate(ours.statistics.accepted):
        written = len(accepted) + sum(accepted)
        text = ours.sequences[row, max(lengths) :]
        assert not set(stops) & set(text[: written - 1].tolist())
        assert (text[written:] == PAD).all()


@given(seed=st.integers(0, 200), width=st.integers(1, 3))
@settings(max_examples=6, deadline=None, derandomize=True)
def test_a_stop_token_inside_an_accepted_path(seed: int, width: int) -> None:
    """Right heads accept past the stop token, and nothing after it may be emitted."""
    model = model_of("llama", 0)
    inputs = prompts([6], seed=seed)
    plain = model.generate(**inputs, do_sample=False, max_new_tokens=20)
    heads = fitted_heads(model, [plain[0]], start=6)
    tree = Tree.from_paths([(*[0] * d, r) for d in range(3) for r in range(width)])
    for stop in sorted(set(plain[0, 6:].tolist()) - {PAD})[:6]:
        ours = decode_both(model, heads, inputs, tree=tree, max_new_tokens=20, eos_token_id=stop)
        assert int(ours.sequences[0, -1]) == stop
    ours = decode_both(model, heads, inputs, tree=tree, max_new_tokens=5)
    assert ours.statistics.num_tokens == 5
