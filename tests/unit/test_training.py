from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from medusa_train.data.conversations import Conversation
from medusa_train.errors import InputError, InputErrors, MedusaTrainError
from medusa_train.evaluate.ranks import compute_ranks
from medusa_train.heads.checkpoint import load_heads
from medusa_train.heads.model import MedusaHeads
from medusa_train.pipeline import run_pipeline
from medusa_train.recipe.load import load_recipe
from medusa_train.run_dir import RunDir
from medusa_train.stages import Workspace
from medusa_train.train.build import build_trainer
from medusa_train.train.trainer import HeadsTrainer
from tests.models_for_tests import file_hashes, save_base
from tests.reference import losses_reference as reference
from tests.training_for_tests import conversation, cyclic_rows, write_recipe


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


def _trainer(
    directory: Path, base: Path, rows: Sequence[Conversation], *overrides: str
) -> tuple[HeadsTrainer, Workspace]:
    directory.mkdir(exist_ok=True)
    loaded = write_recipe(
        directory,
        base=base,
        rows=rows,
        overrides=["train.hidden_states=online", "data.eval_fraction=0.0", *overrides],
    )
    workspace = Workspace(loaded)
    trainer = build_trainer(
        workspace.recipe,
        base=workspace.base,
        data=workspace.data,
        run=workspace.run,
        run_name="test",
    )
    return trainer, workspace


def _top1(heads: MedusaHeads, workspace: Workspace, rows: list[Conversation]) -> list[float]:
    ranks = compute_ranks(workspace.base, heads, conversations=rows, top_k=1, metadata={})
    hits = ((ranks.ranks == 0) & ranks.valid).sum(dim=0).double()
    return (hits / ranks.valid.sum(dim=0)).tolist()


def test_every_head_learns_its_own_offset(tmp_path: Path, base: Path) -> None:
    """Case 4: a token stream of period 11, K = 4."""
    rows = cyclic_rows(24)
    trainer, workspace = _trainer(
        tmp_path, base, rows, "heads.num_heads=4", "train.trainer.max_steps=100",
        "train.trainer.learning_rate=0.02",
    )  # fmt: skip
    initial = {name: value.clone() for name, value in trainer.module.heads.state_dict().items()}
    trainer.fit()
    heads = trainer.module.heads
    assert min(_top1(heads, workspace, rows)) >= 0.99
    for name, value in heads.state_dict().items():
        assert not torch.equal(value, initial[name]), name
    heads[0], heads[1] = heads[1], heads[0]
    swapped = _top1(heads, workspace, rows)
    assert max(swapped[:2]) < 0.5
    heads[0], heads[1] = heads[1], heads[0]
    heads[2] = heads[3]
    assert _top1(heads, workspace, rows)[2] < 0.5


def _batches(trainer: HeadsTrainer) -> list[dict[str, torch.Tensor]]:
    return list(trainer.get_train_dataloader())


def test_loss_equals_plain_loops(tmp_path: Path, base: Path) -> None:
    rows = cyclic_rows(4)
    trainer, workspace = _trainer(tmp_path, base, rows)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in trainer.module.heads.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    [batch] = _batches(trainer)
    pairs = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
    loss = trainer.compute_loss(trainer.module, batch, num_items_in_batch=pairs)
    model = workspace.base.model
    logits: list[list[list[float]]] = [[] for _ in range(3)]
    labels: list[list[int]] = []
    for row in rows:
        start, end = row.assistant_spans[0]
        states = model.model(input_ids=torch.tensor([row.input_ids])).last_hidden_state[0]
        spans = reference.labels_of_span(list(row.input_ids), start, end, 3)
        for t, label in spans.items():
            labels.append(label)
            for k in range(3):
                x = states[t]
                block, projection = trainer.module.heads[k]
                x = x + torch.nn.functional.silu(block.linear.weight @ x + block.linear.bias)
                logits[k].append((projection.weight @ x).tolist())
    expected = reference.medusa1_loss(logits, labels, decay=0.8)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("vocab_size", ["null", "40"])
