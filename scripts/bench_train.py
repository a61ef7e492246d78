"""How fast head training is against the published loop, on one machine in one run.

    python scripts/bench_train.py [--data DATA] [--clock cpu] [--json]
    python scripts/bench_train.py --memory-table

Two epochs over the same conversations, K = 4, layout full, batches of 8 conversations:

- published: the base runs in every epoch over sequences padded to 512 tokens, all heads' logits are
  stacked, cross-entropy is taken on fp32 copies of the shifted logits. Written out below, in fp32
  and in bf16 (autocast); its fastest step, times the steps of two epochs.
- full: this package, hidden states computed once included, over the whole vocabulary.
- truncated: the same with ``heads.vocab_size: 8192``.

Each job runs in a process of its own. Memory is the growth of the kernel's high-water mark of
resident memory (Linux) over the loaded base, less the parameters of the heads and the optimizer's
state: what the loop itself needs, gradients included. Loading is not timed. ``kernel_share``: the
time of the loss's three products alone, in the chunks that it uses, over the time of the loss and
its backward. Other work on the machine makes every figure worse, so compare figures of one run;
``--clock cpu`` counts the processor time of all threads instead, where the machine is never idle.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from medusa_train.base_model.features import output_projection
from medusa_train.base_model.load import BaseModel, load_base_model
from medusa_train.console import log, make_table, stderr
from medusa_train.data.conversations import Conversation, read_conversations, write_dataset
from medusa_train.data.examples import pad_batch, supervised_labels
from medusa_train.evaluate.accuracy import num_accepted, walk
from medusa_train.evaluate.ranks import compute_ranks
from medusa_train.heads.model import MedusaHeads
from medusa_train.hidden_states.cache import build_cache
from medusa_train.hidden_states.shards import num_source_positions
from medusa_train.losses import (
    IGNORE,
    chunked_cross_entropy,
    default_chunk_size,
    head_weights,
    label_offset,
)
from medusa_train.plan.device import PeakMemory
from medusa_train.recipe.load import load_recipe
from medusa_train.stages import Workspace
from medusa_train.train.build import build_trainer

NUM_HEADS, EPOCHS, BATCH, PADDED_LENGTH, TRUNCATED = 4, 2, 8, 512, 8_192
DECAY, LEARNING_RATE = 0.8, 1e-3
TABLE_VOCAB, TABLE_HEADS, TABLE_HIDDEN = (32_000, 128_000, 256_000), (1, 5, 10), 64
MIB = 2**20
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


# --- the published loop -----------------------------------------------------------------------


class PublishedHeads(nn.Module):
    """K heads, each a residual block and a projection of its own, and their logits stacked."""

    def __init__(self, lm_head: Tensor) -> None:
        super().__init__()
        vocab_size, hidden_size = lm_head.shape
        self.blocks = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(NUM_HEADS))
        self.projections = nn.ModuleList(
            nn.Linear(hidden_size, vocab_size, bias=False) for _ in range(NUM_HEADS)
        )
        with torch.no_grad():
            for block, projection in zip(self.blocks, self.projections, strict=True):
                block.weight.zero_()
                block.bias.zero_()
                projection.weight.copy_(lm_head)

    def forward(self, states: Tensor) -> Tensor:
        """[B, T, D] → [K, B, T, V]."""
        return torch.stack(
            [
                projection(states + F.silu(block(states)))
                for block, projection in zip(self.blocks, self.projections, strict=True)
            ]
        )


def published_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Weighted cross-entropy of every head on fp32 copies of its shifted logits."""
    loss = logits.new_zeros((), dtype=torch.float32)
    for k, weight in enumerate(head_weights(NUM_HEADS, decay=DECAY)):
        shifted = logits[k, :, : -label_offset(k)].contiguous().float()
        targets = labels[:, label_offset(k) :].contiguous()
        loss = loss + weight * F.cross_entropy(shifted.flatten(0, 1), targets.flatten())
    return loss


