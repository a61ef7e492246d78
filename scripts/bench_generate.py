"""How fast our generation loop is against ``model.generate``, on one machine in one run.

    python scripts/bench_generate.py [--model models/SmolLM2-135M-Instruct] [--json]

The prompts are the model's own (drawn from its template's user header with a fixed seed). Fixed
batches are searched over 16, 32, 64 and 128 rows in bfloat16 and float32, on as many prompts as
``--search-prompts`` (or one batch), and the best runs on all prompts; so does our loop, over the
row counts in ``--rows``, and one prompt at a time runs on a few. A row's tokens are those up to and
including its first stop token. Other work on the machine makes every figure worse, so compare
figures of one run only.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from medusa_train.base_model.load import BaseModel, load_base_model
from medusa_train.console import log, make_table, stderr
from medusa_train.data.chat import ChatTokenizer
from medusa_train.distill.in_process import InProcessEngine
from medusa_train.distill.settings import DistillSettings
from medusa_train.distill.user_turns import UserTurns
from medusa_train.distill.writer import Stopping

STATIC_ROWS = (16, 32, 64, 128)
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class Result:
    """One way to generate, and how fast it was."""

    method: str
    dtype: str
    rows: int
    prompts: int
    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Bench:
    """The prompts and what all methods share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.bases = {dtype: load_base_model(options.model, dtype=dtype) for dtype in DTYPES}
        base = self.bases["bfloat16"]
        assert base.tokenizer is not None
        self.chat = ChatTokenizer(base.tokenizer, stop_ids=base.stop_ids)
        self.results: list[Result] = []
        self.prompts = self._draw_prompts(base)

    def _draw_prompts(self, base: BaseModel) -> list[tuple[int, ...]]:
        """User turns that the model writes itself, rendered as prompts."""
        prompts: list[tuple[int, ...]] = []
        engine = InProcessEngine(base.model, vocab_size=self.chat.vocab_size, max_rows=128)
        settings = DistillSettings(max_prompt_tokens=128)
        turns = UserTurns(self.chat, settings)
        header = turns.header([])
        generator = torch.Generator().manual_seed(self.options.seed)
        while len(prompts) < self.options.prompts:
            answers = engine.generate(
                [header] * 128,
                sampling=settings.prompt_sampling,
                stopping=turns.stopping(len(header)),
                generator=generator,
            )
            read = [turns.read(answer) for answer in answers]
            texts = [text for text, fault in read if fault is None]
            if not texts:
                sys.exit(f"{self.options.model}: writes no usable prompts")
            for text in texts:
                ids = self.chat.encode_prompt([{"role": "user", "content": text}])
                prompts.append(tuple(ids))
        return prompts[: self.options.prompts]

    def ours(self, dtype: str, *, rows: int, prompts: Sequence[Sequence[int]]) -> Result:
        """Our loop, all prompts as one block."""
        engine = InProcessEngine(
            self.bases[dtype].model, vocab_size=self.chat.vocab_size, max_rows=rows
        )
        settings = DistillSettings(temperature=self.options.temperature)
        begin = time.perf_counter()
        answers = engine.generate(
            prompts,
            sampling=settings.answer_sampling,
            stopping=Stopping(self.chat.stop_ids, self.options.max_new_tokens),
            generator=torch.Generator().manual_seed(self.options.seed),
        )
        seconds = time.perf_counter() - begin
        tokens = sum(len(answer.token_ids) for answer in answers)
        return self._keep(Result("ours", dtype, rows, len(prompts), tokens, seconds))

    def library(self, dtype: str, *, rows: int, prompts: Sequence[Sequence[int]]) -> Result:
        """``model.generate`` on fixed batches of ``rows``, in the order of the prompts."""
        torch.manual_seed(self.options.seed)
        begin, tokens = time.perf_counter(), 0
        for first in range(0, len(prompts), rows):
            tokens += self._generate(self.bases[dtype].model, prompts[first : first + rows])
        seconds = time.perf_counter() - begin
        method = "model.generate" if rows > 1 else "one at a time"
        return self._keep(Result(method, dtype, rows, len(prompts), tokens, seconds))

    def _generate(self, model: Any, prompts: Sequence[Sequence[int]]) -> int:
        width = max(map(len, prompts))
        pad = self.chat.tokenizer.pad_token_id or 0
        ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        sampling = (
            {"do_sample": True, "temperature": self.options.temperature, "top_k": 0, "top_p": 1.0}
            if self.options.temperature
            else {"do_sample": False}
        )
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=self.options.max_new_tokens,
                eos_token_id=sorted(self.chat.stop_ids),
                pad_token_id=pad,
                **sampling,
            )
        return sum(self._length(row) for row in output[:, width:].tolist())

    def _length(self, row: Sequence[int]) -> int:
        stops = (place for place, token in enumerate(row, 1) if token in self.chat.stop_ids)
        return next(stops, len(row))

    def _keep(self, result: Result) -> Result:
        self.results.append(result)
        log(
            f"{result.method}, {result.dtype}, {result.rows} rows: {result.tokens} tokens in "
            f"{result.seconds:.1f} s, {result.rate:.0f} tokens/s"
        )
        return result


def main() -> None:
    """Run the comparison and print it."""
    options = _options()
    bench = Bench(options)
    lengths = sorted(map(len, bench.prompts))
    log(f"{len(lengths)} prompts of {lengths[0]} to {lengths[-1]} tokens")
    some = bench.prompts[: options.search_prompts]
    bench.ours("bfloat16", rows=len(some), prompts=some)  # warms up what is loaded on first use
    bench.results.clear()
    single = max(
        (bench.library(dtype, rows=1, prompts=some[: options.single_prompts]) for dtype in DTYPES),
        key=lambda result: result.rate,
    )
    searched = [
        bench.library(dtype, rows=rows, prompts=bench.prompts[: max(rows, len(some))])
        for dtype in options.search_dtypes
        for rows in options.search_rows
    ]
    best = max(searched, key=lambda result: result.rate)
    static = bench.library(best.dtype, rows=best.rows, prompts=bench.prompts)
    ours = max(
        (bench.ours(options.dtype, rows=rows, prompts=bench.prompts) for rows in options.rows),
        key=lambda result: result.rate,
    )
    ratios = {
        "ratio_vs_static_batch": round(ours.rate / static.rate, 2),
        "ratio_vs_single": round(ours.rate / single.rate, 2),
    }
    columns = ("method", "dtype", "rows", "prompts", "tokens", "seconds", "tokens/s")
    rows = [
        (r.method, r.dtype, r.rows, r.prompts, r.tokens, f"{r.seconds:.1f}", f"{r.rate:.0f}")
        for r in bench.results
    ]
    stderr().print(make_table(f"generation on {torch.get_num_threads()} threads", columns, rows))
    if options.json:
        results = [{**asdict(r), "tokens_per_second": round(r.rate, 1)} for r in bench.results]
        print(json.dumps({**ratios, "threads": torch.get_num_threads(), "results": results}))
    else:
        print(
            f"ours: {ratios['ratio_vs_static_batch']} × the best fixed batch, "
            f"{ratios['ratio_vs_single']} × one at a time"
        )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--search-prompts", type=int, default=64)
    parser.add_argument("--search-rows", type=int, nargs="+", default=STATIC_ROWS)
    parser.add_argument("--search-dtypes", choices=DTYPES, nargs="+", default=DTYPES)
    parser.add_argument("--single-prompts", type=int, default=8)
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser.parse_args()


if __name__ == "__main__":
    main()
