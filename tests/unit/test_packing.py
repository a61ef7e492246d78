"""Padded = packed, exactly: losses, gradients, and which models can take it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from medusa_train.base_model.packed import check_packed_rows
from medusa_train.data.conversations import Conversation
from medusa_train.data.packing import pack_rows
from medusa_train.errors import InputError
from medusa_train.heads.config import HeadsConfig
from medusa_train.heads.model import MedusaHeads
from medusa_train.hidden_states.online import (
    OnlineExamples,
    OnlineHiddenStates,
    collate_online,
    collate_packed,
)
from medusa_train.losses import IGNORE, head_weights
from medusa_train.pipeline import run_pipeline
from medusa_train.stages import Workspace, fingerprint_of
from medusa_train.train.module import HeadsModule
from tests.models_for_tests import ARCHITECTURES, make_model, save_base
from tests.training_for_tests import conversation, cyclic_rows, write_recipe

NUM_HEADS = 3


def _module(model: PreTrainedModel) -> HeadsModule:
    weight = model.get_output_embeddings().weight
    heads = MedusaHeads(
        HeadsConfig(NUM_HEADS, 1, "full", weight.shape[1], weight.shape[0]), dtype=weight.dtype
    )
    heads.init_from_base(weight)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in heads.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.add_(noise, alpha=0.1)
    return HeadsModule(
        heads,
        source=OnlineHiddenStates(model),
        base_config=model.config,
        lm_head=None,
        head_weights=head_weights(NUM_HEADS, decay=0.8),
        chunk_size=None,
        compute_dtype=weight.dtype,
        num_candidates=weight.shape[0],
    )


def _run(module: HeadsModule, rows: Sequence[Conversation], collate: Any) -> dict[str, Tensor]:
    """The loss, each head's loss sum, and all gradients of one batch."""
    examples = OnlineExamples(rows, num_heads=NUM_HEADS)
    batch = collate([examples[i] for i in range(len(rows))])
    module.zero_grad()
    outputs = module(**batch, num_pairs=module.count_pairs(batch["labels"]))
    outputs["loss"].backward()
    gradients = {name: p.grad.clone() for name, p in module.heads.named_parameters()}
    return {"loss": outputs["loss"].detach(), "sums": outputs["counts"].loss_sum, **gradients}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES.keys() - {"opt"}))
def test_padded_is_packed(architecture: str, attention: str) -> None:
    """Windows of 16 tokens included; the padding after the rows is in none of it."""
    model = make_model(architecture, dtype=torch.float64)
    model.set_attn_implementation(attention if model._supports_sdpa else "eager")
    check_packed_rows(model)
    rows = [*cyclic_rows(4, length=40), *cyclic_rows(3, length=11), cyclic_rows(1, length=25)[0]]
    module = _module(model)
    padded = _run(module, rows, collate_online)
    for capacity in (44, 70, 4096):
        packed = _run(module, rows, partial(collate_packed, capacity=capacity))
        assert padded.keys() == packed.keys()
        for name, value in padded.items():
            torch.testing.assert_close(packed[name], value, rtol=1e-9, atol=1e-10)


def test_two_conversations_together_and_apart() -> None:
    """Ten tokens each: equal loss sums of every head, no target in the other, positions from 0."""
    rows = [
        conversation(range(10, 20), [(3, 10)], name="a"),
        conversation(range(30, 40), [(0, 10)], name="b"),
    ]
    packed = pack_rows([row.input_ids for row in rows], capacity=20)
    assert packed.input_ids.tolist() == [[*range(10, 20), *range(30, 40)]]
    assert packed.position_ids.tolist() == [[*range(10), *range(10)]]
    assert packed.starts.tolist() == [0, 10]
    examples = OnlineExamples(rows, num_heads=NUM_HEADS)
    batch = collate_packed([examples[0], examples[1]], capacity=20)
    assert batch["source_index"].tolist() == [*range(2, 8), *range(10, 18)]
    for labels, own in ((batch["labels"][:6], rows[0]), (batch["labels"][6:], rows[1])):
        assert set(labels[labels != IGNORE].tolist()) <= set(own.input_ids)
    module = _module(make_model(dtype=torch.float64))
    pack = partial(collate_packed, capacity=20)
    together = _run(module, rows, pack)["sums"]
    apart = [_run(module, [row], pack)["sums"] for row in rows]
    torch.testing.assert_close(together, apart[0] + apart[1], rtol=1e-12, atol=0)


def _state_space(architecture: str, **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        architecture, vocab_size=64, hidden_size=32, num_hidden_layers=2, **options
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (partial(_state_space, "mamba", state_size=8), "MambaForCausalLM"),
        # One layer of attention and one convolution.
        (
            partial(
                _state_space,
                "lfm2",
                num_attention_heads=4,
                num_key_value_heads=2,
                layer_types=["conv", "full_attention"],
            ),
            "Lfm2ForCausalLM",
        ),
        # Its mask takes no notice of position ids.
        (partial(make_model, "opt"), "OPTForCausalLM"),
    ],
)
def test_a_model_that_reads_across_borders_is_refused_by_name(model: Any, name: str) -> None:
    with pytest.raises(InputError, match=rf"data\.packing: {name}.*; set it to false"):
        check_packed_rows(model())


def test_packed_runs_train_the_same_heads(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base")
    metrics, prints = [], []
    for packing in ("false", "true"):
        (tmp_path / packing).mkdir()
        overrides = [
            "train.hidden_states=online", f"data.packing={packing}", "data.max_length=128",
            "train.trainer.eval_strategy=steps", "train.trainer.eval_steps=2",
        ]  # fmt: skip
        loaded = write_recipe(
            tmp_path / packing, base=base, rows=cyclic_rows(24), overrides=overrides
        )
        run = run_pipeline(loaded)
        lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        metrics.append(
            [line[key] for line in lines for key in ("loss", "eval_head1_loss") if key in line]
        )
        prints.append(fingerprint_of("train", Workspace(loaded)))
    assert len(metrics[0]) == 6
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-4)
    assert prints[0] != prints[1]