def run_published(task: dict[str, Any]) -> dict[str, Any]:
    """Some steps of the published loop."""
    base = load_base_model(task["model"], dtype=task["dtype"])
    rows = read_conversations(Path(task["data"]))
    memory = PeakMemory()
    clock = CLOCKS[task["clock"]]
    heads = PublishedHeads(output_projection(base.model)[0].float())
    optimizer = torch.optim.AdamW(heads.parameters(), lr=LEARNING_RATE)
    seconds = []
    for step in range(task["steps"]):
        first = step * BATCH % (len(rows) - BATCH + 1)
        batch = rows[first : first + BATCH]
        begin = clock()
        ids, mask = pad_batch([row.input_ids for row in batch], pad_id=0, length=PADDED_LENGTH)
        labels = torch.stack(
            [
                supervised_labels(row.input_ids, row.assistant_spans, length=PADDED_LENGTH)
                for row in batch
            ]
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=task["dtype"] == "bfloat16"):
            with torch.inference_mode():
                states = base.model.base_model(input_ids=ids, attention_mask=mask)[0]
            loss = published_loss(heads(states.clone()), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(clock() - begin)
        log(f"published, {task['dtype']}: loss {loss.item():.3f}, {seconds[-1]:.1f} s a step")
    return {"seconds": min(seconds), "peak": memory.growth() - _held(heads, optimizer)}


def _held(heads: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the parameters and of the optimizer's state."""
    tensors = [*heads.parameters(), *heads.buffers()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


# --- ours -------------------------------------------------------------------------------------


def run_ours(task: dict[str, Any]) -> dict[str, Any]:
    """The whole job, as the stages do it, but without writing checkpoints."""
    clock = CLOCKS[task["clock"]]
    with tempfile.TemporaryDirectory() as directory:
        workspace = Workspace(load_recipe(_recipe(Path(directory), task)))
        base, data = workspace.base, workspace.data
        assert data.train_cache is not None
        memory = PeakMemory()
        begin = clock()
        build_cache(
            base.model,
            data.train,
            directory=data.train_cache.directory,
            fingerprint=data.train_cache.fingerprint,
        )
        cached = clock()
        trainer = build_trainer(
            workspace.recipe, base=base, data=data, run=workspace.run, run_name="bench"
        )
        trainer.fit()
        end = clock()
        heads = trainer.module.heads
        assert trainer.optimizer is not None
        result = {
            "seconds": end - begin,
            "cache_seconds": cached - begin,
            "peak": memory.growth() - _held(heads, trainer.optimizer),
        }
        if task["held_out"] is not None:
            rows = read_conversations(Path(task["held_out"]))
            result["acceptance_length"] = acceptance_length(base, heads, rows)
            batch = next(iter(trainer.get_train_dataloader()))
            result.update(kernel_share(heads, batch, clock=clock))
        return result


def _recipe(directory: Path, task: dict[str, Any]) -> Path:
    trainer = {
        "num_train_epochs": EPOCHS,
        "per_device_train_batch_size": BATCH,
        "learning_rate": LEARNING_RATE,
        "save_strategy": "no",
        "use_cpu": True,
    }
    recipe = {
        "base_model": {"name_or_path": task["model"], "dtype": "bfloat16"},
        "heads": {"num_heads": NUM_HEADS, "vocab_size": task["vocab_size"]},
        "data": {"path": task["data"], "eval_fraction": 0.0, "max_length": PADDED_LENGTH},
        "train": {"head_loss_decay": DECAY, "trainer": trainer},
        "run_dir": str(directory / "run"),
    }
    path = directory / "bench.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def acceptance_length(base: BaseModel, heads: MedusaHeads, rows: Sequence[Conversation]) -> float:
    """Tokens per step of a greedy chain, by the exact walk."""
    ranks = compute_ranks(base, heads, conversations=rows, top_k=1, metadata={})
    value = walk(num_accepted(ranks), ranks).value
    assert value is not None
    return value


def kernel_share(
    heads: MedusaHeads, batch: dict[str, Tensor], *, clock: Callable[[], float]
) -> dict[str, float]:
    """The loss of the first head over one batch against its three products alone.

    The products are of all columns: above 1, leaving some out saves more than the rest costs.
    """
    labels = heads.labels_to_rows(batch["labels"][:, 0], ignore=IGNORE)
    x = batch["hidden_states"][labels != IGNORE].float().requires_grad_()
    labels = labels[labels != IGNORE]
    weight, _ = heads.output_weight(0, lm_head_weight=torch.empty(0))
    weight = weight.detach().clone().requires_grad_()
    num_rows, (vocab_size, hidden_size), dtype = len(x), weight.shape, torch.bfloat16
    size = default_chunk_size(vocab_size)
    chunks = [chunk.to(dtype) for chunk in x.detach().split(size)]
    w, slopes = weight.detach().to(dtype), torch.randn(min(size, num_rows), vocab_size).to(dtype)

    def loss() -> None:
        weight.grad = x.grad = None
        chunked_cross_entropy(x, weight, labels=labels, compute_dtype=dtype).loss_sum.backward()

    def products() -> None:
        for chunk in chunks:
            slope = slopes[: len(chunk)]
            torch.mm(chunk, w.T)
            torch.mm(slope, w)
            torch.mm(slope.T, chunk)

    square = torch.randn(4096, 4096).to(dtype)
    functions = [loss, products, lambda: torch.mm(square, square)]
    whole, alone, peak = _medians(functions, repeats=5, clock=clock)
    flops = 6 * num_rows * vocab_size * hidden_size
    return {
        "kernel_share": alone / whole,
        "kernel_share_of_square": flops / whole / (2 * 4096**3 / peak),
        "products_share_of_square": flops / alone / (2 * 4096**3 / peak),
        "kernel_rows": num_rows,
        "kernel_gflops": flops / whole / 1e9,
    }


def _medians(
    functions: Sequence[Callable[[], object]], *, repeats: int, clock: Callable[[], float]
) -> list[float]:
    """Seconds of each, taken in turns, after one turn that is not counted."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats + 1):
        for function, taken in zip(functions, times, strict=True):
            begin = clock()
            function()
            taken.append(clock() - begin)
    return [statistics.median(taken[1:]) for taken in times]


# --- the memory of the loss alone -------------------------------------------------------------


def run_memory(task: dict[str, Any]) -> dict[str, Any]:
    """Peak memory of K losses over V logits, each with its backward, all gradients kept."""
    torch.manual_seed(0)
    vocab_size, num_heads, num_rows = task["vocab_size"], task["num_heads"], task["rows"]
    weights = [torch.randn(vocab_size, TABLE_HIDDEN).requires_grad_() for _ in range(num_heads)]
    x, labels = torch.randn(num_rows, TABLE_HIDDEN), torch.randint(0, vocab_size, (num_rows,))
    for size in (8, 8):  # the libraries' own buffers
        chunked_cross_entropy(
            x[:size], weights[0], labels=labels[:size], compute_dtype=torch.bfloat16
        ).loss_sum.backward()
        weights[0].grad = None
    memory = PeakMemory()
    for weight in weights:
        chunked_cross_entropy(
            x, weight, labels=labels, compute_dtype=torch.bfloat16
        ).loss_sum.backward()
    gradients = sum(weight.nbytes for weight in weights)
    return {"peak": memory.growth(), "gradients": gradients}


def memory_table(options: argparse.Namespace) -> None:
    """Print the table of the loss's memory."""
    cells = []
    for vocab_size in TABLE_VOCAB:
        for num_heads in TABLE_HEADS:
            task = {
                "method": "memory",
                "vocab_size": vocab_size,
                "num_heads": num_heads,
                "rows": options.rows,
            }
            cells.append({**task, **_child(task)})
    columns = ("V", "K", "peak MiB", "weight gradients", "the rest", "chunk of logits")
    rows = []
    for cell in cells:
        chunk = 2 * min(default_chunk_size(cell["vocab_size"]), options.rows) * cell["vocab_size"]
        figures = (cell["peak"], cell["gradients"], cell["peak"] - cell["gradients"], chunk)
        mib = [f"{figure / MIB:.0f}" for figure in figures]
        rows.append((f"{cell['vocab_size']:,}", cell["num_heads"], *mib))
    title = f"memory of the loss, {options.rows:,} positions, D = {TABLE_HIDDEN}"
    stderr().print(make_table(title, columns, rows))
    if options.json:
        print(json.dumps({"rows": options.rows, "hidden_size": TABLE_HIDDEN, "cells": cells}))


# --- the comparison ---------------------------------------------------------------------------


def compare(options: argparse.Namespace, directory: Path) -> None:
    """Run all methods and print the ratios."""
    train, held_out = _data(options, directory)
    rows = read_conversations(train)
    positions = EPOCHS * sum(map(num_source_positions, rows))
    steps = EPOCHS * -(-len(rows) // BATCH)
    shared = {"model": options.model, "data": str(train), "clock": options.clock}
    published = {
        dtype: _child(
            {**shared, "method": "published", "dtype": dtype, "steps": options.published_steps}
        )
        for dtype in ("float32", "bfloat16")
    }
    jobs: dict[str, list[dict[str, Any]]] = {"full": [], "truncated": []}
    for repeat in range(options.repeats):
        for name, vocab_size in (("full", None), ("truncated", TRUNCATED)):
            task = {**shared, "method": "ours", "vocab_size": vocab_size}
            jobs[name].append(_child({**task, "held_out": None if repeat else str(held_out)}))
    best = min(published, key=lambda dtype: published[dtype]["seconds"])
    seconds = {"published": steps * published[best]["seconds"]}
    peak = {"published": published[best]["peak"]}
    for name, results in jobs.items():
        seconds[name] = statistics.median(result["seconds"] for result in results)
        peak[name] = statistics.median(result["peak"] for result in results)
    first = {name: results[0] for name, results in jobs.items()}
    gain = {name: result["acceptance_length"] - 1 for name, result in first.items()}
    summary = {
        "ratio_full": seconds["published"] / seconds["full"],
        "memory_ratio_full": peak["full"] / peak["published"],
        "ratio_truncated": seconds["published"] / seconds["truncated"],
        "memory_ratio_truncated": peak["truncated"] / peak["published"],
        "acceptance_gain_ratio_truncated": gain["truncated"] / gain["full"],
        "kernel_share": first["full"]["kernel_share"],
        "kernel_share_of_square": first["full"]["kernel_share_of_square"],
        "products_share_of_square": first["full"]["products_share_of_square"],
        "kernel_share_truncated": first["truncated"]["kernel_share"],
        "published_dtype": best,
    }
    names = {"published": f"published, {best}: {steps} × its fastest of {options.published_steps}"}
    table = [
        (names.get(name, name), f"{seconds[name]:.1f}", f"{positions / seconds[name]:.0f}",
         f"{peak[name] / MIB:.0f}", f"{seconds['published'] / seconds[name]:.1f}")
        for name in seconds
    ]  # fmt: skip
    title = f"{len(rows)} conversations, {positions:,} positions in {EPOCHS} epochs"
    columns = ("method", "seconds", "positions/s", "peak MiB", "ratio")
    stderr().print(make_table(title, columns, table))
    if options.json:
        details = {"published": published, **jobs, "positions": positions}
        print(
            json.dumps(
                {
                    **summary,
                    "threads": torch.get_num_threads(),
                    "clock": options.clock,
                    "details": details,
                }
            )
        )
    else:
        for key, value in summary.items():
            print(f"{key}: {value if isinstance(value, str) else round(value, 3)}")


def _data(options: argparse.Namespace, directory: Path) -> tuple[Path, Path]:
    """The conversations to train on and those held out, as two data sets."""
    source, count = options.data, options.conversations + options.held_out
    if source is None:
        source = directory / "generated"
        flags = {
            "base-model": options.model,
            "dtype": "bfloat16",
            "num-prompts": 2 * count,
            "temperature": 0.3,
            "max-new-tokens": 192,
            "output": source,
        }
        arguments = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
        code = "from medusa_train.cli.distill import main; main()"
        subprocess.run([sys.executable, "-c", code, "generate", *arguments], check=True)  # noqa: S603
    rows = read_conversations(source)[:count]
    if len(rows) < count:
        sys.exit(f"{source}: holds {len(rows)} conversations, {count} are needed")
    sides = (rows[: options.conversations], rows[options.conversations :])
    paths = (directory / "train", directory / "held_out")
    for path, side in zip(paths, sides, strict=True):
        write_dataset(path, side, manifest={"chat_template_hash": None})
    return paths


def _child(task: dict[str, Any]) -> dict[str, Any]:
    """Run one task in a process of its own."""
    command = [sys.executable, __file__, "--child", json.dumps(task)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, text=True)  # noqa: S603
    if done.returncode:
        sys.exit(f"{task['method']}: ended with {done.returncode} (no memory?): {task}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Run what was asked for."""
    options = _options()
    if options.child is not None:
        task = json.loads(options.child)
        methods = {"published": run_published, "ours": run_ours, "memory": run_memory}
        print(json.dumps(methods[task["method"]](task)))
    elif options.memory_table:
        memory_table(options)
    else:
        with tempfile.TemporaryDirectory() as directory:
            compare(options, Path(directory))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--data", type=Path, help="data set directory; none: generated")
    parser.add_argument("--conversations", type=int, default=48)
    parser.add_argument("--held-out", type=int, default=24)
    parser.add_argument("--published-steps", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    parser.add_argument("--memory-table", action="store_true", help="the loss's memory alone")
    parser.add_argument("--rows", type=int, default=2048, help="positions of --memory-table")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
