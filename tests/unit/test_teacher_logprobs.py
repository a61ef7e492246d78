from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from medusa_train.data.teacher_logprobs import (
    INDEX_FILE,
    Arrays,
    TeacherShardWriter,
    decode,
    encode,
    num_bytes,
    read_teacher,
)
from medusa_train.errors import InputError
from tests.models_for_tests import file_hashes

LENGTHS = (4, 0, 7, 1, 12, 3)


def _rows(num: int = 3) -> dict[str, Arrays]:
    rng = np.random.default_rng(0)
    return {
        f"row-é{n}": (
            rng.integers(0, 50_000, (length, num)).astype(np.int32),
            -rng.random((length, num)).astype(np.float32),
        )
        for n, length in enumerate(LENGTHS)
    }


def _write(directory: Path, *, max_shard_bytes: int = 2**20) -> None:
    writer = TeacherShardWriter(directory, kind="top", num=3, max_shard_bytes=max_shard_bytes)
    for row_id, (token_ids, logprobs) in _rows().items():
        writer.add(row_id, token_ids=token_ids, logprobs=logprobs)
    writer.finish()


# All rows in one; several; each row for itself, since none fits.
@pytest.mark.parametrize(("limit", "num_shards"), [(2**20, 1), (num_bytes(12, 3), 3), (1, 6)])
def test_what_is_written_is_read(tmp_path: Path, limit: int, num_shards: int) -> None:
    _write(tmp_path / "t", max_shard_bytes=limit)
    assert len(list((tmp_path / "t").glob("*.safetensors"))) == num_shards
    reader = read_teacher(tmp_path / "t")
    assert (reader.kind, reader.num, len(reader), reader.num_tokens) == ("top", 3, 6, sum(LENGTHS))
    for (row_id, expected), length in reversed([*zip(_rows().items(), LENGTHS, strict=True)]):
        token_ids, logprobs = reader.of(row_id)
        assert token_ids.dtype == np.int32
        assert logprobs.dtype == np.float32
        assert np.array_equal(token_ids, expected[0])
        assert np.array_equal(logprobs, expected[1])
        assert reader.num_tokens_of(row_id) == length
        assert row_id in reader
    assert "other" not in reader
    with pytest.raises(InputError, match=r"no teacher log-probabilities of row 'other'"):
        reader.of("other")
    total = sum(path.stat().st_size for path in (tmp_path / "t").glob("*.safetensors"))
    assert 0 < total - num_bytes(sum(LENGTHS), 3) < 1_000 * num_shards


def test_equal_rows_are_equal_bytes_whatever_was_there(tmp_path: Path) -> None:
    _write(tmp_path / "a", max_shard_bytes=1)
    _write(tmp_path / "a", max_shard_bytes=200)
    _write(tmp_path / "b", max_shard_bytes=200)
    assert file_hashes(tmp_path / "a") == file_hashes(tmp_path / "b")


def test_no_rows_are_an_index_without_shards(tmp_path: Path) -> None:
    index = TeacherShardWriter(tmp_path, kind="samples", num=5).finish()
    assert (index["kind"], index["num_rows"], index["shards"]) == ("samples", 0, [])
    assert len(read_teacher(tmp_path)) == 0


def test_an_unfinished_directory_is_none(tmp_path: Path) -> None:
    """The index goes first and comes last, so a kill at any point leaves none."""
    _write(tmp_path, max_shard_bytes=1)
    writer = TeacherShardWriter(tmp_path, kind="top", num=3, max_shard_bytes=1)
    for row_id, (token_ids, logprobs) in _rows().items():
        writer.add(row_id, token_ids=token_ids, logprobs=logprobs)
    assert list(tmp_path.glob("*.safetensors"))
    with pytest.raises(InputError, match=r"index\.json: no such file"):
        read_teacher(tmp_path)


