"""Each term, weight and schedule of Medusa-2's objective, against plain loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_train.base_model.adapters import adapters_off
from medusa_train.train.joint import HeadGradient, without_dropout
from medusa_train.train.schedule import HeadLossSchedule
from medusa_train.train.trainer import HeadsTrainer
from tests.models_for_tests import make_model, save_base
from tests.reference import joint_reference as joint
from tests.reference import losses_reference as reference
from tests.training_for_tests import conversation, cyclic_rows
from tests.unit.test_joint_training import FULL, LORA, trainer_of

ROWS = [*cyclic_rows(3), conversation(range(5, 35), [(0, 9), (12, 13), (15, 30)], name="turns")]
EXACT = 1e-6
"""The relative difference that is allowed: norms compute in float32 whatever the model's type."""


@pytest.mark.parametrize("kind", ["constant", "linear", "sine"])
@pytest.mark.parametrize(("share", "delay"), [(1.0, 0.0), (0.5, 0.0), (0.25, 0.1), (1.0, 7.0)])
def test_the_schedule_equals_plain_loops(kind: str, share: float, delay: float) -> None:
    schedule = HeadLossSchedule(0.3, kind, share=share, delay=delay)  # type: ignore[arg-type]
    for step in range(41):
        expected = joint.head_loss_weight(
            step, num_steps=40, weight=0.3, kind=kind, share=share, delay=delay
        )
        assert schedule.at(step, num_steps=40) == pytest.approx(expected, abs=1e-12)
    assert schedule.at(0, num_steps=40) == (0.3 if kind == "constant" and not delay else 0.0)


def _in_float64(trainer: HeadsTrainer) -> None:
    """So that what is compared is the formula, not the rounding."""
    module = trainer.module.double()
    module.compute_dtype = torch.float64
    assert module.joint is not None
    if module.joint.original is not None:
        module.joint.original.double()


def _move(trainer: HeadsTrainer) -> None:
    """Weights that are no longer what they were."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in trainer.module.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise.to(parameter.dtype), alpha=0.05)


@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("base_loss", ["kl", "cross_entropy"])
@pytest.mark.parametrize("layout", ["full", "shared"])
@pytest.mark.parametrize("packing", [False, True])
def test_the_objective_equals_plain_loops(
    tmp_path: Path, kind: str, base_loss: str, layout: str, packing: bool
) -> None:
    base = save_base(tmp_path / "base")
    trainer, workspace = trainer_of(
        tmp_path / "run", base, ROWS, *(LORA if kind == "lora" else FULL),
        f"train.medusa2.base_loss={base_loss}", f"heads.layout={layout}",
        f"data.packing={str(packing).lower()}", "train.medusa2.head_loss_weight=0.7",
        "train.medusa2.head_loss_schedule=linear", "heads.num_heads=2",
        *(["train.medusa2.lora.dropout=0.0"] if kind == "lora" else []),
    )  # fmt: skip
    _in_float64(trainer)
    _move(trainer)
    trainer.state.max_steps, trainer.state.global_step = 10, 4
    [batch] = list(trainer.get_train_dataloader())
    pairs = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
    module = trainer.module.train()
    loss = trainer.compute_loss(module, batch, num_items_in_batch=pairs)
    alone = module(**batch, num_pairs=pairs, head_loss_weight=0.0)["loss"]

    assert module.joint is not None
    model = module.joint.model.eval()
    heads: Any = module.heads
    original = workspace.base.model.double()
    ours, theirs, labels = [], [], []
    head_logits: list[list[list[float]]] = [[], []]
    head_labels: list[list[int]] = []
    with torch.no_grad():
        for row in ROWS:
            ids = torch.tensor([row.input_ids])
            output = model(ids, output_hidden_states=True)
            before = original(ids).logits[0]
            for start, end in row.assistant_spans:
                for t in range(max(start, 1), end):
                    ours.append(output.logits[0, t - 1].tolist())
                    theirs.append(before[t - 1].tolist())
                    labels.append(row.input_ids[t])
                found = reference.labels_of_span(list(row.input_ids), start, end, 2)
                for t, label in found.items():
                    head_labels.append(label)
                    for k in range(2):
                        x = output.hidden_states[-1][0, t]
                        block = heads[k][0].linear
                        x = x + torch.nn.functional.silu(block.weight @ x + block.bias)
                        if layout == "shared":
                            head_logits[k].append(model.lm_head(x).tolist())
                        else:
                            head_logits[k].append((heads[k][1].weight @ x).tolist())
    base_term = (
        joint.divergence(theirs, ours) if base_loss == "kl" else joint.next_token_loss(ours, labels)
    )
    head_term = reference.medusa1_loss(head_logits, head_labels, decay=0.8)
    assert loss.dtype == torch.float64
    assert alone.item() == pytest.approx(base_term, rel=EXACT)
    assert (loss - alone).item() == pytest.approx(0.7 * 0.4 * head_term, rel=EXACT)
    assert loss.item() == pytest.approx(base_term + 0.7 * 0.4 * head_term, rel=EXACT)
    assert base_term > 1e-3


def test_a_head_learns_from_the_original_at_its_target(tmp_path: Path) -> None:
    """Soft targets in joint training are the original's, not those of the base under training."""
    base = save_base(tmp_path / "base")
    rows = cyclic_rows(3)
    trainer, workspace = trainer_of(
        tmp_path / "run", base, rows, *FULL, "train.soft_target_weight=1.0",
        "train.medusa2.head_loss_schedule=constant", "train.medusa2.head_loss_weight=1.0",
        "heads.num_heads=1",
    )  # fmt: skip
    _in_float64(trainer)
    _move(trainer)
    [batch] = list(trainer.get_train_dataloader())
    pairs = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
    module = trainer.module.train()
    outputs = module(**batch, num_pairs=pairs, head_loss_weight=0.0)
    whole = module(**batch, num_pairs=pairs, head_loss_weight=1.0)
    assert module.joint is not None
    terms = []
    heads: Any = module.heads
    original = workspace.base.model.double()
    with torch.no_grad():
        for row in rows:
            ids = torch.tensor([row.input_ids])
            states = module.joint.model.model(ids).last_hidden_state[0]
            theirs = original(ids).logits[0]
            start, end = row.assistant_spans[0]
            for t in range(start - 1, end - 2):
                block, projection = heads[0]
                x = states[t]
                x = x + torch.nn.functional.silu(block.linear.weight @ x + block.linear.bias)
                log_p = (projection.weight @ x).log_softmax(dim=0)
                terms.append(-(theirs[t + 1].softmax(dim=0) * log_p).sum().item())
    expected = 0.8 * sum(terms) / len(terms)
    assert (whole["loss"] - outputs["loss"]).item() == pytest.approx(expected, rel=EXACT)


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.0])
def test_the_heads_gradient_is_scaled_and_the_states_are_not(scale: float) -> None:
    states = torch.randn(5, 3, requires_grad=True)
    scaled = HeadGradient(scale).apply(states)
    assert torch.equal(scaled, states)
    (scaled * torch.arange(3.0)).sum().backward()
    torch.testing.assert_close(states.grad, scale * torch.arange(3.0).expand(5, 3))


