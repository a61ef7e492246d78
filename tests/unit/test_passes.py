"""The compiled pass over a tree against the plain one."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from medusa_train.decoding.cache import ROOM, GrowingLayer
from medusa_train.decoding.generate import Generated, Generator
from medusa_train.tree.topology import Tree
from tests.decoding_for_tests import FULL_TREE, random_heads
from tests.models_for_tests import make_model

pytestmark = [
    pytest.mark.skipif(
        not any(map(shutil.which, ("c++", "g++", "clang++"))),
        reason="torch.compile needs a compiler",
    ),
    # torch's own modules, when torch.compile imports them.
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated"),
]


def _written(generator: Generator, prompt: list[list[int]], tree: Tree) -> Generated:
    ids = torch.tensor(prompt)
    result = generator.generate(
        ids,
        tree=tree,
        attention_mask=torch.ones_like(ids),
        # Beyond the first storage of the cache.
        max_new_tokens=280,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
    )
    assert isinstance(result, Generated)
    return result


def test_a_compiled_step_writes_the_same() -> None:
    model = make_model(seed=1, dtype=torch.float32).eval()
    heads = random_heads(model)
    plain, compiled = (
        Generator(model, heads, num_tokens=64, compiled=is_compiled)
        for is_compiled in (False, True)
    )
    for prompt in ([[5, 6, 7, 8]], [[9, 3]], [[5, 6], [7, 8]]):
        wanted, found = (_written(one, prompt, FULL_TREE) for one in (plain, compiled))
        assert torch.equal(wanted.sequences, found.sequences)
        assert wanted.statistics.accepted == found.statistics.accepted
    # The hook and the packed weights are gone.
    assert not model.get_output_embeddings()._forward_pre_hooks


@pytest.mark.parametrize("architecture", ["gemma2", "mistral"])
def test_sliding_layers_run_as_they_are(architecture: str) -> None:
    model = make_model(architecture).eval()
    heads = random_heads(model)
    plain, compiled = (
        Generator(model, heads, num_tokens=64, compiled=is_compiled)
        for is_compiled in (False, True)
    )
    wanted, found = (_written(one, [[5, 6, 7]], FULL_TREE) for one in (plain, compiled))
    assert torch.equal(wanted.sequences, found.sequences)


def test_a_short_answer_fits_the_cache_of_its_prompt() -> None:
    """A storage that grows while others of its size stay costs the memory of both."""
    model = make_model(seed=1).eval()
    generator = Generator(model, random_heads(model), num_tokens=64)
    capacities: list[int] = []

    def note(_module: object, _arguments: object, options: dict[str, Any]) -> None:
        layer = options["cache"].layers[0]
        assert isinstance(layer, GrowingLayer)
        if layer._storage is not None:
            capacities.append(layer._storage[0].shape[2])

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    for length, num_new, capacity in [(ROOM - 6, 20, 2 * ROOM), (6, 20, ROOM)]:
        ids = torch.randint(3, 60, (1, length))
        generator.generate(
            ids, tree=FULL_TREE, attention_mask=torch.ones_like(ids), max_new_tokens=num_new,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert set(capacities) == {capacity}
        capacities.clear()
    hook.remove()
