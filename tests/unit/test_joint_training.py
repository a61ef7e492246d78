"""Medusa-2: base and heads together, from a recipe to what a run leaves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from medusa_train.data.conversations import Conversation
from medusa_train.data.teacher_logprobs import TEACHER_DIRECTORY, TeacherShardWriter
from medusa_train.errors import InputError
from medusa_train.heads.checkpoint import load_heads, read_spec
from medusa_train.pipeline import run_pipeline
from medusa_train.recipe.load import load_recipe
from medusa_train.stages import Workspace
from medusa_train.train.build import build_trainer
from medusa_train.train.trainer import HeadsTrainer
from medusa_train.trained_base import load_trained_base
from tests.models_for_tests import file_hashes, save_base
from tests.training_for_tests import conversation, cyclic_rows, write_recipe

JOINT = ["train.method=medusa2", "train.hidden_states=online"]
LORA = ["train.medusa2.lora.rank=4"]
FULL = ["train.medusa2={trained: full, teacher: frozen_copy}"]
KINDS = {"lora": LORA, "full": FULL}
LAST = ["train.medusa2={trained: last_layers, num_last_layers: 1, teacher: frozen_copy}"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


def trainer_of(
    directory: Path, base: Path, rows: Sequence[Conversation], *overrides: str
) -> tuple[HeadsTrainer, Workspace]:
    directory.mkdir(exist_ok=True)
    loaded = write_recipe(
        directory,
        base=base,
        rows=rows,
        overrides=[*JOINT, "data.eval_fraction=0.0", *overrides],
    )
    workspace = Workspace(loaded)
    joint, original = workspace.joint_base()
    trainer = build_trainer(
        workspace.recipe,
        base=joint,
        data=workspace.data,
        run=workspace.run,
        run_name="test",
        original=original,
    )
    return trainer, workspace


def _lines(path: Path, key: str) -> list[Any]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line[key] for line in lines if key in line]


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_leaves_its_original_only_by_training(
    tmp_path: Path, base: Path, kind: str
) -> None:
    trainer, workspace = trainer_of(
        tmp_path, base, cyclic_rows(16), *KINDS[kind], "train.medusa2.head_loss_weight=1.0",
        "train.trainer.learning_rate=0.01",
    )  # fmt: skip
    trainer.fit()
    divergences = _lines(workspace.run.metrics, "base_kl")
    assert divergences[0] == pytest.approx(0.0, abs=1e-6)
    assert min(divergences[2:]) > 1e-4


@pytest.mark.parametrize("kind", ["top", "samples"])
def test_stored_log_probabilities_are_the_original(
    tmp_path: Path, base: Path, kind: Literal["top", "samples"]
) -> None:
    rows = [*cyclic_rows(12), conversation(range(5, 35), [(0, 9), (15, 30)], name="turns")]
    overrides = [
        "train.medusa2={trained: full, teacher: stored, head_loss_weight: 1.0}",
        "train.trainer.learning_rate=0.01",
    ]
    with pytest.raises(InputError, match="has no log-probabilities stored with it"):
        trainer_of(tmp_path, base, rows, *overrides)
    model = AutoModelForCausalLM.from_pretrained(base)
    writer = TeacherShardWriter(tmp_path / "dataset" / TEACHER_DIRECTORY, kind=kind, num=6)
    torch.manual_seed(0)
    for row in rows:
        with torch.no_grad():
            logprobs = model(torch.tensor([row.input_ids])).logits[0].log_softmax(dim=-1)
        places = [max(t - 1, 0) for start, end in row.assistant_spans for t in range(start, end)]
        logprobs = logprobs[places]
        if kind == "top":
            ids = logprobs.topk(6, dim=1).indices
        else:
            ids = torch.multinomial(logprobs.exp(), 6, replacement=True)
        writer.add(row.id, token_ids=ids.int().numpy(), logprobs=logprobs.gather(1, ids).numpy())
    writer.finish()
    again = tmp_path / "again"
    again.mkdir()
    loaded = load_recipe(
        tmp_path / "recipe.yaml",
        [*JOINT, "data.eval_fraction=0.3", "data.packing=true", *overrides, f"run_dir={again}"],
    )
    run = run_pipeline(loaded, only="train")
    divergences = _lines(run.metrics, "base_kl")
    assert divergences[0] == pytest.approx(0.0, abs=1e-5)
    assert abs(divergences[-1]) > 1e-3


@pytest.mark.parametrize(
    ("kind", "expected"), [("lora", "adapters"), ("full", "base"), ("last", "base")]
)
def test_a_run_leaves_heads_and_a_base_that_belong_together(
    tmp_path: Path, base: Path, kind: str, expected: str
) -> None:
    before = file_hashes(base)
    overrides = [*JOINT, *({**KINDS, "last": LAST}[kind])]
    loaded = write_recipe(tmp_path, base=base, rows=cyclic_rows(24), overrides=overrides)
    run = run_pipeline(loaded)
    assert file_hashes(base) == before
    assert (run.root / expected).is_dir()
    _, identity = read_spec(run.heads)
    assert identity.trained is not None
    trained = load_trained_base(run.heads)
    assert trained.fingerprint == identity.fingerprint != identity.trained.original_fingerprint
    load_heads(run.heads, base_fingerprint=trained.fingerprint)
    with pytest.raises(InputError, match=r"trained with them, and this is .* as it was before"):
        load_heads(run.heads, base_fingerprint=Workspace(loaded).base.fingerprint)
    assert (run.report / "heads_accuracy.json").exists()
    saved = run.checkpoints / "checkpoint-4"
    again = load_trained_base(saved)
    ids = torch.arange(5, 25)[None]
    torch.testing.assert_close(
        again.model(ids).logits, trained.model(ids).logits, rtol=1e-5, atol=1e-5
    )
    original = Workspace(loaded).base.model
    assert (original(ids).logits - trained.model(ids).logits).abs().max() > 1e-4
    if kind == "last":
        moved = {
            name
            for (name, new), old in zip(
                trained.model.named_parameters(), original.parameters(), strict=True
            )
            if not torch.equal(new, old)
        }
        assert {".".join(name.split(".")[:3]) for name in moved} == {
            "model.layers.1",
            "model.norm.weight",
        }
    if kind == "lora":
        assert load_file(run.adapters / "adapter_model.safetensors")


@pytest.mark.parametrize("kind", [*KINDS, "last"])
def test_heads_learn_faster_than_the_base_by_groups(tmp_path: Path, base: Path, kind: str) -> None:
    """Case 17: every head tensor, the biases too, at four times the rate of the base's."""
    trainer, _ = trainer_of(
        tmp_path, base, cyclic_rows(8), *({**KINDS, "last": LAST}[kind]), "heads.num_layers=2",
        "train.trainer.learning_rate=0.001", "train.trainer.weight_decay=0.1",
    )  # fmt: skip
    trainer.create_optimizer()
    assert trainer.optimizer is not None
    rates = {
        id(parameter): group["lr"]
        for group in trainer.optimizer.param_groups
        for parameter in group["params"]
    }
    heads = {id(parameter) for parameter in trainer.module.heads.parameters()}
    trained = {id(p) for p in trainer.module.parameters() if p.requires_grad}
    assert rates.keys() == trained
    assert heads < trained
    assert any("bias" in name for name, _ in trainer.module.heads.named_parameters())
    for key, rate in rates.items():
        assert rate == (0.004 if key in heads else 0.001)


