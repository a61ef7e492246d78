"""A plan as tables for people: GiB, millions, hours."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from medusa_train.console import format_seconds, make_table
from medusa_train.plan.advice import GIB, gib
from medusa_train.plan.estimate import Estimate
from medusa_train.plan.memory import COMPONENTS, Memory, head_parameters

_LABELS = {
    "base_weights": "base: weights",
    "heads": "heads: weights",
    "gradients": "heads: gradients",
    "optimizer": "heads: optimizer",
    "gathered": "gathered",
    "hidden_states": "hidden states",
    "activations": "activations",
    "loss_chunk": "loss chunk",
    "base_forward": "base: one layer",
    "cache": "page cache",
}
_DISK = {
    "data": "data set",
    "hidden_states": "hidden states",
    "checkpoints": "checkpoints",
    "heads": "heads",
    "report": "report",
    "total": "total",
}


def plan_tables(estimate: Estimate) -> Iterator[Table | str]:
    """Tables and lines, in the order in which they are read."""
    heads, device = estimate.heads, estimate.device
    yield f"{estimate.recipe}: {estimate.base_model}, {device.count} × {device.name}"
    yield make_table(
        "parameters",
        ["", "number"],
        [
            ["base (frozen)", millions(estimate.base.num_parameters)],
            ["one head", millions(head_parameters(heads))],
            [
                f"{heads.num_heads} heads (trained)",
                millions(estimate.trainable - estimate.trained_base),
            ],
            *(
                [["of the base (trained)", millions(estimate.trained_base)]]
                if estimate.trained_base
                else []
            ),
        ],
    )
    yield _memory_table(estimate)
    process = gib(device.process_bytes)
    free = "unknown" if device.free_bytes is None else gib(device.free_bytes)
    yield f"free per device: {free}; Python and libraries on the host, not counted above: {process}"
    yield from _work_tables(estimate)
    rows = [[_DISK[name], gib(size)] for name, size in estimate.disk.as_dict().items()]
    yield make_table("disk", ["", "size"], rows)
    if estimate.free_disk is not None:
        yield f"free on the disk of the run directory: {gib(estimate.free_disk)}"


def _memory_table(estimate: Estimate) -> Table:
    columns: dict[str, Memory] = {}
    if estimate.caching is not None:
        columns["caching"] = estimate.caching
    columns.update({f"ZeRO-{n}": memory for n, memory in estimate.training.items()})
    rows = [
        [_LABELS[name], *(_size(getattr(memory, name)) for memory in columns.values())]
        for name in COMPONENTS
    ]
    rows = [row for row in rows if set(row[1:]) != {_size(0)}]
    rows.append(["at its most", *(_size(memory.total) for memory in columns.values())])
    title = f"memory per device in GiB; devices: {estimate.device.count}"
    return make_table(title, ["", *columns], rows)


def _work_tables(estimate: Estimate) -> Iterator[Table | str]:
    train, held_out, flops = estimate.train, estimate.held_out, estimate.flops
    yield (
        f"data: {train.conversations:,} conversations to train on, {train.tokens:,} tokens, "
        f"{train.pairs:,} pairs; {held_out.conversations:,} held out ({train.origin})"
    )
    times = estimate.times
    seconds = (
        ["–"] * 3
        if times is None
        else [format_seconds(s) for s in (times.caching, times.training, times.accuracy)]
    )
    work = [flops.caching, flops.epoch, flops.accuracy]
    labels = ["hidden-states", "train (operations: of one epoch)", "accuracy"]
    rows = [
        [label, f"{flop / 1e12:,.1f}", time]
        for label, flop, time in zip(labels, work, seconds, strict=True)
    ]
    yield make_table("work", ["stage", "TFLOP", "time"], rows)
    if times is not None:
        guessed = "; the base's part is a guess" if times.layer_is_guessed else ""
        yield (
            f"time: {times.num_steps:,} steps of {times.step:.2f} s, from a measurement on this "
            f"device{guessed}; loading and generation are not in it"
        )


def millions(count: int) -> str:
    """``134515008`` → ``134.5 M``."""
    return f"{count / 1e6:,.1f} M"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f}" if num_bytes else "–"
