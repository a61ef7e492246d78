"""Shards of a generation → the bytes of the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from medusa_train.base_model.load import BaseModel
from medusa_train.data.conversations import read_manifest
from medusa_train.data.teacher_logprobs import read_teacher
from medusa_train.distill.merge import merge
from medusa_train.distill.run import Shard
from medusa_train.distill.settings import DistillSettings, PromptSource
from medusa_train.distill.writer import Teacher
from medusa_train.errors import InputError, InputErrors
from tests.distill_for_tests import distill
from tests.models_for_tests import file_hashes, make_base

TIMINGS = {"seconds"}


@pytest.fixture(scope="module")
def base() -> BaseModel:
    return make_base()


def _settings(directory: Path, **changes: Any) -> DistillSettings:
    path = directory / "prompts.txt"
    # Some prompts are equal or nearly so, in the same unit and in others.
    words = ["red", "green", "blue", "cyan", "teal", "plum", "pink", "grey", "gold", "navy"]
    texts = [f"{words[n % 10]} {n // 10}: " + " ".join(words[(n * k) % 10] for k in range(9))
             for n in range(40)]  # fmt: skip
    texts += [f"{text} {' '.join(words)} {' '.join(words)}." for text in texts[:3] for _ in "ab"]
    texts += [f"{text} {' '.join(words)} {' '.join(words)}, please." for text in texts[:3]]
    path.write_text("\n".join([*texts, *texts[:5]]))
    return DistillSettings(
        sources=(PromptSource("file", str(path)),), max_new_tokens=8, temperature=1.0,
        loop_ngram=0, near_duplicate=0.8, **changes,
    )  # fmt: skip


def _shards(
    base: BaseModel, directory: Path, settings: DistillSettings, num: int = 3, **options: Any
) -> list[Path]:
    directories = [directory / f"shard-{i}" for i in range(num)]
    for i, shard in enumerate(directories):
        distill(base, settings=settings, output=shard, shard=Shard(i, num), **options)
    return directories


def test_merged_shards_equal_the_whole(base: BaseModel, tmp_path: Path) -> None:
    settings, teacher = _settings(tmp_path), Teacher("top", 3)
    whole = distill(base, settings=settings, output=tmp_path / "whole", teacher=teacher)
    shards = _shards(base, tmp_path, settings, teacher=teacher)
    merged = merge([shards[2], shards[0], shards[1]], tmp_path / "merged")
    for name in ("conversations.jsonl", "teacher_logprobs/index.json"):
        assert (tmp_path / "merged" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert {k: v for k, v in merged.items() if k not in TIMINGS} == {
        k: v for k, v in whole.items() if k not in TIMINGS
    }
    assert sum(whole["num_dropped"].values()) > 5
    assert whole["num_conversations"] > 5
    teachers = read_teacher(tmp_path / "merged" / "teacher_logprobs")
    assert teachers.num == 3


def test_what_is_missing_is_named(base: BaseModel, tmp_path: Path) -> None:
    shards = _shards(base, tmp_path, _settings(tmp_path))
    with pytest.raises(InputErrors, match=r"shard 1/3: not among the directories"):
        merge([shards[0], shards[2]], tmp_path / "merged")
    with pytest.raises(InputErrors, match=r"shard-0: holds shard 0/3, and so does .*shard-0"):
        merge([shards[0], shards[0] / ".", shards[1], shards[2]], tmp_path / "merged")
    manifest = merge([shards[0], shards[2]], tmp_path / "merged", allow_missing=True)
    assert manifest["num_missing_units"] == 2
    with pytest.raises(InputError, match=r"merged: holds a data set"):
        merge(shards, tmp_path / "merged")
    with pytest.raises(InputError, match=r"merged: holds a finished data set"):
        merge([tmp_path / "merged"], tmp_path / "other")
    with pytest.raises(InputError, match=r"holds no shard"):
        merge([tmp_path], tmp_path / "other")


def test_shards_of_other_generations_are_refused(base: BaseModel, tmp_path: Path) -> None:
    a = _shards(base, tmp_path / "a", _settings_in(tmp_path / "a", seed=0), num=2)
    b = _shards(base, tmp_path / "b", _settings_in(tmp_path / "b", seed=1), num=2)
    with pytest.raises(InputError, match=r"holds another generation \(seed 0 → 1\)|seed 1 → 0"):
        merge([a[0], b[1]], tmp_path / "merged")


def _settings_in(directory: Path, **changes: Any) -> DistillSettings:
    directory.mkdir()
    return _settings(directory, **changes)


def test_a_forgotten_output_costs_no_shard(base: BaseModel, tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    shards = _shards(base, tmp_path, settings)
    before = [file_hashes(shard) for shard in shards]
    for given in (shards, [*shards, shards[0]]):
        with pytest.raises(InputError, match=r"holds a shard .* directory of its own"):
            merge(given[:-1], given[-1], allow_missing=True)
    assert [file_hashes(shard) for shard in shards] == before


def test_shards_of_another_division_are_refused(base: BaseModel, tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    thirds = _shards(base, tmp_path, settings)
    [half] = _shards(base, tmp_path / "halves", settings, num=2)[:1]
    with pytest.raises(InputErrors, match=r"holds shard 0/2, and .*shard-0 is one of 3"):
        merge([*thirds, half], tmp_path / "merged")


def test_a_merge_of_unfinished_units_is_not_taken_for_the_whole(
    base: BaseModel, tmp_path: Path
) -> None:
    settings = _settings(tmp_path)
    shards = _shards(base, tmp_path, settings)
    merge(shards[:2], tmp_path / "so-far", allow_missing=True)
    with pytest.raises(InputError, match=r"so-far: holds what was merged before 2 of 7 units"):
        distill(base, settings=settings, output=tmp_path / "so-far")


def test_nothing_finished_is_said(base: BaseModel, tmp_path: Path) -> None:
    [shard] = _shards(base, tmp_path, _settings(tmp_path), num=1)
    (shard / "generation" / "journal.jsonl").write_bytes(b"")
    with pytest.raises(InputError, match=r"no unit is finished yet"):
        merge([shard], tmp_path / "merged", allow_missing=True)


@pytest.mark.parametrize(
    "content", ["{}", "[]", '{"generation": 3}', "x", "[" * 100_000, "1" * 5000]
)
def test_a_damaged_plan_is_named(base: BaseModel, tmp_path: Path, content: str) -> None:
    settings = _settings(tmp_path)
    [shard] = _shards(base, tmp_path, settings, num=1)
    (shard / "generation" / "plan.json").write_text(content)
    with pytest.raises(InputError, match=r"plan.json: not (the plan|valid JSON)"):
        merge([shard], tmp_path / "merged")
    with pytest.raises(InputError, match=r"plan.json: not (the plan|valid JSON)"):
        distill(base, settings=settings, output=shard, shard=Shard(0, 1))


def test_an_unfinished_shard_is_not_merged(base: BaseModel, tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    [shard] = _shards(base, tmp_path, settings, num=1)
    journal = shard / "generation" / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-10])
    with pytest.raises(InputError, match=r"1 of 7 units are not finished, the first is unit 6"):
        merge([shard], tmp_path / "merged")
    merge([shard], tmp_path / "merged", allow_missing=True)
    assert read_manifest(tmp_path / "merged")["num_missing_units"] == 1


def test_another_shard_in_the_same_directory_is_refused(base: BaseModel, tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    distill(base, settings=settings, output=tmp_path / "x", shard=Shard(0, 2))
    with pytest.raises(InputError, match=r"holds shard 0/2 of this generation, not shard 1/2"):
        distill(base, settings=settings, output=tmp_path / "x", shard=Shard(1, 2))
    with pytest.raises(InputError, match=r"not the whole"):
        distill(base, settings=settings, output=tmp_path / "x")


def test_a_shard_of_what_is_whole_already_is_refused(base: BaseModel, tmp_path: Path) -> None:
    settings = _settings(tmp_path)
    distill(base, settings=settings, output=tmp_path / "x")
    with pytest.raises(InputError, match=r"holds the whole of this generation, not shard 0/2"):
        distill(base, settings=settings, output=tmp_path / "x", shard=Shard(0, 2))


@pytest.mark.parametrize("name", ["manifest.json", ".lock", "generation/plan.json"])
def test_directories_in_the_place_of_files_are_named(
    base: BaseModel, tmp_path: Path, name: str
) -> None:
    (tmp_path / "x" / name).mkdir(parents=True)
    with pytest.raises(InputError, match=rf"{name}: cannot be .*: Is a directory"):
        distill(base, settings=_settings(tmp_path), output=tmp_path / "x")
