"""What denormal numbers cost the softmax of sampling, with and without the clamp.

    python scripts/bench_sampling.py

Prints medians in milliseconds over logits like a language model's, and the ratio to no clamp.
"""

from __future__ import annotations

import statistics
import time

import torch

from medusa_train.distill.sampling import MIN_EXPONENT

ROWS, VOCAB, REPEATS = 128, 49_152, 15


def main() -> None:
    """Time ``exp`` at several temperatures."""
    torch.manual_seed(0)
    logits = torch.randn(ROWS, VOCAB) * 4
    logits -= logits.amax(dim=1, keepdim=True)
    print(f"exp over [{ROWS}, {VOCAB}], median of {REPEATS}, {torch.get_num_threads()} threads")
    for temperature in (1.0, 0.7, 0.3):
        plain, clamped = (_median(logits / temperature, clamp=clamp) for clamp in (False, True))
        print(
            f"T = {temperature}: {plain:6.1f} ms plain, {clamped:6.1f} ms clamped, "
            f"ratio {plain / clamped:.1f}"
        )


def _median(exponents: torch.Tensor, *, clamp: bool) -> float:
    times = []
    for _ in range(REPEATS):
        space = exponents.clone()
        begin = time.perf_counter()
        if clamp:
            space.clamp_(min=MIN_EXPONENT)
        space.exp_()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


if __name__ == "__main__":
    main()
