"""What processes of one run say to each other, in two real processes; and even batches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from medusa_train.distributed import any_process, on_main, process_group, wait_for_all
from medusa_train.errors import InputError
from medusa_train.hidden_states.online import OnlineExamples, collate_online
from medusa_train.launch import processes_to_start
from medusa_train.losses import IGNORE
from medusa_train.recipe.schema import Recipe
from medusa_train.train.even import EvenExamples, even_examples
from tests.training_for_tests import cyclic_rows

SCRIPT = """
import json, sys
from medusa_train.console import process_index
from medusa_train.distributed import (
    FailedElsewhereError, any_process, on_main, process_group, wait_for_all
)
from medusa_train.errors import InputError

def fail():
    raise InputError("no")

said = []
with process_group(use_cpu=True):
    rank = process_index()
    said.append(on_main(lambda: {"written by": rank}))
    said.append(any_process(rank == 1))
    said.append(any_process(False))
    wait_for_all()
    try:
        on_main(fail)
    except FailedElsewhereError as error:
        said.append(["elsewhere", error.exit_code, list(error.lines)])
    except InputError as error:
        said.append(["here", error.exit_code, list(error.lines)])
with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
    json.dump(said, file)
"""


def test_two_processes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            script,
            tmp_path,
        ],
        check=True,
        timeout=120,
        capture_output=True,
    )
    said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert said[0] == [{"written by": 0}, True, False, ["here", 2, ["no"]]]
    assert said[1] == [{"written by": 0}, True, False, ["elsewhere", 2, []]]


def test_one_process_needs_nobody() -> None:
    with process_group():
        wait_for_all()
        assert on_main(lambda: 7) == 7
        assert any_process(True)
        assert not any_process(False)

        def fail() -> None:
            raise InputError("no")

        with pytest.raises(InputError, match="no"):
            on_main(fail)


@pytest.mark.parametrize(
    ("devices", "deepspeed", "expected"), [(None, None, 0), (1, None, 0), (2, None, 2), (1, {}, 1)]
)
def test_how_many_processes(
    devices: int | None, deepspeed: dict[str, object] | None, expected: int
) -> None:
    recipe = Recipe.model_validate(
        {
            "base_model": {"name_or_path": "base"},
            "data": {"path": "data"},
            "train": {"trainer": {"use_cpu": True}},
            "deepspeed": deepspeed,
        }
    )
    assert processes_to_start(recipe, devices=devices) == expected
    with pytest.raises(InputError, match=r"--devices: must be at most .* on a CPU; got 1000000"):
        processes_to_start(recipe, devices=1_000_000)


def test_a_process_of_a_launcher_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    recipe = Recipe.model_validate({"base_model": {"name_or_path": "b"}, "data": {"path": "d"}})
    assert processes_to_start(recipe, devices=4) == 0


@pytest.mark.parametrize(("rows", "expected"), [(5, 8), (8, 8), (9, 16)])
def test_batches_are_filled_with_rows_that_weigh_nothing(rows: int, expected: int) -> None:
    examples = OnlineExamples(cyclic_rows(rows), num_heads=3)
    even = even_examples(examples, batch_size=4, num_processes=2)
    assert len(even) == expected
    items = [even[i] for i in range(len(even))]
    batch = collate_online(items)
    assert torch.equal(batch["labels"], torch.cat([examples[i]["labels"] for i in range(rows)]))
    for item in items[rows:]:
        assert item["labels"].shape == (0, 3)
        assert len(item["input_ids"]) == 1


def test_one_process_keeps_its_short_batch() -> None:
    examples = OnlineExamples(cyclic_rows(5), num_heads=3)
    assert even_examples(examples, batch_size=4, num_processes=1) is examples


def test_empty_rows_of_a_cache() -> None:
    class States:
        """One item of a cache."""

        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            assert index == 0
            return {
                "hidden_states": torch.ones(2, 4, dtype=torch.bfloat16),
                "labels": torch.full((2, 3), IGNORE),
            }

    empty = EvenExamples(States(), length=2)[1]  # type: ignore[arg-type]
    assert empty["hidden_states"].shape == (0, 4)
    assert empty["hidden_states"].dtype == torch.bfloat16
    assert empty["labels"].shape == (0, 3)
