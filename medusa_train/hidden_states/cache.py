"""Hidden states computed once and read every epoch from memory-mapped shards.

Medusa-1 leaves the base as it is, so its states at the source positions of valid pairs are the same
in every epoch. A shard holds those of some consecutive conversations, in their order, as bf16; it
is written whole or not at all, and a cache that was interrupted goes on at its first missing shard.

Shapes: N source positions, D hidden, K heads.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from medusa_train.base_model.features import output_projection
from medusa_train.console import log, progress
from medusa_train.data.conversations import Conversation
from medusa_train.data.examples import valid_pairs
from medusa_train.errors import InputError
from medusa_train.hidden_states.online import Batch, length_batches, states_of_rows
from medusa_train.run_dir import atomic_path, read_json, write_json

SCHEMA_VERSION = 1
MANIFEST_FILE = "manifest.json"
STATES = "hidden_states"
SHARD_POSITIONS = 16_384
MAX_BATCH_TOKENS = 4_096


@dataclass(frozen=True, slots=True)
class Shard:
    """Consecutive conversations whose states lie in one file.

    Attributes:
        name: of the file.
        first: index of its first conversation.
        offsets: where each conversation's rows begin, and where the last one's end.
    """

    name: str
    first: int
    offsets: tuple[int, ...]


def build_cache(
    model: PreTrainedModel,
    conversations: Sequence[Conversation],
    *,
    directory: Path,
    fingerprint: str,
    with_last: bool = False,
) -> None:
    """Compute the states of all conversations that ``directory`` does not have yet.

    Args:
        model: the base.
        conversations: in the order in which the cache will be read.
        directory: of the cache.
        fingerprint: of the base, its dtype and the conversations; shards of another one are
            thrown away.
        with_last: with each span's last source position, as soft targets need it; a cache with
            them must have another fingerprint.
    """
    plan = plan_shards(conversations, with_last=with_last)
    total = sum(shard.offsets[-1] for shard in plan)
    num_bytes = total * output_projection(model)[0].shape[1] * 2
    log(f"hidden states: {total:,} positions, {num_bytes / 2**20:,.1f} MiB as bf16")
    _claim(directory, fingerprint)
    missing = [shard for shard in plan if not (directory / shard.name).exists()]
    done = total - sum(shard.offsets[-1] for shard in missing)
    with progress("hidden states", total, done=done) as bar:
        for shard in missing:
            rows = conversations[shard.first : shard.first + len(shard.offsets) - 1]
            states = _compute(model, rows, with_last=with_last)
            with atomic_path(directory / shard.name) as temporary:
                save_file({STATES: states}, temporary)
            bar.update(len(states), detail="positions")
    _write_manifest(directory, fingerprint, is_complete=True)


def plan_shards(conversations: Sequence[Conversation], *, with_last: bool = False) -> list[Shard]:
    """Which conversations go into which file; the same data gives the same plan."""
    shards: list[Shard] = []
    first, offsets = 0, [0]
    for index, row in enumerate(conversations):
        offsets.append(offsets[-1] + num_source_positions(row, with_last=with_last))
        if offsets[-1] >= SHARD_POSITIONS or index == len(conversations) - 1:
            shards.append(Shard(f"{len(shards):05d}.safetensors", first, tuple(offsets)))
            first, offsets = index + 1, [0]
    return shards


def num_source_positions(row: Conversation, *, with_last: bool = False) -> int:
    """Positions of a row with at least one valid pair, or also each span's last source position."""
    left_out = 0 if with_last else 1
    return sum(max(0, end - left_out - max(start, 1)) for start, end in row.assistant_spans)


def is_complete(directory: Path, *, fingerprint: str) -> bool:
    """Whether ``directory`` holds a whole cache with this fingerprint."""
    path = directory / MANIFEST_FILE
    if not path.exists():
        return False
    manifest = read_json(path)
    return bool(manifest.get("complete")) and manifest.get("fingerprint") == fingerprint


class CachedExamples(Dataset[dict[str, Tensor]]):
    """One conversation per item: ``hidden_states`` [N, D] and ``labels`` [N, K].

    The shards are mapped, not read: what fits stays in the page cache, the rest on disk.

    Args:
        conversations: those that the cache was built from, in their order.
        directory: of the cache.
        fingerprint: that the cache must have.
        num_heads: K.
        with_last: as the cache was built.

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
        self._plan = plan_shards(conversations, with_last=with_last)
        self._where = [
            (shard_index, shard.offsets[i], shard.offsets[i + 1])
            for shard_index, shard in enumerate(self._plan)
            for i in range(len(shard.offsets) - 1)
        ]
        self._open: dict[int, safe_open] = {}

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.conversations[index]
        shard, start, end = self._where[index]
        pairs = valid_pairs(row.input_ids, row.assistant_spans, num_heads=self.num_heads)
        pairs = pairs.trained(with_last=self.with_last)
        states: Tensor = self._shard(shard).get_slice(STATES)[start:end]  # type: ignore[no-untyped-call]
        return {"hidden_states": states, "labels": pairs.labels}

    def _shard(self, index: int) -> safe_open:
        if index not in self._open:
            path = self._directory / self._plan[index].name
            self._open[index] = safe_open(path, framework="pt")
        return self._open[index]


class CachedHiddenStates:
    """Reads the states that came with the batch."""

    def __call__(self, batch: Batch) -> Tensor:
        """[N, D], as the cache holds them."""
        return batch["hidden_states"]


def collate_cached(items: Sequence[Batch]) -> dict[str, Tensor]:
    """Concatenate: ``hidden_states`` [N, D] and ``labels`` [N, K]; nothing is padded."""
    return {key: torch.cat([item[key] for item in items]) for key in ("hidden_states", "labels")}


def _compute(model: PreTrainedModel, rows: Sequence[Conversation], *, with_last: bool) -> Tensor:
    """[N, D] bf16 states of the rows' source positions, in the order of the rows."""
    pairs = [valid_pairs(row.input_ids, row.assistant_spans, num_heads=1) for row in rows]
    positions = [pair.trained(with_last=with_last).positions for pair in pairs]
    # What stands behind the last source position is not needed, so it is not computed.
    needed = [
        row.input_ids[: int(index[-1]) + 1] if len(index) else row.input_ids[:1]
        for row, index in zip(rows, positions, strict=True)
    ]
    result: list[Tensor] = [torch.empty(0)] * len(rows)
    for batch in length_batches([len(ids) for ids in needed], max_tokens=MAX_BATCH_TOKENS):
        states = states_of_rows(
            model, [needed[i] for i in batch], positions=[positions[i] for i in batch]
        )
        for i, state in zip(batch, states, strict=True):
            result[i] = state.to(device="cpu", dtype=torch.bfloat16)
    return torch.cat(result)


def _claim(directory: Path, fingerprint: str) -> None:
    """Make ``directory`` a cache of ``fingerprint``; what another one left there is removed."""
    path = directory / MANIFEST_FILE
    if path.exists() and read_json(path).get("fingerprint") == fingerprint:
        return
    if directory.exists():
        shutil.rmtree(directory)
    _write_manifest(directory, fingerprint, is_complete=False)


def _write_manifest(directory: Path, fingerprint: str, *, is_complete: bool) -> None:
    write_json(
        directory / MANIFEST_FILE,
        {"schema_version": SCHEMA_VERSION, "fingerprint": fingerprint, "complete": is_complete},
    )
