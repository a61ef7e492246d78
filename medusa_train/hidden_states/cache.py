"""Hidden states computed once and read every epoch from shards on disk and in RAM.

Medusa-1 leaves the base as it is, so its states at the source positions of valid pairs are the same
in every epoch. A shard holds those of some consecutive conversations, in their order, as bf16 or
int8; it is written whole or not at all, and a cache that was interrupted goes on at its first
missing shard.

Shapes: N source positions, D hidden, K heads.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from medusa_train.base_model.features import output_projection
from medusa_train.console import log, progress
from medusa_train.data.conversations import Conversation
from medusa_train.data.examples import valid_pairs
from medusa_train.errors import InputError, MedusaTrainError
from medusa_train.hidden_states.online import Batch, length_batches, states_of_rows
from medusa_train.hidden_states.quantised import dequantise_rows
from medusa_train.hidden_states.reading import ShardReader, num_kept, read_ahead
from medusa_train.hidden_states.shards import (
    SCALES,
    STATES,
    TENSORS,
    Shard,
    StatesDtype,
    encode,
    plan_shards,
    row_bytes,
)
from medusa_train.host_memory import freed_memory_kept
from medusa_train.json_values import read_json
from medusa_train.run_dir import atomic_path, write_json

SCHEMA_VERSION = 1
MANIFEST_FILE = "manifest.json"
MAX_BATCH_TOKENS = 4_096


def build_cache(
    model: PreTrainedModel,
    conversations: Sequence[Conversation],
    *,
    directory: Path,
    fingerprint: str,
    dtype: StatesDtype = "bfloat16",
    with_last: bool = False,
    process_index: int = 0,
    num_processes: int = 1,
    wait: Callable[[], None] = lambda: None,
) -> None:
    """Compute the states of all conversations that ``directory`` does not have yet.

    Several processes that see one directory share the shards: each calls this with the same
    arguments and its own index, and all return when the cache is whole.

    Args:
        model: the base.
        conversations: in the order in which the cache will be read.
        directory: of the cache.
        fingerprint: of the base, its dtype, the conversations and ``dtype``; shards of another
            one are thrown away.
        dtype: of the states in the cache; int8 has a scale for each row.
        with_last: with each span's last source position, as soft targets need it; a cache with
            them must have another fingerprint.
        process_index: which of the processes this is, from 0.
        num_processes: how many share the work.
        wait: returns when all processes have called it as often.

    Raises:
        MedusaTrainError: a file cannot be written, or the processes do not share the directory.
    """
    plan = plan_shards(conversations, with_last=with_last)
    num_positions = sum(shard.num_positions for shard in plan)
    log(f"hidden states: {num_positions:,} positions, {_sizes(model, num_positions, dtype=dtype)}")
    if process_index == 0:
        _claim(directory, fingerprint, dtype=dtype)
    wait()
    mine = plan[process_index::num_processes]
    missing = [shard for shard in mine if not (directory / shard.name).exists()]
    total, left = (sum(shard.num_positions for shard in shards) for shards in (mine, missing))
    with freed_memory_kept(), progress("hidden states", total, done=total - left) as bar:
        for shard in missing:
            rows = conversations[shard.first : shard.first + len(shard.offsets) - 1]
            tensors = _compute(model, rows, dtype=dtype, with_last=with_last)
            with atomic_path(directory / shard.name) as temporary:
                save_file(tensors, temporary)
            bar.update(shard.num_positions, detail="positions")
    wait()
    if process_index == 0:
        _check_shards(directory, plan)
        _write_manifest(directory, fingerprint, dtype=dtype, is_complete=True)
    wait()


def is_complete(directory: Path, *, fingerprint: str) -> bool:
    """Whether ``directory`` holds a whole cache with this fingerprint."""
    path = directory / MANIFEST_FILE
    if not path.exists():
        return False
    manifest = read_json(path)
    return bool(manifest.get("complete")) and manifest.get("fingerprint") == fingerprint


class CachedExamples(Dataset[dict[str, Tensor]]):
    """One conversation per item: ``hidden_states`` [N, D] and ``labels`` [N, K].

    States that are int8 come as they are, with their ``scales`` [N]: half the bytes to move.
    The first shards are brought into RAM as far as the budget goes, in one copy for all processes
    of a machine. The other rows are read from disk each time.

    Args:
        conversations: those that the cache was built from, in their order.
        directory: of the cache.
        fingerprint: that the cache must have.
        num_heads: K.
        with_last: as the cache was built.
        ram_bytes: budget of RAM.

    Attributes:
        kept_bytes: what of the budget is used.

    Raises:
        InputError: the cache is not whole, or of another base, dtype or data set.
    """

    def __init__(
        self,
        conversations: Sequence[Conversation],
        *,
        directory: Path,
        fingerprint: str,
        num_heads: int,
        with_last: bool = False,
        ram_bytes: int,
    ) -> None:
        if not is_complete(directory, fingerprint=fingerprint):
            raise InputError(
                f"{directory}: holds no complete hidden states of this base model, dtype and data; "
                "run the stage hidden-states again"
            )
        self.conversations = conversations
        self.num_heads = num_heads
        self.with_last = with_last
        self._directory = directory
        self._names = TENSORS[read_json(directory / MANIFEST_FILE).get("dtype", "bfloat16")]
        self._plan = plan_shards(conversations, with_last=with_last)
        self._where = [
            (shard_index, shard.offsets[i], shard.offsets[i + 1])
            for shard_index, shard in enumerate(self._plan)
            for i in range(len(shard.offsets) - 1)
        ]
        self._open: dict[int, ShardReader] = {}
        paths = [directory / shard.name for shard in self._plan]
        sizes = [path.stat().st_size for path in paths]
        self._num_kept = num_kept(sizes, ram_bytes=ram_bytes)
        self.kept_bytes = sum(sizes[: self._num_kept])
        read_ahead(paths[: self._num_kept])
        if self._num_kept < len(paths):
            left = (sum(sizes) - self.kept_bytes) / 2**20
            log(f"hidden states: {left:,.0f} MiB are beyond the budget of RAM, read from disk")

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.conversations[index]
        shard, start, end = self._where[index]
        pairs = valid_pairs(row.input_ids, row.assistant_spans, num_heads=self.num_heads)
        pairs = pairs.trained(with_last=self.with_last)
        reader = self._reader(shard)
        states = {name: reader.rows(name, start, end) for name in self._names}
        return {**states, "labels": pairs.labels}

    def _reader(self, index: int) -> ShardReader:
        if index not in self._open:
            path = self._directory / self._plan[index].name
            self._open[index] = ShardReader(path, is_kept=index < self._num_kept)
        return self._open[index]


class CachedHiddenStates:
    """Reads the states that came with the batch."""

    def __call__(self, batch: Batch) -> Tensor:
        """[N, D] bf16, or fp32 from int8."""
        states = batch[STATES]
        return dequantise_rows(states, batch[SCALES]) if SCALES in batch else states


def collate_cached(items: Sequence[Batch]) -> dict[str, Tensor]:
    """Concatenate: ``hidden_states`` [N, D] and ``labels`` [N, K]; nothing is padded."""
    return {key: torch.cat([item[key] for item in items]) for key in items[0]}


def _sizes(model: PreTrainedModel, num_positions: int, *, dtype: StatesDtype) -> str:
    """``1.0 MiB as int8 (2.0 MiB as bfloat16)``: what is written, and what the other would be."""
    other: StatesDtype = "int8" if dtype == "bfloat16" else "bfloat16"
    hidden_size = output_projection(model)[0].shape[1]
    size, instead = (
        f"{num_positions * row_bytes(hidden_size, dtype=name) / 2**20:,.1f} MiB as {name}"
        for name in (dtype, other)
    )
    return f"{size} ({instead})"


def _compute(
    model: PreTrainedModel, rows: Sequence[Conversation], *, dtype: StatesDtype, with_last: bool
) -> dict[str, Tensor]:
    """The tensors of a shard: states of the rows' source positions, in the order of the rows."""
    pairs = [valid_pairs(row.input_ids, row.assistant_spans, num_heads=1) for row in rows]
    positions = [pair.trained(with_last=with_last).positions for pair in pairs]
    # What stands behind the last source position is not needed, so it is not computed.
    needed = [
        row.input_ids[: int(index[-1]) + 1] if len(index) else row.input_ids[:1]
        for row, index in zip(rows, positions, strict=True)
    ]
    result: list[dict[str, Tensor]] = [{}] * len(rows)
    for batch in length_batches([len(ids) for ids in needed], max_tokens=MAX_BATCH_TOKENS):
        states = states_of_rows(
            model, [needed[i] for i in batch], positions=[positions[i] for i in batch]
        )
        for i, state in zip(batch, states, strict=True):
            result[i] = encode(state, dtype=dtype)
    return {name: torch.cat([tensors[name] for tensors in result]) for name in TENSORS[dtype]}


def _check_shards(directory: Path, plan: Sequence[Shard]) -> None:
    missing = [shard.name for shard in plan if not (directory / shard.name).exists()]
    if missing:
        raise MedusaTrainError(
            f"{directory}: {missing[0]} of another process is not here; all processes need the "
            "same directory, so give a run_dir that every machine sees"
        )


def _claim(directory: Path, fingerprint: str, *, dtype: StatesDtype) -> None:
    """Make ``directory`` a cache of ``fingerprint``; what another one left there is removed."""
    path = directory / MANIFEST_FILE
    if path.exists() and read_json(path).get("fingerprint") == fingerprint:
        return
    if directory.exists():
        shutil.rmtree(directory)
    _write_manifest(directory, fingerprint, dtype=dtype, is_complete=False)


def _write_manifest(
    directory: Path, fingerprint: str, *, dtype: StatesDtype, is_complete: bool
) -> None:
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "fingerprint": fingerprint,
        "dtype": dtype,
        "complete": is_complete,
    }
    write_json(directory / MANIFEST_FILE, manifest)
