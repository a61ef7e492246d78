"""A few seconds of real work on this device: the loss kernel, the optimizer, one layer of the base.

Everything has its real shapes, but for the number of layers and heads: one of each. Values are
random; what is measured does not depend on them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from medusa_train.base_model.features import hidden_states
from medusa_train.heads.config import HeadsConfig
from medusa_train.heads.model import MedusaHeads
from medusa_train.losses import chunked_cross_entropy, default_chunk_size
from medusa_train.plan.memory import head_parameters
from medusa_train.plan.model_shape import ModelShape, one_layer_config

_SECONDS = 1.5
"""How long one measurement may repeat itself."""
_MOST_TOKENS = {"cpu": 1024}
_MOST_TOKENS_ELSEWHERE = 4096


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds on this device.

    Attributes:
        row: of one position at one head: blocks, loss and gradients.
        head: of one head apart from its rows: copies of the weight, its gradient.
        update: of AdamW's update of one head.
        layer_token: of one token in one layer of the base; None where no layer could be built.
        rank_row: of one position at one head in the accuracy report (fp32, forward only).
    """

    row: float
    head: float
    update: float
    layer_token: float | None
    rank_row: float

    def step(self, *, rows: float, heads: int, micro_batches: int) -> float:
        """Of one optimizer step of ``heads`` heads without the base."""
        forward = micro_batches * heads * self.head + rows * heads * self.row
        return forward + heads * self.update


def measure_speed(
    heads: HeadsConfig,
    config: PretrainedConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    compute_dtype: torch.dtype,
    chunk_size: int | None,
    row_tokens: int,
    seed: int = 0,
) -> Speed:
    """Measure one head and one layer.

    Args:
        heads: the shape of the heads.
        config: of the base.
        device: where training will run.
        dtype: of the base.
        compute_dtype: of the heads' products.
        chunk_size: rows of a chunk, or None for the loss's own choice.
        row_tokens: tokens of a typical row.
        seed: of the values.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    chunk = chunk_size or default_chunk_size(heads.num_logits)
    head = _Head(heads, device=device, compute_dtype=compute_dtype, chunk=chunk)
    few, many = (head.batch(count * chunk, generator) for count in (1, 3))
    first, second = (_seconds(partial(head.train, batch), device) for batch in (few, many))
    row = max(second - first, 0.0) / (2 * chunk)
    update = _seconds(head.update, device)
    rank_row = _seconds(partial(head.rank, few), device) / chunk
    return Speed(
        row=row,
        head=max(first - row * chunk, 0.0),
        update=update,
        layer_token=_layer_seconds(config, device=device, dtype=dtype, row_tokens=row_tokens),
        rank_row=rank_row,
    )


def benchmark_bytes(base: ModelShape, heads: HeadsConfig, *, chunk_size: int | None) -> int:
    """Memory that the measurement needs, roughly: one head with its optimizer, one layer."""
    chunk = chunk_size or default_chunk_size(heads.num_logits)
    matrix = heads.num_logits * heads.hidden_size
    head = 4 * (4 * head_parameters(heads) + 2 * matrix + 2 * chunk * heads.num_logits)
    return head + base.layer_parameters * base.dtype_bytes


class _Head:
    """One head with its optimizer, and the base's ``lm_head`` where the layout shares it."""

    def __init__(
        self, config: HeadsConfig, *, device: torch.device, compute_dtype: torch.dtype, chunk: int
    ) -> None:
        rows, size = config.num_logits, config.hidden_size
        one = HeadsConfig(
            num_heads=1,
            num_layers=config.num_layers,
            layout=config.layout,
            hidden_size=size,
            # A head over R tokens costs what one over the first R does.
            vocab_size=rows,
            lm_head_bias=config.lm_head_bias,
        )
        # Made empty: random values for a weight take longer than what is measured.
        with torch.device("meta"):
            heads = MedusaHeads(one)
        self.heads = heads.to_empty(device=device)
        self.shared = torch.full((rows, size), 0.01, device=device, dtype=compute_dtype)
        with torch.no_grad():
            for parameter in self.heads.parameters():
                parameter.fill_(0.01)
        self.optimizer = torch.optim.AdamW(self.heads.parameters(), lr=1e-6, fused=True)
        self.compute_dtype, self.chunk = compute_dtype, chunk

    def batch(self, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """States [N, D] and labels [N]."""
        size, device = self.heads.config.hidden_size, self.shared.device
        states = torch.randn(rows, size, generator=generator, device=device)
        high = self.heads.config.vocab_size
        return states, torch.randint(high, (rows,), generator=generator, device=device)

    def train(self, batch: tuple[Tensor, Tensor]) -> None:
        self.heads.zero_grad(set_to_none=True)
        self._loss(batch).backward()

    def update(self) -> None:
        self.optimizer.step()

    @torch.no_grad()
    def rank(self, batch: tuple[Tensor, Tensor]) -> None:
        self._loss(batch, compute_dtype=torch.float32)

    def _loss(
        self, batch: tuple[Tensor, Tensor], *, compute_dtype: torch.dtype | None = None
    ) -> Tensor:
        weight, bias = self.heads.output_weight(0, lm_head_weight=self.shared)
        return chunked_cross_entropy(
            self.heads.trunk(batch[0], head=0),
            weight,
            bias=bias,
            labels=batch[1],
            chunk_size=self.chunk,
            compute_dtype=compute_dtype or self.compute_dtype,
        ).loss_sum


@torch.no_grad()
def _layer_seconds(
    config: PretrainedConfig, *, device: torch.device, dtype: torch.dtype, row_tokens: int
) -> float | None:
    """Seconds of one token in one layer; None where the architecture has no model of one layer."""
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(one_layer_config(config), dtype=dtype)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        # Architectures whose config ties more to the number of layers than their kinds.
        return None
    model.eval()
    most = _MOST_TOKENS.get(device.type, _MOST_TOKENS_ELSEWHERE)
    width = max(1, min(row_tokens, most))
    ids = torch.ones(max(1, most // width), width, dtype=torch.int64, device=device)
    return _seconds(lambda: hidden_states(model, ids), device) / ids.numel()


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    """The median time of a call after one that does not count."""
    times: list[float] = []
    work()
    begin = time.perf_counter()
    while not times or (len(times) < 5 and time.perf_counter() - begin < _SECONDS):
        _synchronize(device)
        start = time.perf_counter()
        work()
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return median(times)


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
