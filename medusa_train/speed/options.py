"""How a speed is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class SpeedupOptions:
    """How speed is measured.

    Attributes:
        prompts: a file; None for what the run of the heads held out, or else a few of ours.
        num_prompts: the first so many; None for all.
        max_new_tokens: most tokens of an answer.
        base_model: hub id or directory; None for the one that the heads name.
        dtypes: that the base is tried in; the fastest is taken for each side. Empty for float32 and
            bfloat16 on a CPU, where either may win, and bfloat16 elsewhere.
        tree: file of the candidates; None for the tree of the heads, else the top-1 chain.
        compiled: compile the steps of this package's decoder, with heads and without.
        chat_template: path or text; None for the tokenizer's own.
        num_probe: prompts on which dtypes are tried; 0 measures every dtype on all prompts.
        repeats: timed runs of each prompt, of which the median counts.
        warmup: runs of each way, on the first prompt, that are not counted.
        batch_sizes: further batches to measure; empty for none.
        num_bootstrap: resamples of the prompts for the intervals.
        seed: of the order of the runs and of the resampling.
        output: directory of the report; None writes none.
    """

    prompts: Path | None = None
    num_prompts: int | None = None
    max_new_tokens: int = 192
    base_model: str | None = None
    dtypes: tuple[str, ...] = ()
    tree: Path | None = None
    compiled: bool = False
    chat_template: str | None = None
    num_probe: int = 4
    repeats: int = 1
    warmup: int = 1
    batch_sizes: tuple[int, ...] = ()
    num_bootstrap: int = 1000
    seed: int = 0
    output: Path | None = None