def test_soft_targets_are_the_base_at_the_target(
    tmp_path: Path, base: Path, vocab_size: str
) -> None:
    """The teacher of pair (t, k) is what the base says after token t + 1 + k."""
    rows = [*cyclic_rows(3), conversation(range(5, 35), [(0, 9), (12, 13), (15, 30)], name="turns")]
    trainer, workspace = _trainer(
        tmp_path, base, rows, "train.soft_target_weight=0.4", f"heads.vocab_size={vocab_size}"
    )
    [batch] = _batches(trainer)
    pairs = trainer._get_num_items_in_batch([batch], torch.device("cpu"))
    loss = trainer.compute_loss(trainer.module, batch, num_items_in_batch=pairs)
    heads = trainer.module.heads
    tokens = range(heads.config.vocab_size) if heads.token_map is None else heads.token_map.tolist()
    expected = 0.0
    for k in range(3):
        terms = []
        for row in rows:
            output = workspace.base.model(torch.tensor([row.input_ids]), output_hidden_states=True)
            for start, end in row.assistant_spans:
                for t, labels in reference.labels_of_span(
                    list(row.input_ids), start, end, 3
                ).items():
                    if labels[k] not in tokens:
                        continue
                    # New heads say what the base's lm_head says at t.
                    loss_of_pair, *_ = reference.mixed_loss_and_gradients(
                        [output.hidden_states[-1][0, t].tolist()],
                        workspace.base.model.lm_head.weight[list(tokens)].tolist(),
                        [0.0] * len(tokens),
                        [list(tokens).index(labels[k])],
                        teacher_logits=[output.logits[0, t + 1 + k, list(tokens)].tolist()],
                        share=0.4,
                    )
                    terms.append(loss_of_pair)
        expected += 0.8 ** (k + 1) * sum(terms) / len(terms)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def _uneven_rows() -> list[Conversation]:
    return [
        conversation([5 + (i * n) % 50 for i in range(1, 4 + 7 * n)], [(2, 3 + 7 * n)], name=str(n))
        for n in range(1, 9)
    ]


def test_accumulation_changes_neither_loss_nor_gradients(tmp_path: Path, base: Path) -> None:
    """Case 18: 1 × 8 against 8 × 1, answers of very different length."""
    results = []
    for batch_size in (1, 8):
        trainer, _ = _trainer(
            tmp_path / str(batch_size), base, _uneven_rows(),
            f"train.trainer.per_device_train_batch_size={batch_size}",
            f"train.trainer.gradient_accumulation_steps={8 // batch_size}",
        )  # fmt: skip
        batches = _batches(trainer)
        pairs = trainer._get_num_items_in_batch(batches, torch.device("cpu"))
        losses = [trainer.training_step(trainer.module, batch, pairs) for batch in batches]
        gradients = {n: p.grad for n, p in trainer.module.heads.named_parameters()}
        results.append((sum(loss.item() for loss in losses), gradients))
    (loss_1, gradients_1), (loss_8, gradients_8) = results
    assert loss_1 == pytest.approx(loss_8, rel=1e-6)
    for name, gradient in gradients_1.items():
        assert gradient is not None
        torch.testing.assert_close(gradient, gradients_8[name], rtol=1e-4, atol=1e-7)


def test_accumulation_gives_one_loss_curve(tmp_path: Path, base: Path) -> None:
    curves = []
    for batch_size in (1, 8):
        trainer, workspace = _trainer(
            tmp_path / str(batch_size), base, _uneven_rows(),
            f"train.trainer.per_device_train_batch_size={batch_size}",
            f"train.trainer.gradient_accumulation_steps={8 // batch_size}",
        )  # fmt: skip
        trainer.fit()
        curves.append(_losses(workspace.run.metrics))
    assert len(curves[0]) == 4
    assert curves[0] == pytest.approx(curves[1], rel=1e-4)


