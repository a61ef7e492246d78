"""Masks against plain loops, and a cache that keeps accepted nodes against one written in order."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, MambaConfig, PreTrainedModel

from medusa_train.decoding.cache import (
    FULL,
    SLIDING,
    CachePlan,
    cache_plan,
    keep_accepted,
    new_cache,
)
from medusa_train.decoding.masks import TreeMasks
from medusa_train.errors import InputError
from medusa_train.tree.topology import Tree
from tests.models_for_tests import make_model

TREE = Tree.from_paths([(0,), (1,), (0, 0), (0, 2), (1, 1), (0, 0, 0)])


def masks_of(model: PreTrainedModel, plan: CachePlan) -> TreeMasks:
    return TreeMasks(TREE.mask, TREE.depths, plan, model.dtype)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mistral"])
@pytest.mark.parametrize("num_cached", [4, 15, 16, 40])
def test_a_node_sees_its_text_and_its_ancestors(architecture: str, num_cached: int) -> None:
    model = make_model(architecture)
    plan = cache_plan(model)
    cache = new_cache(model, num_rows=1)
    model(torch.randint(0, 64, (1, num_cached)), cache=cache, use_cache=True)
    starts = torch.tensor([2])
    found = masks_of(model, plan).masks(cache, starts=starts, lengths=torch.tensor([num_cached]))
    found = found if isinstance(found, dict) else {next(iter(plan.layers)): found}
    assert found.keys() == plan.layers.keys()
    parents = TREE.parents.tolist()
    for kind, mask in found.items():
        window = plan.window if kind == SLIDING else None
        num_columns, offset = cache.get_mask_sizes(TREE.size, plan.layers[kind])
        assert mask.shape == (1, 1, TREE.size, num_columns)
        for node in range(TREE.size):
            line, at = set(), node
            while at >= 0:
                line.add(at)
                at = parents[at]
            position = num_cached + len(line) - 1
            for column in range(num_columns):
                place = offset + column
                if place < num_cached:
                    sees = place >= 2
                else:
                    sees = place - num_cached in line
                    place = num_cached + int(TREE.depths[place - num_cached])
                sees = sees and (window is None or place > position - window)
                assert (mask[0, 0, node, column] == 0) == sees


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gemma2", "gpt2", "deepseek_v3"])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_rows_that_keep_different_nodes(architecture: str, num_rows: int) -> None:
    """After a tree step the cache gives what it gives for the accepted text in order."""
    model = make_model(architecture, dtype=torch.float64)
    plan = cache_plan(model)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(1, 64, (num_rows, 20), generator=generator)
    nodes = torch.randint(1, 64, (num_rows, TREE.size), generator=generator)
    # Of the second row only the root is kept.
    paths = [[0, TREE.index[0,], TREE.index[0, 2]], [0]][:num_rows]
    lengths = [20] * num_rows
    cache = new_cache(model, num_rows=num_rows)
    cached = 20
    model(text, cache=cache, use_cache=True)
    cache.activate_past_recording()
    starts = torch.zeros(num_rows, dtype=torch.long)
    masks = masks_of(model, plan)
    for _ in range(3):
        ends = torch.tensor(lengths)
        logits = model(
            nodes,
            cache=cache,
            use_cache=True,
            attention_mask=masks.masks(cache, starts=starts, lengths=ends),
            position_ids=masks.position_ids(starts, ends),
        ).logits
        texts = []
        for row, path in enumerate(paths):
            whole = torch.cat([text[row, : lengths[row]], nodes[row, path]])
            texts.append(whole)
            alone = model(whole[None]).logits[0, -len(path) :]
            # Eager attention soft-maxes in fp32.
            assert torch.allclose(logits[row, path], alone, atol=1e-5)
        lengths = [length + len(path) for length, path in zip(lengths, paths, strict=True)]
        text = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        total = cached + TREE.size
        pairs = [
            [(cached + node - total, length - len(path) + i - total) for i, node in enumerate(path)]
            for path, length in zip(paths, lengths, strict=True)
        ]
        pairs = [row + [row[-1]] * (3 - len(row)) for row in pairs]
        both = torch.tensor(pairs)
        cached = max(lengths)
        keep_accepted(cache, sources=both[..., 0], targets=both[..., 1], num_dropped=total - cached)
        assert cache.get_seq_length() == cached


def test_a_sliding_layer_keeps_its_window_alone() -> None:
    model = make_model("mistral")
    cache = new_cache(model, num_rows=1)
    model(torch.randint(0, 64, (1, 40)), cache=cache, use_cache=True)
    assert cache.layers[0].keys.shape[2] == 15
    assert cache_plan(model).layers == {SLIDING: 0}
    assert cache_plan(make_model("llama")).layers == {FULL: 0}


def test_models_that_cannot_roll_back_are_refused_by_name() -> None:
    config = MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=32, state_size=4)
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(InputError, match="MambaForCausalLM: "):
        cache_plan(model)
    linear = make_model("qwen3_next")
    with pytest.raises(InputError, match=r"Qwen3NextForCausalLM: .*linear_attention"):
        cache_plan(linear)


def test_attention_that_takes_no_masks_is_refused() -> None:
    model = make_model("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(InputError, match="'flash_attention_2' takes no tree masks"):
        cache_plan(model)
