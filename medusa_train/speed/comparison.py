"""The runs of one speed measurement, in order: dtypes, equal output, time, batches."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from medusa_train.console import ProgressReporter, progress
from medusa_train.evaluate.equality import (
    Difference,
    classify,
    equality_report,
    first_difference,
)
from medusa_train.evaluate.speedup import (
    BASELINE,
    MEDUSA,
    SELF,
    WAYS,
    Sample,
    Timing,
    break_even,
    median_timing,
    speedup_figures,
)
from medusa_train.speed.options import SpeedupOptions
from medusa_train.speed.prompts import Prompt
from medusa_train.speed.ways import Ways

_COMPARED = (BASELINE, MEDUSA)


class Comparison:
    """Plain decoding against decoding with heads, on the same prompts.

    Args:
        ways: of decoding, by dtype.
        prompts: at least one.
        options: how.
    """

    def __init__(
        self, ways: Mapping[str, Ways], prompts: Sequence[Prompt], options: SpeedupOptions
    ) -> None:
        self.ways = ways
        self.prompts = prompts
        self.options = options
        self.order = random.Random(options.seed)

    def report(self) -> dict[str, Any]:
        """What was measured."""
        if self.options.num_probe and len(self.ways) > 1:
            dtypes = self._probe()
            best = {way: _fastest(dtypes, way) for way in _COMPARED}
            identical = self._equality(best[MEDUSA])
            runs = self._timed([(best[BASELINE], BASELINE), *_ours(best[MEDUSA])])
        else:
            equal = {dtype: self._equality(dtype) for dtype in self.ways}
            whole = self._timed(
                [(dtype, way) for dtype in self.ways for way in (BASELINE, SELF, MEDUSA)]
            )
            dtypes = [
                {**_tried(dtype, whole, of=_COMPARED), "identical_outputs": equal[dtype]}
                for dtype in self.ways
            ]
            best = {way: _fastest(dtypes, way) for way in _COMPARED}
            identical = equal[best[MEDUSA]]
            kept = {(best[BASELINE], BASELINE), *_ours(best[MEDUSA])}
            runs = {key: timings for key, timings in whole.items() if key in kept}
        timings = {way: found for (_, way), found in runs.items()}
        figures = speedup_figures(
            timings,
            categories=[prompt.category for prompt in self.prompts],
            num_bootstrap=self.options.num_bootstrap,
            seed=self.options.seed,
        )
        for dtype, way in runs:
            figures[way] = {"dtype": dtype, **figures[way]}
        batches = self._batches()
        return {
            "identical_outputs": identical,
            **figures,
            "dtypes": dtypes,
            "batch_sizes": batches,
            "break_even_batch_size": break_even(batches),
            "per_prompt": [
                {"category": prompt.category, "prompt_tokens": len(prompt.ids)}
                | {way: _of_prompt(timings[way][i]) for way in WAYS}
                for i, prompt in enumerate(self.prompts)
            ],
        }

    def _probe(self) -> list[dict[str, Any]]:
        """Both sides in every dtype on a few prompts, evenly taken from all."""
        count = min(self.options.num_probe, len(self.prompts))
        taken = [i * len(self.prompts) // count for i in range(count)]
        keys = [(dtype, way) for dtype in self.ways for way in _COMPARED]
        runs = self._timed(keys, places=taken, repeats=1, doing="trying dtypes")
        return [
            {**_tried(dtype, runs, of=_COMPARED), "identical_outputs": None} for dtype in self.ways
        ]

    def _equality(self, dtype: str) -> dict[str, Any]:
        """Plain decoding against decoding with heads, in one dtype, on every prompt."""
        ways = self.ways[dtype]
        differences: list[Difference] = []
        with progress(f"equal output, {dtype}", len(self.prompts)) as bar:
            for number, prompt in enumerate(self.prompts):
                [plain], [ours] = (ways.run(way, [prompt.ids]).answers for way in _COMPARED)
                position = first_difference(plain, ours)
                if position is not None:
                    differences.append(
                        classify(
                            number,
                            position=position,
                            plain=plain,
                            ours=ours,
                            logits=ways.logits_after([*prompt.ids, *plain[:position]]),
                            dtype=ways.model.base.model.dtype,
                        )
                    )
                bar.update(1, detail=f"{number + 1 - len(differences)} identical")
        return equality_report(differences, num_prompts=len(self.prompts), dtype=dtype)

    def _timed(
        self,
        keys: Sequence[tuple[str, str]],
        *,
        places: Sequence[int] | None = None,
        repeats: int | None = None,
        doing: str = "timing",
    ) -> dict[tuple[str, str], list[Timing]]:
        """Every way (dtype, name) on every prompt, the ways of a prompt in an order of chance."""
        places = range(len(self.prompts)) if places is None else places
        repeats = self.options.repeats if repeats is None else repeats
        result: dict[tuple[str, str], list[Timing]] = {key: [] for key in keys}
        total = len(keys) * (len(places) * repeats + self.options.warmup)
        with progress(doing, total) as bar:
            for _ in range(self.options.warmup):
                for key in keys:
                    self._run(key, places[0], bar)
            for place in places:
                found: dict[tuple[str, str], list[Timing]] = {key: [] for key in keys}
                for key in self._interleaved(keys, repeats):
                    found[key].append(self._run(key, place, bar))
                for key, timings in found.items():
                    result[key].append(median_timing(timings))
        return result

    def _interleaved(
        self, keys: Sequence[tuple[str, str]], repeats: int
    ) -> Iterator[tuple[str, str]]:
        for _ in range(repeats):
            yield from self.order.sample(keys, len(keys))

    def _run(self, key: tuple[str, str], place: int, bar: ProgressReporter) -> Timing:
        dtype, way = key
        timing = self.ways[dtype].run(way, [self.prompts[place].ids]).timing
        bar.update(1, detail=f"{timing.num_tokens / timing.seconds:.1f} tokens/s")
        return timing

    def _batches(self) -> list[dict[str, Any]]:
        """The same prompts in batches of each size, the fastest dtype of each side."""
        sizes = self.options.batch_sizes
        if not sizes:
            return []
        prompts = [prompt.ids for prompt in self.prompts[: max(sizes)]]
        keys = [(dtype, way) for dtype in self.ways for way in _COMPARED]
        rows = []
        calls = sum(-(-len(prompts) // size) for size in sizes)
        with progress("batches", calls * len(keys)) as bar:
            for size in sizes:
                found: dict[tuple[str, str], list[Timing]] = {key: [] for key in keys}
                for first in range(0, len(prompts), size):
                    for key in self._interleaved(keys, 1):
                        run = self.ways[key[0]].run(key[1], prompts[first : first + size])
                        found[key].append(run.timing)
                        bar.update(1, detail=f"batch of {size}")
                rows.append(_batch_row(size, found))
        return rows


def _ours(dtype: str) -> list[tuple[str, str]]:
    return [(dtype, SELF), (dtype, MEDUSA)]


def _tried(
    dtype: str, runs: Mapping[tuple[str, str], Sequence[Timing]], *, of: Sequence[str]
) -> dict[str, Any]:
    rates = {f"{way}_tokens_per_second": Sample(runs[dtype, way]).rate.value for way in of}
    return {"dtype": dtype, "num_prompts": len(runs[dtype, of[0]]), **rates}


def _fastest(dtypes: Sequence[Mapping[str, Any]], way: str) -> str:
    best = max(dtypes, key=lambda row: row[f"{way}_tokens_per_second"])
    dtype: str = best["dtype"]
    return dtype


def _of_prompt(timing: Timing) -> dict[str, Any]:
    return {
        "num_tokens": timing.num_tokens,
        "num_steps": timing.num_steps,
        "seconds": timing.seconds,
        "prefill_seconds": timing.prefill_seconds,
    }


def _batch_row(size: int, runs: Mapping[tuple[str, str], Sequence[Timing]]) -> dict[str, Any]:
    best: dict[str, tuple[float, str]] = {}
    for (dtype, way), timings in runs.items():
        rate = Sample(timings).rate.value or 0.0
        best[way] = max(best.get(way, (0.0, dtype)), (rate, dtype))
    medusa = Sample(runs[best[MEDUSA][1], MEDUSA])
    return {
        "batch_size": size,
        "num_prompts": sum(timing.num_rows for timing in runs[best[MEDUSA][1], MEDUSA]),
        **{way: {"dtype": dtype, "tokens_per_second": rate} for way, (rate, dtype) in best.items()},
        "speedup": best[MEDUSA][0] / best[BASELINE][0],
        "acceptance_length": medusa.length.value,
    }
