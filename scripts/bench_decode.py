"""How fast and how large decoding with heads is, on one machine in one run.

    python scripts/bench_decode.py --heads runs/smollm2-135m-hour/heads --prompts mt_bench.jsonl
    python scripts/bench_decode.py --memory-only [--json]

Speed is what ``medusa-eval speedup`` measures, greedily and one prompt at a time:
``speedup_vs_generate`` is against plain ``model.generate`` in its fastest dtype,
``speedup_vs_self`` against this package's decoder without heads.

Memory is the growth of the kernel's high-water mark of resident memory (Linux) over the loaded base
and heads, each time in a process of its own: the cache, the logits and what the passes need. A
prompt and 32 new tokens make up the length (fewer where the base ends the text). Ours is compared
with an engine that is written out below: its cache is allocated for all of
``max_position_embeddings`` at the start, and its prefill computes and keeps the logits of the base
and of every head at every position, as the published implementation does. Heads with a truncated
vocabulary have fewer logits; the published implementation has none such, so for them there is a
second ratio, ``…_full_vocabulary``, to an engine whose heads have whole rows. All run in the dtype
in which decoding with heads was fastest. Other work on the machine makes speeds worse, so compare
figures of one run; it does not change the memory.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from medusa_train.base_model.features import output_projection
from medusa_train.console import log, make_table, stderr
from medusa_train.errors import MedusaTrainError
from medusa_train.evaluate.speed_report import speedup_summary
from medusa_train.heads.checkpoint import read_spec
from medusa_train.heads.model import MedusaHeads
from medusa_train.host_memory import use_large_pages
from medusa_train.medusa_model import MedusaModel, read_tree
from medusa_train.plan.device import PeakMemory
from medusa_train.speed.measure import measure_speedup
from medusa_train.speed.options import SpeedupOptions

MIB = 2**20
ENGINES = ("ours", "preallocating", "full vocabulary")
DTYPES = ("float32", "bfloat16", "float16")


# --- memory -----------------------------------------------------------------------------------


class PreallocatedLayer(DynamicLayer):
    """One layer's keys and values in a buffer that is as long as the model's positions.

    Args:
        length: positions of the buffer.
    """

    def __init__(self, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = length
        self.buffers: list[Tensor] = []
        self.filled = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new states into the buffer; views of all that is filled."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            for states in (key_states, value_states):
                shape = [*states.shape[:2], self.length, states.shape[3]]
                # Filled, since memory that nobody has written is not resident.
                self.buffers.append(states.new_empty(shape).fill_(0))
        end = self.filled + key_states.shape[-2]
        for buffer, states in zip(self.buffers, (key_states, value_states), strict=True):
            buffer[:, :, self.filled : end].copy_(states)
        self.filled = end
        self.keys, self.values = (buffer[:, :, :end] for buffer in self.buffers)
        return self.keys, self.values


@torch.inference_mode()
def preallocating(
    model: MedusaModel,
    heads: MedusaHeads,
    ids: Tensor,
    *,
    num_tokens: int,
    full_vocabulary: bool = False,
) -> list[int]:
    """Greedy tokens by an engine that allocates for the longest text and keeps prefill logits.

    Args:
        model: the base.
        heads: in the dtype of the base.
        ids: [1, T] the prompt.
        num_tokens: to write.
        full_vocabulary: let each head have the logits of the base's whole ``lm_head``.
    """
    base: Any = model.base.model
    config = base.config.get_text_config(decoder=True)
    length = config.max_position_embeddings
    cache = Cache(layers=[PreallocatedLayer(length) for _ in range(config.num_hidden_layers)])
    weight, bias = output_projection(base)
    states: list[Tensor] = []
    hook = base.get_output_embeddings().register_forward_pre_hook(
        lambda _module, arguments: states.append(arguments[0])
    )
    logits = base(input_ids=ids, cache=cache, use_cache=True).logits
    hook.remove()
    head_logits = []
    for head in range(heads.config.num_heads):
        rows, shift = weight, bias
        if not full_vocabulary:
            rows, shift = heads.output_weight(head, lm_head_weight=weight, lm_head_bias=bias)
        trunk = heads.trunk(states[0], head=head)
        head_logits.append(torch.nn.functional.linear(trunk, rows, shift))
    tokens = [int(logits[0, -1].argmax())]
    while len(tokens) < num_tokens:
        last = torch.tensor([tokens[-1:]], device=ids.device)
        step = base(input_ids=last, cache=cache, use_cache=True).logits
        tokens.append(int(step[0, -1].argmax()))
    # What such an engine holds from its prefill to its end.
    del cache, logits, head_logits
    return tokens


def ours(model: MedusaModel, ids: Tensor, *, num_tokens: int) -> list[int]:
    """Greedy tokens by this package; fewer where the base ends the text."""
    written = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False
    )
    assert isinstance(written, Tensor)
    tokens: list[int] = written[0, ids.shape[1] :].tolist()
    return tokens


def run_memory(task: dict[str, Any]) -> dict[str, Any]:
    """The peak of one engine at one length, and what it wrote."""
    tree = None if task["tree"] is None else read_tree(Path(task["tree"]))
    model = MedusaModel.from_pretrained(
        task["heads"], task["base_model"], dtype=task["dtype"], tree=tree
    )
    heads = copy.deepcopy(model.heads).to(model.base.model.dtype)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, model.base.num_tokens, (1, task["length"]), generator=generator)
    prompt = drawn[:, : task["length"] - task["new_tokens"]].to(model.device)

    def write(ids: Tensor, *, num_tokens: int) -> list[int]:
        if task["engine"] == "ours":
            return ours(model, ids, num_tokens=num_tokens)
        return preallocating(
            model,
            heads,
            ids,
            num_tokens=num_tokens,
            full_vocabulary=task["engine"] == "full vocabulary",
        )

    if task["engine"] == "ours":
        write(prompt[:, :8], num_tokens=4)  # what is loaded or compiled on first use
    else:
        model.base.model(input_ids=prompt[:, :8])
    memory = PeakMemory()
    tokens = write(prompt, num_tokens=task["new_tokens"])
    return {"peak": memory.growth(), "tokens": tokens}


def memory_rows(options: argparse.Namespace, *, dtype: str) -> list[dict[str, Any]]:
    """Both engines at every length."""
    is_truncated = read_spec(options.heads)[0].truncated_vocab_size is not None
    rows = []
    for length in options.lengths:
        results = {
            engine: _child(
                {
                    "engine": engine,
                    "heads": str(options.heads),
                    "base_model": options.base_model,
                    "tree": None if options.tree is None else str(options.tree),
                    "dtype": dtype,
                    "length": length,
                    "new_tokens": options.new_tokens,
                }
            )
            for engine in (ENGINES if is_truncated else ENGINES[:2])
        }
        mine, others = (results[engine] for engine in ENGINES[:2])
        full = results.get("full vocabulary", others)
        rows.append(
            {
                "tokens": length,
                "ours": mine["peak"],
                "preallocating": others["peak"],
                "full_vocabulary": full["peak"],
                "ratio": mine["peak"] / others["peak"],
                "ratio_full_vocabulary": mine["peak"] / full["peak"],
                "same_text": mine["tokens"] == others["tokens"][: len(mine["tokens"])],
            }
        )
        peaks = ", ".join(f"{name} {found['peak'] / MIB:.0f}" for name, found in results.items())
        log(f"memory at {length} tokens, MiB: {peaks}")
    return rows


def _child(task: dict[str, Any]) -> dict[str, Any]:
    """Run one engine in a process of its own."""
    command = [sys.executable, __file__, "--child", json.dumps(task)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False, text=True)  # noqa: S603
    if done.returncode:
        sys.exit(f"{task['engine']}: ended with {done.returncode} (no memory?): {task}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


# --- the whole --------------------------------------------------------------------------------


def main() -> None:
    """Run what was asked for."""
    options = _options()
    use_large_pages()
    if options.child is not None:
        print(json.dumps(run_memory(json.loads(options.child))))
        return
    if min(options.lengths) <= options.new_tokens:
        sys.exit(f"--lengths: must be above --new-tokens {options.new_tokens}")
    try:
        report = None if options.memory_only else _speed(options)
    except MedusaTrainError as error:
        sys.exit("\n".join(f"error: {line}" for line in error.lines))
    dtype = options.memory_dtype or ("bfloat16" if report is None else report["medusa"]["dtype"])
    rows = memory_rows(options, dtype=dtype)
    summary: dict[str, Any] = {}
    if report is not None:
        summary = {
            "speedup_vs_generate": report["speedup"],
            "speedup_vs_self": report["speedup_vs_self"],
            "identical_outputs": report["identical_outputs"],
            "generate_dtype": report["baseline"]["dtype"],
            "medusa_dtype": report["medusa"]["dtype"],
        }
    for row in rows:
        name = f"peak_memory_ratio_{row['tokens']}"
        summary[name] = row["ratio"]
        summary[f"{name}_full_vocabulary"] = row["ratio_full_vocabulary"]
    summary["memory_dtype"] = dtype
    _print_memory(rows, dtype=dtype)
    if options.json:
        print(json.dumps({**summary, "memory": rows, "speedup": report}))
        return
    if report is not None:
        print(speedup_summary(report))
    for key, value in summary.items():
        if not isinstance(value, dict):
            print(f"{key}: {value if isinstance(value, str) else round(value, 3)}")


def _print_memory(rows: Sequence[dict[str, Any]], *, dtype: str) -> None:
    columns = ("tokens", "ours", "preallocating", "ratio", "full vocabulary", "ratio", "same text")
    cells = [
        (
            f"{row['tokens']:,}",
            f"{row['ours'] / MIB:.0f}",
            f"{row['preallocating'] / MIB:.0f}",
            f"{row['ratio']:.3f}",
            f"{row['full_vocabulary'] / MIB:.0f}",
            f"{row['ratio_full_vocabulary']:.3f}",
            row["same_text"],
        )
        for row in rows
    ]
    stderr().print(make_table(f"peak of cache and logits, MiB, {dtype}", columns, cells))


def _speed(options: argparse.Namespace) -> dict[str, Any]:
    return measure_speedup(
        options.heads,
        options=SpeedupOptions(
            prompts=options.prompts,
            num_prompts=options.num_prompts,
            max_new_tokens=options.max_new_tokens,
            base_model=options.base_model,
            dtypes=tuple(options.dtypes),
            tree=options.tree,
            compiled=options.compile,
            repeats=options.repeats,
            seed=options.seed,
            output=options.output,
        ),
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    heads = Path("runs/smollm2-135m-hour/heads")
    parser.add_argument("--heads", type=Path, default=heads, help=f"default: {heads}")
    parser.add_argument("--base-model", help="default: the one that the heads name")
    parser.add_argument("--prompts", type=Path, help="as for medusa-eval speedup")
    parser.add_argument("--tree", type=Path, help="JSON list of paths; none: the heads' own")
    parser.add_argument("--compile", action="store_true", help="as for medusa-eval speedup")
    parser.add_argument("--num-prompts", type=int, help="none: all")
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=())
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="also write the report of speed here")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 4096])
    parser.add_argument("--new-tokens", type=int, default=32, help="of each length of memory")
    parser.add_argument("--memory-dtype", choices=DTYPES, help="none: that of the heads' speed")
    parser.add_argument("--memory-only", action="store_true", help="no speed")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
