from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from medusa_train.data.conversations import Conversation
from medusa_train.errors import InputError, MedusaTrainError
from medusa_train.hidden_states.cache import (
    CachedExamples,
    CachedHiddenStates,
    build_cache,
    collate_cached,
    is_complete,
)
from medusa_train.hidden_states.quantised import dequantise_rows, quantise_rows
from medusa_train.hidden_states.reading import ShardReader, num_kept, read_ahead, spare_memory
from medusa_train.json_values import fingerprint
from medusa_train.pipeline import run_pipeline
from medusa_train.stages import Workspace, fingerprint_of
from medusa_train.train.build import build_trainer
from tests.models_for_tests import file_hashes, make_model, save_base
from tests.reference import quantise_reference
from tests.training_for_tests import conversation, cyclic_rows, write_recipe

ROWS = [*cyclic_rows(7), conversation([5, 6, 7], [], name="silent"), *cyclic_rows(3, length=90)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("base"))


def _states(directory: Path, dtype: Any, rows: Sequence[Conversation] = ROWS) -> torch.Tensor:
    """All states of a new cache, as training reads them."""
    build_cache(make_model(), rows, directory=directory, fingerprint=dtype, dtype=dtype)
    examples = CachedExamples(
        rows, directory=directory, fingerprint=dtype, num_heads=3, ram_bytes=0
    )
    return CachedHiddenStates()(collate_cached([examples[i] for i in range(len(rows))]))


def test_quantised_rows_equal_plain_loops() -> None:
    torch.manual_seed(0)
    states = torch.randn(40, 24) * torch.logspace(-6, 6, 40)[:, None]
    states[3] = 0
    steps, scales = quantise_rows(states)
    expected_steps, expected_scales = quantise_reference.quantise(states.tolist())
    assert steps.dtype == torch.int8
    assert steps.tolist() == expected_steps
    torch.testing.assert_close(scales, torch.tensor(expected_scales), rtol=1e-6, atol=0)