def test_a_share_of_the_batches_is_detached() -> None:
    torch.manual_seed(0)
    states = torch.randn(2, 3, requires_grad=True)
    rule = HeadGradient(1.0, detach_probability=0.25)
    gradients = [torch.autograd.grad(rule.apply(states).sum(), states)[0] for _ in range(1_000)]
    assert {gradient.unique().item() for gradient in gradients} == {0.0, 1.0}
    assert 200 < sum(not gradient.any() for gradient in gradients) < 300


@pytest.mark.parametrize("architecture", ["gpt2", "gemma2", "opt", "cohere"])
def test_the_original_is_the_base_at_the_start(tmp_path: Path, architecture: str) -> None:
    """Also of models with dropout, and with logits that are scaled or capped."""
    base = save_base(tmp_path / "base", architecture)
    trainer, _ = trainer_of(tmp_path / "run", base, cyclic_rows(4), *LORA, "heads.num_heads=2")
    [batch] = list(trainer.get_train_dataloader())
    pairs = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
    module = trainer.module.train()
    outputs = module(**batch, num_pairs=pairs)
    assert abs(outputs["base_loss_sum"].item()) / pairs[-1].item() < 1e-6
    _in_float64(trainer)
    _move(trainer)
    module.eval()
    moved = module(**batch, num_pairs=pairs)["base_loss_sum"].item() / pairs[-1].item()
    assert module.joint is not None
    terms = []
    with torch.no_grad():
        for row in cyclic_rows(4):
            ids = torch.tensor([row.input_ids])
            ours = module.joint.model(ids).logits[0].log_softmax(dim=-1)
            with adapters_off(module.joint.model):
                theirs = module.joint.model(ids).logits[0].log_softmax(dim=-1)
            start, end = row.assistant_spans[0]
            rows = slice(start - 1, end - 1)
            terms.append((theirs[rows].exp() * (theirs[rows] - ours[rows])).sum(dim=-1))
    assert moved == pytest.approx(torch.cat(terms).mean().item(), rel=EXACT)
    assert moved > 1e-3


def test_dropout_of_the_base_is_off() -> None:
    model = make_model("gpt2")
    assert any(module.p for module in model.modules() if isinstance(module, torch.nn.Dropout))
    without_dropout(model)
    ids = torch.arange(5, 25)[None]
    assert torch.equal(model.train()(ids).logits, model.eval()(ids).logits)
