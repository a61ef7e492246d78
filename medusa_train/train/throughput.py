"""How fast a run trains: positions and pairs per second, utilisation of the device, and memory.

Nothing here waits for the device while it works: times are taken where the log reads it anyway.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from medusa_train.heads.config import HeadsConfig
from medusa_train.losses import IGNORE

MIB = 2**20
GEMM_SIZES = (256, 512, 1024, 2048, 4096)
MAX_CPU_GEMM = 2048
LONG_GEMM_SECONDS = 0.05


class Throughput(TrainerCallback):
    """Counts what goes through the loss, and the time that training takes for it.

    The clock starts at the first step, and stands still while the Trainer evaluates and saves.

    Args:
        config: of the heads, for their FLOPs.
        has_teacher: whether there are soft targets.
        device: where they are trained.
        compute_dtype: dtype of the projections.
    """

    def __init__(
        self,
        config: HeadsConfig,
        *,
        has_teacher: bool,
        device: torch.device,
        compute_dtype: torch.dtype,
    ) -> None:
        self.flops_per_pair = flops_per_pair(config, has_teacher=has_teacher)
        self.device = device
        self.compute_dtype = compute_dtype
        self._num_positions = torch.zeros((), dtype=torch.float64, device=device)
        self._began: float | None = None
        self._peak = 0.0

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Measure what the device can do."""
        del args, state, control, kwargs
        self._peak = peak_flops(self.device, self.compute_dtype)
        self._num_positions.zero_()
        self._began = None

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Start the clock, the first time."""
        del args, state, control, kwargs
        if self._began is None:
            self._began = time.perf_counter()

    def add(self, labels: Tensor) -> None:
        """A batch's labels [N, K] went through the loss; a position counts if it has a pair."""
        self._num_positions += (labels != IGNORE).any(dim=1).sum()

    def leave_out(self, *, since: float) -> None:
        """Take the time from ``since`` (``time.perf_counter()``) until now off the clock."""
        if self._began is not None:
            self._began += time.perf_counter() - max(since, self._began)

    def log_values(self, accelerator: Accelerator, *, num_pairs: float) -> dict[str, float]:
        """The figures since the last call, of all processes together; memory is the largest.

        Args:
            accelerator: gathers from the processes.
            num_pairs: pairs that went through the loss since the last call, in all processes.
        """
        now = time.perf_counter()
        seconds = now - (now if self._began is None else self._began)
        mine = [self._num_positions.item(), memory_mib(self.device)]
        self._num_positions.zero_()
        self._began = now
        gathered = accelerator.gather(
            torch.tensor([mine], dtype=torch.float64, device=accelerator.device)
        )
        positions, memory = gathered[:, 0].sum().item(), gathered[:, 1].max().item()
        if seconds <= 0.0:
            return {"memory_mib": memory}
        achieved = num_pairs * self.flops_per_pair / seconds
        return {
            "positions_per_second": positions / seconds,
            "pairs_per_second": num_pairs / seconds,
            "model_flops_utilisation": achieved / (self._peak * accelerator.num_processes),
            "memory_mib": memory,
        }


def flops_per_pair(config: HeadsConfig, *, has_teacher: bool = False) -> int:
    """FLOPs that one valid pair costs in training: the head's products, forward and backward.

    The projection has three: logits, the gradient of its input and that of its weight, which
    ``shared`` heads do not have, since ``lm_head`` is frozen. So has a ResBlock, but the first
    one's input is a hidden state of the frozen base and needs no gradient. A teacher's logits are
    one more product.
    """
    num_products = (3 if config.layout == "full" else 2) + has_teacher
    projection = num_products * 2 * config.hidden_size * config.num_logits
    blocks = (3 * config.num_layers - 1) * 2 * config.hidden_size**2
    return projection + blocks


@functools.cache
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOPs per second of a square matrix product, the best of growing sizes; under a second.

    On a CPU that is in practice the rate at 2048³. Sizes stop growing where one takes long, since a
    CPU without instructions for ``dtype`` may be hundreds of times slower than one with them.
    """
    best = 0.0
    for size in GEMM_SIZES:
        if device.type == "cpu" and size > MAX_CPU_GEMM:
            break
        # No random numbers: training has drawn its seed already.
        left = torch.linspace(-1.0, 1.0, size * size, device=device).to(dtype).view(size, size)
        result = torch.empty_like(left)
        times = [_seconds_of_product(left, result) for _ in range(2)]
        best = max(best, 2 * size**3 / min(times))
        if min(times) > LONG_GEMM_SECONDS:
            break
    return best


def _seconds_of_product(left: torch.Tensor, result: torch.Tensor) -> float:
    _wait_for(left.device)
    begin = time.perf_counter()
    torch.mm(left, left, out=result)
    _wait_for(left.device)
    return max(time.perf_counter() - begin, 1e-9)


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def memory_mib(device: torch.device) -> float:
    """The most that tensors took on an accelerator so far; on a CPU what the process takes now."""
    if device.type == "cpu":
        return float(psutil.Process().memory_info().rss) / MIB
    return float(torch.accelerator.max_memory_allocated(device)) / MIB