@given(
    st.lists(
        st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=5, max_size=5),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_no_number_is_off_by_more_than_half_a_scale(
    rows: list[list[float]], dtype: torch.dtype
) -> None:
    states = torch.tensor(rows).to(dtype)
    steps, scales = quantise_rows(states)
    error = (dequantise_rows(steps, scales).double() - states.double()).abs()
    # 127 · 2⁻²⁴ of it is fp32's rounding; a denormal scale has few digits of its own.
    assert (error <= 0.50002 * scales.double()[:, None] + 127 * 2.0**-149).all()


def test_a_row_that_is_not_finite_stays_so() -> None:
    states = torch.tensor([[1.0, 2.0], [float("inf"), 1.0], [float("nan"), 1.0]])
    back = dequantise_rows(*quantise_rows(states))
    assert back.isfinite().all(dim=1).tolist() == [True, False, False]


def test_int8_states_are_those_of_the_base_rounded(tmp_path: Path) -> None:
    exact, rough = (_states(tmp_path / dtype, dtype) for dtype in ("bfloat16", "int8"))
    assert exact.dtype == torch.bfloat16
    assert rough.dtype == torch.float32
    assert len(rough) == len(exact)
    # Half a step of int8, and half of bf16's last digit (8 bits) of the greatest number.
    greatest = exact.float().abs().amax(dim=1, keepdim=True)
    assert ((rough - exact.float()).abs() <= greatest * (0.501 / 127 + 2.0**-8)).all()
    tensors = load_file(tmp_path / "int8" / "00000.safetensors")
    assert {name: value.dtype for name, value in tensors.items()} == {
        "hidden_states": torch.int8,
        "scales": torch.float32,
    }


def test_the_size_is_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = cyclic_rows(1, length=44 + 1024)
    _states(tmp_path, "int8", rows)
    size = (tmp_path / "00000.safetensors").stat().st_size
    count = 44 + 1024 - 4 - 1
    said = f"hidden states: {count:,} positions, 0.0 MiB as int8 (0.1 MiB as bfloat16)"
    assert said in capsys.readouterr().err
    assert count * (32 + 4) <= size <= count * (32 + 4) + 512


def test_a_cache_of_another_dtype_is_refused_and_replaced(tmp_path: Path) -> None:
    _states(tmp_path, "bfloat16")
    with pytest.raises(InputError, match="no complete hidden states of this base model, dtype"):
        CachedExamples(ROWS, directory=tmp_path, fingerprint="int8", num_heads=3, ram_bytes=0)
    assert _states(tmp_path, "int8").dtype == torch.float32
    assert not is_complete(tmp_path, fingerprint="bfloat16")


def test_a_cache_from_before_dtypes_is_bf16(tmp_path: Path) -> None:
    expected = _states(tmp_path, "bfloat16")
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest.pop("dtype") == "bfloat16"
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    examples = CachedExamples(
        ROWS, directory=tmp_path, fingerprint="bfloat16", num_heads=3, ram_bytes=0
    )
    read = collate_cached([examples[i] for i in range(len(ROWS))])
    assert torch.equal(read["hidden_states"], expected)


def test_int8_states_train_the_same_heads(tmp_path: Path, base: Path) -> None:
    """To 2 % of the loss at each of 12 steps, on states of 32 numbers; soft targets included."""
    curves = []
    for dtype in ("bfloat16", "int8"):
        (tmp_path / dtype).mkdir()
        overrides = [
            f"train.hidden_states_dtype={dtype}", "train.trainer.max_steps=12",
            "train.soft_target_weight=0.3", "train.trainer.eval_strategy=steps",
            "train.trainer.learning_rate=0.02",
        ]  # fmt: skip
        loaded = write_recipe(
            tmp_path / dtype, base=base, rows=cyclic_rows(24), overrides=overrides
        )
        run = run_pipeline(loaded)
        lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
        curves.append([line["loss"] for line in lines if "loss" in line])
    assert len(curves[0]) == 12
    assert curves[0][-1] < 0.8 * curves[0][0]
    assert curves[1] == pytest.approx(curves[0], rel=0.02)
    assert curves[1] != curves[0]


def test_fingerprints_name_the_dtype_only_where_it_is_set(tmp_path: Path, base: Path) -> None:
    """Runs from before the key are up to date; the budget of RAM decides nothing."""
    found = {}
    for dtype, budget in (("bfloat16", "null"), ("bfloat16", "1.5"), ("int8", "null")):
        (tmp_path / dtype).mkdir(exist_ok=True)
        sets = [f"train.hidden_states_dtype={dtype}", f"train.hidden_states_ram={budget}"]
        loaded = write_recipe(tmp_path / dtype, base=base, rows=cyclic_rows(8), overrides=sets)
        workspace = Workspace(loaded)
        prints = [fingerprint_of(s, workspace) for s in ("hidden-states", "train")]
        assert found.setdefault(dtype, prints) == prints
        recipe = workspace.recipe
        before = [
            [workspace.base_fingerprint, recipe.base_model.dtype, None],
            workspace.data_fingerprint,
            [recipe.data.max_length, recipe.data.eval_fraction],
        ]
        assert (found[dtype][0] == fingerprint(before)) == (dtype == "bfloat16")
    assert found["int8"][0] != found["bfloat16"][0]
    assert found["int8"][1] != found["bfloat16"][1]


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_budget_of_ram_changes_no_state(
    tmp_path: Path, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medusa_train.hidden_states.shards.SHARD_POSITIONS", 100)
    expected = _states(tmp_path, dtype)
    files = sorted(tmp_path.glob("*.safetensors"))
    sizes = [path.stat().st_size for path in files]
    count = len(files)
    assert count > 3
    for budget, kept in ((sum(sizes), count), (sum(sizes) - 1, count - 1), (sum(sizes[:2]), 2)):
        examples = CachedExamples(
            ROWS, directory=tmp_path, fingerprint=dtype, num_heads=3, ram_bytes=budget
        )
        assert examples.kept_bytes == sum(sizes[:kept])
        for _ in range(2):
            batch = collate_cached([examples[i] for i in range(len(ROWS))])
            assert torch.equal(CachedHiddenStates()(batch), expected)


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(0, 200))
def test_as_many_files_are_kept_as_fit(sizes: list[int], budget: int) -> None:
    count = num_kept(sizes, ram_bytes=budget)
    assert sum(sizes[:count]) <= budget
    assert count == len(sizes) or sum(sizes[: count + 1]) > budget


def test_the_recipe_sets_the_budget(tmp_path: Path, base: Path) -> None:
    """What training keeps is taken from it before the held-out split gets the rest."""
    gib = 2e-5
    sets = [f"train.hidden_states_ram={gib}", "train.trainer.eval_strategy=epoch"]
    loaded = write_recipe(tmp_path, base=base, rows=cyclic_rows(24), overrides=sets)
    run_pipeline(loaded, only="hidden-states")
    workspace = Workspace(loaded)
    data = workspace.data
    trainer = build_trainer(
        workspace.recipe, base=workspace.base, data=data, run=workspace.run, run_name="test"
    )
    train, held_out = trainer.train_dataset, trainer.eval_dataset
    assert isinstance(train, CachedExamples)
    assert isinstance(held_out, CachedExamples)
    sizes = [
        path.stat().st_size
        for split in ("train", "eval")
        for path in (workspace.run.hidden_states / split).glob("*.safetensors")
    ]
    assert sizes[0] > gib * 2**30 > sizes[1]
    assert (train.kept_bytes, held_out.kept_bytes) == (0, sizes[1])


def test_spare_memory_is_a_part_of_the_machines() -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < spare_memory() < total


def test_files_are_read_ahead(tmp_path: Path) -> None:
    """Only a hint: what is not there is no error of the reader's."""
    path = tmp_path / "x.safetensors"
    save_file({"hidden_states": torch.ones(300, 1000)}, path)
    thread = read_ahead([path, tmp_path / "gone.safetensors"])
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_a_damaged_shard_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(MedusaTrainError, match=r"x\.safetensors: cannot be read: No such file"):
        ShardReader(path, is_kept=False)
    save_file({"hidden_states": torch.arange(24.0).view(6, 4)}, path)
    reader = ShardReader(path, is_kept=False)
    assert reader.rows("hidden_states", 2, 4).tolist() == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert reader.rows("hidden_states", 3, 3).shape == (0, 4)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(MedusaTrainError, match="ends before its last row; run the stage"):
        reader.rows("hidden_states", 4, 6)


def _build_in_process(index: int, directory: Path, barrier: Any, failures: Any) -> None:
    try:
        torch.set_num_threads(1)
        build_cache(
            make_model(),
            ROWS,
            directory=directory,
            fingerprint="x",
            process_index=index,
            num_processes=3,
            wait=lambda: barrier.wait(60),
        )
        assert is_complete(directory, fingerprint="x")
    except BaseException as error:
        failures.put(repr(error))
        raise


def test_processes_share_the_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes give the files of one, over what another cache and a kill left there."""
    monkeypatch.setattr("medusa_train.hidden_states.shards.SHARD_POSITIONS", 100)
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    build_cache(make_model(), ROWS, directory=alone, fingerprint="x")
    build_cache(make_model(seed=5), ROWS, directory=shared, fingerprint="of another base")
    context = multiprocessing.get_context("fork")
    for interrupted in (False, True):
        if interrupted:
            (shared / "00001.safetensors").unlink()
            manifest = json.loads((shared / "manifest.json").read_text())
            (shared / "manifest.json").write_text(json.dumps({**manifest, "complete": False}))
        barrier, failures = context.Barrier(3), context.Queue()
        processes = [
            context.Process(target=_build_in_process, args=(i, shared, barrier, failures))
            for i in range(3)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=60)
        assert [process.exitcode for process in processes] == [0, 0, 0]
        assert failures.empty()
        assert file_hashes(shared) == file_hashes(alone)


def test_processes_without_a_common_directory_are_told(tmp_path: Path) -> None:
    """The first one finds that the second one's shard went elsewhere."""
    rows = cyclic_rows(400)
    with pytest.raises(
        MedusaTrainError, match=r"00001\.safetensors of another process is not here"
    ):
        build_cache(make_model(), rows, directory=tmp_path, fingerprint="x", num_processes=2)
    assert not is_complete(tmp_path, fingerprint="x")