def test_wrong_rows_are_refused(tmp_path: Path) -> None:
    writer = TeacherShardWriter(tmp_path, kind="top", num=3)
    token_ids, logprobs = _rows()["row-é0"]
    writer.add("a", token_ids=token_ids, logprobs=logprobs)
    with pytest.raises(ValueError, match="'a' was added before"):
        writer.add("a", token_ids=token_ids, logprobs=logprobs)
    with pytest.raises(ValueError, match="3 entries per token needed, got 2"):
        writer.add("b", token_ids=token_ids[:, :2], logprobs=logprobs[:, :2])
    with pytest.raises(ValueError, match=r"two arrays \[T, N\] needed, got \(4, 3\) and \(2, 3\)"):
        writer.add("b", token_ids=token_ids, logprobs=logprobs[:2])


def test_broken_directories_are_refused(tmp_path: Path) -> None:
    _write(tmp_path, max_shard_bytes=num_bytes(12, 3))
    first, second = (tmp_path / f"0000{n}.safetensors" for n in (0, 1))
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    whole, other = first.read_bytes(), second.read_bytes()

    def refused(words: str) -> None:
        with pytest.raises(InputError, match=words):
            read_teacher(tmp_path)

    tensors = load_file(first)
    save_file({**tensors, "logprobs": tensors["logprobs"][1:]}, first)
    refused(r"00000\.safetensors: logprobs: must be F32 \[12, 3\], got F32 \[11, 3\]; generate")
    save_file({**tensors, "token_ids": tensors["token_ids"].astype(np.int64)}, first)
    refused(r"token_ids: must be I32 \[12, 3\], got I64 \[12, 3\]")
    save_file({"token_ids": tensors["token_ids"]}, first)
    refused("tensor 'logprobs' is missing")
    save_file(tensors, first)
    refused("not the shard that the index names")
    first.write_bytes(whole[:-5])
    refused(r"00000\.safetensors: cannot be read: ")
    first.unlink()
    refused(r"00000\.safetensors: no such file; generate the data again")
    first.write_bytes(other)
    twice = {**index, "shards": [{**index["shards"][1], "file": f.name} for f in (first, second)]}
    (tmp_path / INDEX_FILE).write_text(json.dumps(twice))
    refused(r"00001\.safetensors: row 'row-é4' is also in 00000\.safetensors")
    no_index, version = "is no index of teacher log-probabilities", "schema_version: must be 1, got"
    for text, words in (
        ('{"schema_version": 1}', no_index),
        (json.dumps({**index, "shards": [{"file": "x"}]}), no_index),
        ("[]", version),
        (json.dumps({**index, "schema_version": 2}), version),
    ):
        (tmp_path / INDEX_FILE).write_text(text)
        refused(words)


def test_a_shard_that_vanishes_later_is_named(tmp_path: Path) -> None:
    _write(tmp_path)
    reader = read_teacher(tmp_path)
    (tmp_path / "00000.safetensors").unlink()
    with pytest.raises(InputError, match=r"00000\.safetensors: no such file"):
        reader.of("row-é0")


@pytest.mark.parametrize("length", [0, 1, 5])
def test_a_row_as_text(length: int) -> None:
    rng = np.random.default_rng(1)
    token_ids = rng.integers(0, 2**31 - 1, (length, 4)).astype(np.int32)
    logprobs = np.log(rng.random((length, 4))).astype(np.float32)
    text = encode(token_ids, logprobs)
    assert text.isascii()
    assert json.loads(json.dumps(text)) == text
    back = decode(text, num=4)
    assert back[0].dtype == np.int32
    assert back[1].dtype == np.float32
    assert np.array_equal(back[0], token_ids)
    assert np.array_equal(back[1], logprobs)


def test_other_text_is_refused() -> None:
    with pytest.raises(ValueError, match="no base64 text"):
        decode("a?b", num=2)
    with pytest.raises(ValueError, match="8 bytes are not 2 entries per token"):
        decode(encode(np.zeros((1, 1), np.int32), np.zeros((1, 1), np.float32)), num=2)


def test_the_size_that_is_announced() -> None:
    assert num_bytes(1_000, 20) == 160_000