def _losses(path: Path) -> list[float]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def test_non_finite_loss_stops_the_run(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case 3 (d): nothing of the step is logged or saved."""
    trainer, workspace = _trainer(
        tmp_path, base, cyclic_rows(8), "train.trainer.learning_rate=1e30",
        "train.trainer.max_grad_norm=0.0", "train.trainer.lr_scheduler_type=constant",
    )  # fmt: skip
    with pytest.raises(MedusaTrainError, match="the loss is not finite at step") as failure:
        trainer.fit()
    assert failure.value.exit_code == 1
    logged = _losses(workspace.run.metrics)
    assert 0.0 not in logged
    assert all(loss < 1e9 for loss in logged)
    assert "loss 0.000" not in capsys.readouterr().err


def test_no_supervised_token_is_an_input_error(tmp_path: Path, base: Path) -> None:
    """Case 3 (a)."""
    rows = [conversation([5, 6, 7, 8], [], name=str(n)) for n in range(3)]
    with pytest.raises(InputError, match="0 supervised tokens"):
        _trainer(tmp_path, base, rows)


def test_row_beyond_the_length_is_dropped_and_reported(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case 3 (b)."""
    rows = [*cyclic_rows(8), conversation(range(5, 95), [(80, 90)], name="late")]
    trainer, workspace = _trainer(tmp_path, base, rows, "data.max_length=60")
    trainer.fit()
    assert "conversations.jsonl:9" in capsys.readouterr().err
    losses = _losses(workspace.run.metrics)
    assert losses
    assert all(torch.isfinite(torch.tensor(loss)) for loss in losses)


def test_id_beyond_the_tokenizer_is_refused_by_row(tmp_path: Path, base: Path) -> None:
    """Case 6: before step 1, with the row's number."""
    rows = [*cyclic_rows(3), conversation([5, 6, 60_000, 7], [(1, 4)], name="bad")]
    with pytest.raises(InputErrors, match=r"conversations.jsonl:4: row 4 .*60000"):
        _trainer(tmp_path, base, rows)


@pytest.mark.parametrize("layout", ["full", "shared"])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
def test_padded_vocabulary_through_training(
    tmp_path: Path, layout: str, num_layers: int, tied: bool
) -> None:
    """Case 6: lm_head has more rows than the tokenizer has ids."""
    base = save_base(tmp_path / "base", tied=tied, extra_rows=24)
    before = file_hashes(base)
    (tmp_path / "a").mkdir()
    loaded = write_recipe(
        tmp_path / "a",
        base=base,
        rows=cyclic_rows(16),
        overrides=[f"heads.layout={layout}", f"heads.num_layers={num_layers}"],
    )
    weights = {n: p.clone() for n, p in Workspace(loaded).base.model.named_parameters()}
    run = run_pipeline(loaded)
    assert file_hashes(base) == before
    workspace = Workspace(loaded)
    for name, parameter in workspace.base.model.named_parameters():
        assert torch.equal(parameter, weights[name])
    heads, _ = load_heads(run.heads, base_fingerprint=workspace.base.fingerprint)
    if num_layers == 2:
        for head in heads:
            assert not torch.equal(head[0].linear.weight, head[1].linear.weight)
    ranks = compute_ranks(
        workspace.base, heads, conversations=workspace.data.eval, top_k=5_000, metadata={}
    )
    num_tokens = workspace.base.num_tokens
    assert workspace.base.model.lm_head.weight.shape[0] == num_tokens + 24
    assert int(ranks.ranks.max()) < num_tokens


def _heads(run: RunDir) -> dict[str, Any]:
    return load_heads(run.heads)[0].state_dict()


@pytest.mark.parametrize("soft_target_weight", [0.0, 0.5])
def test_cached_states_train_the_same_heads_as_online_ones(
    tmp_path: Path, base: Path, soft_target_weight: float
) -> None:
    runs = []
    for mode in ("online", "cached"):
        (tmp_path / mode).mkdir()
        loaded = write_recipe(
            tmp_path / mode,
            base=base,
            rows=cyclic_rows(24),
            overrides=[
                f"train.hidden_states={mode}",
                f"train.soft_target_weight={soft_target_weight}",
                "train.trainer.max_steps=12",
                "train.trainer.eval_strategy=steps",
                "train.trainer.eval_steps=6",
            ],
        )
        runs.append(run_pipeline(loaded))
    online, cached = (_losses(run.metrics) for run in runs)
    # The cache holds bf16: three significant digits.
    assert cached == pytest.approx(online, rel=2e-3)
    assert len(online) == 12


def test_the_best_checkpoint_is_kept_and_named(tmp_path: Path, base: Path) -> None:
    loaded = write_recipe(
        tmp_path,
        base=base,
        rows=cyclic_rows(24),
        overrides=[
            "train.trainer.max_steps=8",
            "train.trainer.save_steps=1",
            "train.trainer.save_total_limit=2",
            "train.trainer.eval_strategy=steps",
            "train.trainer.eval_steps=1",
            # It learns, and then a rate that is far too high throws it away.
            "train.trainer.learning_rate=0.3",
            "train.trainer.lr_scheduler_type=linear",
            "train.trainer.warmup_steps=8",
            "train.trainer.load_best_model_at_end=true",
        ],
    )
    run = run_pipeline(loaded)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    lengths = {
        line["step"]: line["eval_acceptance_length"]
        for line in lines
        if "eval_acceptance_length" in line
    }
    best = max(lengths, key=lambda step: (lengths[step], -step))
    assert set(lengths) == set(range(1, 9))
    assert best != 8
    record = json.loads(run.manifest.read_text())["stages"]["train"]
    assert record["best_step"] == best
    assert record["best_acceptance_length"] == pytest.approx(lengths[best])
    kept = {path.name for path in run.checkpoints.glob("checkpoint-*")}
    assert kept == {f"checkpoint-{best}", "checkpoint-8"}
    for path in run.checkpoints.glob("checkpoint-*/trainer_state.json"):
        state = json.loads(path.read_text())
        assert state["best_model_checkpoint"] == str(run.checkpoints / f"checkpoint-{best}")
    heads = (run.heads / "medusa_lm_head.safetensors").read_bytes()
    saved = run.checkpoints / f"checkpoint-{best}" / "medusa_lm_head.safetensors"
    assert heads == saved.read_bytes()


def test_fsdp_without_an_accelerator_is_refused(tmp_path: Path, base: Path) -> None:
    loaded = write_recipe(
        tmp_path, base=base, rows=cyclic_rows(8), overrides=["train.trainer.fsdp=true"]
    )
    with pytest.raises(InputError, match="fsdp: needs accelerators, and there is none"):
        run_pipeline(loaded)


def test_training_starts_from_other_heads(tmp_path: Path, base: Path) -> None:
    first = run_pipeline(write_recipe(tmp_path, base=base, rows=cyclic_rows(24)))
    overrides = [
        f"heads.init_from={first.heads}",
        "train.trainer.learning_rate=0.0",
        f"run_dir={tmp_path / 'second'}",
    ]
    second = run_pipeline(load_recipe(tmp_path / "recipe.yaml", overrides))
    name = "medusa_lm_head.safetensors"
    assert (first.heads / name).read_bytes() == (second.heads / name).read_bytes()
    with pytest.raises(InputErrors) as caught:
        run_pipeline(
            load_recipe(
                tmp_path / "recipe.yaml",
                [*overrides, "heads.num_heads=2", "run_dir=" + str(tmp_path / "third")],
            )
        )
    assert list(caught.value.lines) == [
        f"heads.init_from: {first.heads}: has num_heads 3, the recipe has 2"
    ]
