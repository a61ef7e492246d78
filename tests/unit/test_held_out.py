"""Evaluation while training: the figures of the accuracy report, over any number of processes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from medusa_train.data.conversations import Conversation
from medusa_train.losses import chunked_cross_entropy, ranks_of
from medusa_train.pipeline import run_pipeline
from medusa_train.stages import Workspace
from medusa_train.train.build import build_trainer
from medusa_train.train.held_out import evaluate_held_out, walk
from tests.models_for_tests import save_base
from tests.products_for_tests import CountProducts
from tests.training_for_tests import CYCLE, conversation, cyclic_rows, write_recipe


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


def _rows(count: int) -> list[Conversation]:
    """Answers of every length from one token on, several in a row, that touch or do not."""
    rows = []
    for n in range(count):
        ids = [CYCLE[(n + i) % len(CYCLE)] for i in range(44)]
        spans = [(3, 4), (5, 6 + n % 7), (12, 20), (20, 22), (30, 44 - n % 5)]
        rows.append(conversation(ids, spans[n % 3 :], name=f"row {n}"))
    return rows


def _evals(metrics: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line for line in lines if "eval_acceptance_length" in line]


@pytest.mark.parametrize("num_heads", [1, 3])
def test_the_last_evaluation_is_the_report(tmp_path: Path, base: Path, num_heads: int) -> None:
    overrides = [
        f"heads.num_heads={num_heads}", "train.hidden_states=online",
        # The training computes in bf16; the evaluation does not.
        "train.compute_dtype=bfloat16", "data.eval_fraction=0.4",
        "train.trainer.learning_rate=0.01", "train.trainer.max_steps=8",
        "train.trainer.eval_strategy=steps", "train.trainer.eval_steps=4",
        "train.trainer.per_device_eval_batch_size=3",
    ]  # fmt: skip
    run = run_pipeline(write_recipe(tmp_path, base=base, rows=_rows(40), overrides=overrides))
    first, last = _evals(run.metrics)
    report = json.loads((run.report / "heads_accuracy.json").read_text())
    assert [first["step"], last["step"]] == [4, 8]
    assert last["eval_acceptance_length"] == report["chain"]["acceptance_length"]
    assert 1.0 < last["eval_acceptance_length"] < 1.0 + num_heads
    for head in report["heads"]:
        for top in (1, 5):
            figure = last[f"eval_head{head['head']}_top{top}"]
            assert figure == head["top_k_accuracy"][top - 1]


def test_walk_by_hand() -> None:
    rows = [
        # Source positions 1 … 4 and 6, of which 4 and 6 have no pair: rows a b c | d  and  e.
        conversation(range(9), [(2, 6), (7, 8)], name="two answers"),
        conversation(range(4), [(2, 4)], name="short"),
    ]
    is_first = torch.tensor(
        [[True, True], [True, True], [False, True], [True, False]]  # a, b, c; then the short one
    )
    # a takes b and c: 3 tokens. d ends the answer. e is an answer of its own. The short one is
    # one step of two tokens.
    assert walk(is_first, rows) == (7, 4)


def test_one_process_equals_two(tmp_path: Path, base: Path) -> None:
    """With five batches, the second process has one less, and runs along in the last round."""
    overrides = [
        "train.hidden_states=online", "data.eval_fraction=0.5",
        "train.trainer.eval_strategy=steps", "train.trainer.eval_steps=4",
    ]  # fmt: skip
    loaded = write_recipe(tmp_path, base=base, rows=_rows(30), overrides=overrides)
    workspace = Workspace(loaded)
    trainer = build_trainer(
        workspace.recipe, base=workspace.base, data=workspace.data, run=workspace.run,
        run_name="test",
    )  # fmt: skip
    size = -(-len(workspace.data.eval) // 5)
    sent: list[torch.Tensor] = []

    def evaluate(process: int, world: int, reduce: Any) -> dict[str, float]:
        args: Any = SimpleNamespace(
            per_device_eval_batch_size=size,
            process_index=process,
            world_size=world,
            dataloader_num_workers=0,
        )
        examples: Any = trainer.eval_dataset
        return evaluate_held_out(
            trainer.module, examples, args=args, collate=trainer.collate, reduce=reduce
        )

    alone = evaluate(0, 1, lambda tensor: tensor)
    evaluate(1, 2, lambda tensor: sent.append(tensor) or tensor)
    together = evaluate(0, 2, lambda tensor: tensor + sent.pop(0))
    assert alone == pytest.approx(together, rel=1e-6)
    assert alone["acceptance_length"] == together["acceptance_length"]


def test_no_gradient_is_computed_where_none_is_asked_for() -> None:
    states, weight = torch.randn(6, 4), torch.randn(9, 4, requires_grad=True)
    with torch.no_grad(), CountProducts() as products:
        chunked_cross_entropy(states, weight, labels=torch.arange(6), chunk_size=2)
    assert products.count == 3


def test_rows_that_are_no_tokens_have_no_rank() -> None:
    states, weight = torch.randn(6, 4), torch.randn(9, 4)
    labels = torch.arange(6)
    ranks = chunked_cross_entropy(
        states, weight, labels=labels, with_ranks=True, num_candidates=7
    ).ranks
    assert torch.equal(ranks, ranks_of((states @ weight.T)[:, :7], labels))


def test_an_evaluation_without_answers_has_no_length(tmp_path: Path, base: Path) -> None:
    rows = [*cyclic_rows(12), *(conversation([5, 6, 7], [], name=f"x {n}") for n in range(9))]
    loaded = write_recipe(tmp_path, base=base, rows=rows)
    workspace = Workspace(loaded)
    silent = [row for row in workspace.data.eval if not row.assistant_spans]
    assert walk(torch.zeros(0, 3, dtype=torch.bool), silent) == (0, 0)