@pytest.mark.parametrize("kind", KINDS)
def test_two_runs_and_a_resumed_one_are_the_same(tmp_path: Path, base: Path, kind: str) -> None:
    """Dropout, random detachment and λ0 go on where they were."""
    more = [
        *KINDS[kind],
        "train.medusa2.head_detach_probability=0.5",
        "train.trainer.max_steps=8",
        "train.trainer.save_steps=4",
    ]
    results = []
    for name in ("straight", "cut"):
        trainer, workspace = trainer_of(tmp_path / name, base, cyclic_rows(16), *more)
        trainer.fit()
        if name == "cut":
            trainer, workspace = trainer_of(tmp_path / name, base, cyclic_rows(16), *more)
            trainer.fit(workspace.run.checkpoints / "checkpoint-4")
        results.append({**trainer.whole_tensors(), **trainer.trained_tensors()})
    straight, cut = results
    assert straight.keys() == cut.keys()
    for name, tensor in straight.items():
        assert torch.equal(tensor, cut[name]), name


def test_one_conversation_twice_as_long_counts_for_its_tokens(tmp_path: Path, base: Path) -> None:
    """Accumulation changes neither loss nor gradients (case 18), of the base too."""
    rows = [
        conversation([5 + (i * n) % 50 for i in range(1, 4 + 7 * n)], [(2, 3 + 7 * n)], name=str(n))
        for n in range(1, 9)
    ]
    results = []
    for batch_size in (1, 8):
        trainer, _ = trainer_of(
            tmp_path / str(batch_size), base, rows, *FULL,
            "train.medusa2.base_loss=cross_entropy",
            f"train.trainer.per_device_train_batch_size={batch_size}",
            f"train.trainer.gradient_accumulation_steps={8 // batch_size}",
            "train.medusa2.head_loss_schedule=constant",
        )  # fmt: skip
        batches = list(trainer.get_train_dataloader())
        pairs = trainer._get_num_items_in_batch(batches, torch.device("cpu"))
        assert pairs.tolist()[-1] == sum(row.num_supervised for row in rows)
        losses = [trainer.training_step(trainer.module, batch, pairs) for batch in batches]
        gradients = {n: p.grad for n, p in trainer.module.named_parameters() if p.requires_grad}
        results.append((sum(loss.item() for loss in losses), gradients))
    (loss_1, gradients_1), (loss_8, gradients_8) = results
    assert loss_1 == pytest.approx(loss_8, rel=1e-5)
    for name, gradient in gradients_1.items():
        assert gradient is not None
        torch.testing.assert_close(gradient, gradients_8[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", [*KINDS, "last"])
def test_activations_that_are_computed_again_give_the_same_gradients(
    tmp_path: Path, base: Path, kind: str
) -> None:
    results = []
    for name in ("false", "true"):
        trainer, _ = trainer_of(
            tmp_path / name, base, cyclic_rows(4), *({**KINDS, "last": LAST}[kind]),
            f"train.trainer.activation_checkpointing={name}", "train.trainer.max_steps=2",
            "train.trainer.learning_rate=0.01", "train.medusa2.head_loss_schedule=constant",
        )  # fmt: skip
        trainer.fit()
        assert trainer.module.joint is not None
        on = trainer.module.joint.model.is_activation_checkpointing
        assert on == (name == "true")
        results.append({**trainer.whole_tensors(), **trainer.trained_tensors()})
    plain, again = results
    for name, tensor in plain.items():
        torch.testing.assert_close(tensor, again[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_adapters_of_fp32_compute_as_their_layers_do(
    tmp_path: Path, base: Path, dtype: torch.dtype
) -> None:
    """Their products are the small part of a layer; in fp32 they would take most of its time."""
    name = str(dtype).removeprefix("torch.")
    trainer, workspace = trainer_of(
        tmp_path, base, cyclic_rows(4), *LORA, f"base_model.dtype={name}"
    )
    assert trainer.module.joint is not None
    model = trainer.module.joint.model
    factors = {
        name: module
        for name, module in model.named_modules()
        if name.endswith("lora_B.default") and "lm_head" not in name  # the loss reads that one
    }
    seen: dict[str, torch.dtype] = {}
    for name, module in factors.items():
        module.register_forward_hook(
            lambda _module, _inputs, output, name=name: seen.__setitem__(name, output.dtype)
        )
    assert factors
    assert {module.weight.dtype for module in factors.values()} == {torch.float32}
    batch = trainer.collate([trainer.train_dataset[0]])
    pairs = trainer.module.count_pairs(batch["labels"])
    outputs = trainer.module(**batch, num_pairs=pairs)
    assert seen == dict.fromkeys(factors, dtype)
    # Adapters that are zero still change nothing at all.
    assert outputs["base_loss_sum"].item() == pytest.approx(0.0, abs=1e-4)
    del workspace


@pytest.mark.parametrize("quantization", ["8bit", "4bit"])
def test_adapters_beside_quantised_weights_learn_in_every_layer(
    tmp_path: Path, quantization: str
) -> None:
    """QLoRA: also the first layer's, which gets its gradient through all the others."""
    base = save_base(tmp_path / "base", hidden_size=64, intermediate_size=128)
    overrides = [
        *JOINT, *LORA, f"base_model.quantization={quantization}",
        "train.trainer.learning_rate=0.01", "train.medusa2.head_loss_weight=1.0",
    ]  # fmt: skip
    loaded = write_recipe(tmp_path, base=base, rows=cyclic_rows(16), overrides=overrides)
    run = run_pipeline(loaded)
    tensors = load_file(run.adapters / "adapter_model.safetensors")
    ups = {name: tensor for name, tensor in tensors.items() if ".lora_B." in name}
    assert any(".layers.0." in name for name in ups)
    for name, tensor in ups.items():
        assert tensor.abs().max() > 1e-4, name
    divergences = _lines(run.metrics, "base_kl")
    # LLM.int8 rounds the activations too, and not the same where there are gradients.
    assert divergences[0] == pytest.approx(0.0, abs=1e-5 if quantization == "4bit" else 1e-2)
    assert divergences[-1] > 1e-4
    assert (run.report / "heads_accuracy.json").exists()
