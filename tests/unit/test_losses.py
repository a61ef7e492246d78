from __future__ import annotations

import math
import threading
import time

import pytest
import torch
from torch import Tensor

from medusa_train.base_model.features import LogitRule
from medusa_train.loss_memory import LossMemory
from medusa_train.loss_products import (
    FEWEST_COLUMNS,
    SLICE_ROWS,
    SMALLEST,
    add_products,
    large_columns,
)
from medusa_train.loss_targets import StoredTeacher, Teacher
from medusa_train.losses import (
    CHUNK_ELEMENTS,
    LogitAdjust,
    chunked_cross_entropy,
    default_chunk_size,
    head_weights,
    label_offset,
    ranks_of,
)
from tests.reference import losses_reference as reference


def _inputs(n: int, v: int, d: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    x = torch.randn(n, d, dtype=dtype, requires_grad=True)
    w = torch.randn(v, d, dtype=dtype, requires_grad=True)
    b = torch.randn(v, dtype=dtype, requires_grad=True)
    return x, w, b, torch.randint(0, v, (n,))


def test_label_offset_is_two_more_than_the_head() -> None:
    assert [label_offset(k) for k in range(3)] == [2, 3, 4]


def test_head_weights_are_powers_from_one() -> None:
    assert head_weights(3, decay=0.8) == pytest.approx([0.8, 0.64, 0.512])


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 100, None])
@pytest.mark.parametrize("with_bias", [False, True])
def test_loss_equals_plain_loops(chunk_size: int | None, with_bias: bool) -> None:
    x, w, b, labels = _inputs(7, 11, 5)
    bias = b if with_bias else None
    loss, ranks = chunked_cross_entropy(
        x, w, labels=labels, bias=bias, chunk_size=chunk_size, with_ranks=True
    )
    logits = (x @ w.T + (b if with_bias else 0)).tolist()
    terms = [
        reference.cross_entropy(row, label)
        for row, label in zip(logits, labels.tolist(), strict=True)
    ]
    assert loss.item() == pytest.approx(sum(terms), abs=1e-10)
    expected = [
        reference.rank(row, label) for row, label in zip(logits, labels.tolist(), strict=True)
    ]
    assert ranks.tolist() == expected


@pytest.mark.parametrize("chunk_size", [1, 3, 7])
def test_gradients_equal_autograd(chunk_size: int) -> None:
    x, w, b, labels = _inputs(7, 11, 5)
    naive = torch.nn.functional.cross_entropy(x @ w.T + b, labels, reduction="sum") * 0.3
    expected = torch.autograd.grad(naive, (x, w, b))
    loss = chunked_cross_entropy(x, w, labels=labels, bias=b, chunk_size=chunk_size).loss_sum * 0.3
    for ours, theirs in zip(torch.autograd.grad(loss, (x, w, b)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-10)


def _soft_case(dtype: torch.dtype) -> tuple[tuple[Tensor, ...], Teacher, Tensor]:
    """7 rows, 11 logits that are some of the base's 16, a bias and a soft cap in the base."""
    inputs = _inputs(7, 11, 5, dtype)
    token_map = torch.tensor([0, 1, 3, 4, 6, 8, 9, 11, 12, 14, 15])
    lm_head, lm_bias = torch.randn(16, 5, dtype=dtype), torch.randn(16, dtype=dtype)
    teacher = Teacher(lm_head[token_map], lm_bias[token_map], 0.3, _cap)
    return inputs, teacher, torch.randn(7, 5, dtype=dtype)


def _cap(logits: Tensor) -> Tensor:
    return 2.0 * torch.tanh(logits / 2.0)


@pytest.mark.parametrize("chunk_size", [1, 3, 7, None])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
def test_soft_targets_equal_plain_loops(
    chunk_size: int | None, share: float, dtype: torch.dtype, tolerance: float
) -> None:
    (x, w, b, labels), teacher, states = _soft_case(dtype)
    teacher = teacher._replace(share=share)
    loss, ranks = chunked_cross_entropy(
        x,
        w,
        labels=labels,
        bias=b,
        teacher=teacher,
        teacher_states=states,
        chunk_size=chunk_size,
        with_ranks=True,
    )
    assert teacher.bias is not None
    expected = reference.mixed_loss_and_gradients(
        x.tolist(),
        w.tolist(),
        b.tolist(),
        labels.tolist(),
        teacher_logits=_cap(states @ teacher.weight.T + teacher.bias).tolist(),
        share=share,
    )
    assert loss.item() == pytest.approx(expected[0], rel=tolerance)
    for ours, theirs in zip(torch.autograd.grad(loss, (x, w, b)), expected[1:], strict=True):
        torch.testing.assert_close(
            ours, torch.tensor(theirs, dtype=dtype), atol=tolerance, rtol=tolerance
        )
    assert torch.equal(ranks, ranks_of((x @ w.T + b).detach(), labels))


def test_soft_targets_of_the_whole_block_equal_those_of_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (x, w, b, labels), teacher, states = _soft_case(torch.float64)

    def gradients() -> tuple[Tensor, ...]:
        out = chunked_cross_entropy(
            x, w, labels=labels, bias=b, teacher=teacher, teacher_states=states
        )
        return (out.loss_sum, *torch.autograd.grad(out.loss_sum, (x, w, b)))

    whole = gradients()
    monkeypatch.setattr("medusa_train.loss_products.BLOCK_ELEMENTS", 23)
    for ours, theirs in zip(gradients(), whole, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_kept_memory_changes_no_loss_and_no_gradient(compute_dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    memory, gradients = LossMemory(), LossMemory()
    addresses = set()
    weights = [torch.randn(300, 16) for _ in range(2)]

    def gradients_of(
        x: Tensor, weight: Tensor, labels: Tensor, *, kept: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        w, h = weight.clone().requires_grad_(), x.clone().requires_grad_()
        loss = chunked_cross_entropy(
            h,
            w,
            labels=labels,
            chunk_size=32,
            compute_dtype=compute_dtype,
            memory=memory if kept else None,
            gradient_memory=gradients if kept else None,
        ).loss_sum
        (2 * loss).backward()
        assert w.grad is not None
        assert h.grad is not None
        if kept:
            addresses.add(w.grad.data_ptr())
        return loss.detach(), w.grad.clone(), h.grad

    for num_rows in (50, 20, 70):
        for weight in weights:
            x, labels = torch.randn(num_rows, 16), torch.randint(0, 300, (num_rows,))
            plain = gradients_of(x, weight, labels, kept=False)
            for one, other in zip(plain, gradients_of(x, weight, labels, kept=True), strict=True):
                assert torch.equal(one, other)
    assert len(addresses) == 1


def test_frozen_weight_gets_no_gradient() -> None:
    x, w, _, labels = _inputs(4, 6, 3)
    loss = chunked_cross_entropy(x, w.detach(), labels=labels).loss_sum
    loss.backward()
    assert x.grad is not None
    assert w.grad is None


def test_no_rows_give_a_zero_loss_that_touches_every_parameter() -> None:
    x, w, b, labels = _inputs(3, 6, 3)
    loss = chunked_cross_entropy(x[:0], w, labels=labels[:0], bias=b, with_ranks=True).loss_sum
    loss.backward()
    assert loss.item() == 0.0
    assert w.grad is not None
    assert not w.grad.any()
    assert b.grad is not None


def test_bf16_products_are_close_to_fp32() -> None:
    x, w, _, labels = _inputs(64, 500, 32, torch.float32)
    x, w = (x * 0.2).detach().requires_grad_(), (w * 0.2).detach().requires_grad_()
    exact = chunked_cross_entropy(x, w, labels=labels).loss_sum
    rough = chunked_cross_entropy(x, w, labels=labels, compute_dtype=torch.bfloat16).loss_sum
    assert rough.dtype == torch.float32
    assert rough.item() == pytest.approx(exact.item(), rel=2e-3)
    ours, theirs = (torch.autograd.grad(loss, w)[0] for loss in (rough, exact))
    assert torch.nn.functional.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) > 0.999


def test_large_columns_are_those_of_the_definition() -> None:
    torch.manual_seed(0)
    slopes = (torch.randn(9, 300) * 2.0**-13).bfloat16()
    slopes[4, 7], slopes[2, 9] = -SMALLEST, float("nan")
    expected = [
        column
        for column, values in enumerate(slopes.T.tolist())
        if any(abs(value) >= SMALLEST or math.isnan(value) for value in values)
    ]
    assert {7, 9} < set(expected) < set(range(300))
    scratch = torch.empty(10, 300, dtype=torch.int16)
    assert large_columns(slopes, scratch=scratch).tolist() == expected


def _sharp_case(num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slopes whose rows have some large numbers and a long tail, bf16 states and weight."""
    torch.manual_seed(2)
    logits = torch.randn(num_rows, 40_000) * 4.0
    slopes = torch.softmax(logits, dim=1)
    slopes[torch.arange(num_rows), torch.randint(0, 40_000, (num_rows,))] -= 1.0
    weight = torch.randn(40_000, 16) + 0.5
    return slopes, torch.randn(num_rows, 16).bfloat16(), weight.bfloat16()


@pytest.mark.parametrize("num_rows", [1, SLICE_ROWS, SLICE_ROWS + 40])
def test_small_gradients_are_left_out_where_a_whole_slice_has_no_other(num_rows: int) -> None:
    slopes, states, weight = _sharp_case(num_rows)
    grad_hidden, grad_weight = torch.empty(num_rows, 16), torch.ones(40_000, 16)
    add_products(
        slopes.bfloat16(), states, weight, grad_hidden=grad_hidden, grad_weight=grad_weight
    )
    expected = torch.ones(40_000, 16)
    for start in range(0, num_rows, SLICE_ROWS):
        part = slopes[start : start + SLICE_ROWS].bfloat16().float()
        part[:, part.abs().amax(dim=0) < SMALLEST] = 0.0
        expected += part.T @ states[start : start + SLICE_ROWS].float()
    torch.testing.assert_close(grad_weight, expected, rtol=2e-2, atol=1e-2)
    untouched = (expected == 1.0).all(dim=1)
    assert 0.05 < untouched.float().mean() < 1.0
    assert (grad_weight[untouched] == 1.0).all()
    exact = slopes @ weight.float()
    assert (grad_hidden - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nothing_is_left_out_in_full_precision(dtype: torch.dtype) -> None:
    slopes, states, weight = (value.to(dtype) for value in _sharp_case(40))
    grad_hidden, grad_weight = torch.empty_like(states), torch.zeros_like(weight)
    add_products(slopes, states, weight, grad_hidden=grad_hidden, grad_weight=grad_weight)
    torch.testing.assert_close(grad_hidden, slopes @ weight)
    torch.testing.assert_close(grad_weight, slopes.T @ states)


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_a_hopeless_row_has_its_exact_loss(compute_dtype: torch.dtype) -> None:
    """The true token's probability is no number of fp32, but its logarithm is."""
    w = torch.tensor([[200.0], [-200.0]], requires_grad=True)
    x = torch.ones(1, 1, requires_grad=True)
    loss = chunked_cross_entropy(
        x, w, labels=torch.tensor([1]), compute_dtype=compute_dtype
    ).loss_sum
    loss.backward()
    assert loss.item() == 400.0
    assert x.grad is not None
    assert x.grad.item() == 400.0


def test_default_chunk_is_bounded_by_the_logits() -> None:
    for vocab_size in (1, 8_192, 49_152, 256_000):
        assert default_chunk_size(vocab_size) * vocab_size <= CHUNK_ELEMENTS
    assert default_chunk_size(1 << 30) == 1


def test_ranks_with_ties_prefer_the_smaller_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0], [0.0, 0.0, 0.0, 0.0]])
    assert ranks_of(logits, torch.tensor([2, 3])).tolist() == [1, 3]
    assert ranks_of(logits, torch.tensor([1, 0])).tolist() == [0, 0]


class _PeakMemory:
    """The growth of this process's resident memory inside the block, sampled every 2 ms."""

    def __enter__(self) -> _PeakMemory:
        self.start = self.peak = self._resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def growth(self) -> int:
        return self.peak - self.start

    def _watch(self) -> None:
        while not self._stop.is_set():
            self.peak = max(self.peak, self._resident())
            time.sleep(0.002)

    @staticmethod
    def _resident() -> int:
        with open("/proc/self/statm") as file:  # noqa: PTH123 — read thousands of times
            return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("chunk_size", [97, None])
def test_big_vocabulary_equals_naive_within_memory(chunk_size: int | None) -> None:
    """D 64, V 150,000, T 2,048, K 4, 30 % supervised."""
    d, v, t, num_heads = 64, 150_000, 2_048, 4
    torch.manual_seed(0)
    supervised = torch.rand(t) < 0.3
    labels = torch.randint(0, v, (int(supervised.sum()),))
    x = torch.randn(len(labels), d) * 0.3
    weights = [torch.randn(v, d) * 0.3 for _ in range(num_heads)]
    results = []
    with _PeakMemory() as memory:
        for w in weights:
            xk, wk = x.clone().requires_grad_(), w.requires_grad_()
            out = chunked_cross_entropy(
                xk, wk, labels=labels, chunk_size=chunk_size, with_ranks=True
            )
            out.loss_sum.backward()
            results.append((out.loss_sum.detach(), out.ranks, xk.grad))
    assert memory.growth < t * v * 4, "one full [T, V] fp32 tensor is the limit"
    # The naive way, one head at a time, since K of its logits do not fit the limit above.
    loss, ranks, grad_x = results[0]
    xn, wn = x.clone().requires_grad_(), weights[0].detach().clone().requires_grad_()
    logits = xn @ wn.T
    naive = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    naive.backward()
    torch.testing.assert_close(loss, naive.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad_x, xn.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weights[0].grad, wn.grad, rtol=1e-5, atol=1e-5)
    assert torch.equal(ranks, ranks_of(logits.detach(), labels))


def test_big_vocabulary_with_chunks_of_one_row() -> None:
    torch.manual_seed(0)
    x = (torch.randn(24, 64) * 0.3).requires_grad_()
    w = (torch.randn(150_000, 64) * 0.3).requires_grad_()
    labels = torch.randint(0, 150_000, (24,))
    loss = chunked_cross_entropy(x, w, labels=labels, chunk_size=1).loss_sum
    naive = torch.nn.functional.cross_entropy(x @ w.T, labels, reduction="sum")
    torch.testing.assert_close(loss, naive, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(
        torch.autograd.grad(loss, (x, w)), torch.autograd.grad(naive, (x, w)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_size", [1, 4, None])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_divergence_from_a_teacher_with_adjusted_logits(
    chunk_size: int | None, soft_cap: float | None
) -> None:
    """KL(teacher ‖ model) and its gradients, against autograd on whole logits."""
    rule = LogitRule(scale=0.5, soft_cap=soft_cap)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, w, b = draw(7, 5).requires_grad_(), draw(11, 5).requires_grad_(), draw(11).requires_grad_()
    teacher_x, teacher_w, teacher_b = draw(7, 5), draw(11, 5), draw(11)
    labels = torch.arange(7)
    log_p = (rule.apply(x @ w.T + b)).log_softmax(dim=1)
    log_q = (rule.apply(teacher_x @ teacher_w.T + teacher_b)).log_softmax(dim=1)
    divergence = (log_q.exp() * (log_q - log_p)).sum(dim=1)
    expected = 0.7 * divergence.sum() - 0.3 * log_p.gather(1, labels[:, None]).sum()
    wanted = torch.autograd.grad(expected, (x, w, b))
    ours = chunked_cross_entropy(
        x,
        w,
        bias=b,
        labels=labels,
        teacher=Teacher(teacher_w, teacher_b, 0.7, rule.apply, as_divergence=True),
        teacher_states=teacher_x,
        chunk_size=chunk_size,
        adjust=LogitAdjust(rule.apply, rule.slope),
    )
    torch.testing.assert_close(ours.loss_sum, expected)
    for got, want in zip(torch.autograd.grad(ours.loss_sum, (x, w, b)), wanted, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
def test_divergence_from_oneself_is_zero_and_so_are_its_gradients(
    compute_dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 32, generator=generator).requires_grad_()
    w = torch.randn(3_000, 32, generator=generator)
    ours = chunked_cross_entropy(
        x,
        w,
        labels=torch.zeros(200, dtype=torch.int64),
        teacher=Teacher(w, None, 1.0, lambda logits: logits, as_divergence=True),
        teacher_states=x.detach(),
        compute_dtype=compute_dtype,
        leaves_out=False,
    )
    assert abs(ours.loss_sum.item()) / 200 < 1e-6
    [gradient] = torch.autograd.grad(ours.loss_sum, x)
    assert gradient.abs().max() < 1e-3


@pytest.mark.parametrize(
    ("num_columns", "leaves_out", "is_left_out"),
    [
        (FEWEST_COLUMNS, True, True),
        (FEWEST_COLUMNS, False, False),
        (FEWEST_COLUMNS - 1, True, False),
    ],
)
def test_nothing_is_left_out_of_few_columns_or_where_that_is_said(
    num_columns: int, leaves_out: bool, is_left_out: bool
) -> None:
    slopes = torch.full((4, num_columns), SMALLEST / 4, dtype=torch.bfloat16)
    hidden = torch.ones(4, 3, dtype=torch.bfloat16)
    weight = torch.ones(num_columns, 3, dtype=torch.bfloat16)
    grad_hidden, grad_weight = torch.zeros(4, 3), torch.zeros(num_columns, 3)
    add_products(
        slopes,
        hidden,
        weight,
        grad_hidden=grad_hidden,
        grad_weight=grad_weight,
        leaves_out=leaves_out,
    )
    expected = 0.0 if is_left_out else SMALLEST / 4
    assert grad_hidden[0, 0].item() == pytest.approx(num_columns * expected, rel=1e-2)
    assert grad_weight[0, 0].item() == pytest.approx(4 * expected, rel=1e-2)


def _stored_divergence(log_q: Tensor, log_p: Tensor, ids: Tensor, kind: str) -> Tensor:
    """The definition, with autograd."""
    picked = log_p.gather(1, ids)
    if kind == "samples":
        return (log_q - picked).mean(dim=1).sum()
    rest_q = 1 - log_q.exp().sum(dim=1)
    rest_p = 1 - picked.exp().sum(dim=1)
    listed = (log_q.exp() * (log_q - picked)).sum(dim=1)
    return (listed + rest_q * (rest_q.log() - rest_p.log())).sum()


@pytest.mark.parametrize("kind", ["top", "samples"])
@pytest.mark.parametrize("chunk_size", [2, None])
def test_stored_targets_equal_their_definition(kind: str, chunk_size: int | None) -> None:
    x, w, b, labels = _inputs(7, 11, 5)
    generator = torch.Generator().manual_seed(4)
    log_all = torch.randn(7, 11, generator=generator, dtype=torch.float64).log_softmax(dim=1)
    if kind == "top":
        ids = log_all.topk(3, dim=1).indices
    else:  # a token may be drawn twice
        ids = torch.multinomial(log_all.exp(), 4, replacement=True, generator=generator)
        assert any(len(set(row)) < 4 for row in ids.tolist())
    log_q = log_all.gather(1, ids)
    expected = _stored_divergence(log_q, (x @ w.T + b).log_softmax(dim=1), ids, kind)
    wanted = torch.autograd.grad(expected, (x, w, b))
    ours = chunked_cross_entropy(
        x,
        w,
        bias=b,
        labels=labels,
        teacher=StoredTeacher(ids, log_q, kind),  # type: ignore[arg-type]
        chunk_size=chunk_size,
        leaves_out=False,
    )
    torch.testing.assert_close(ours.loss_sum, expected)
    for got, want in zip(torch.autograd.grad(ours.loss_sum, (x, w, b)), wanted, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", ["top", "samples"])
def test_stored_divergence_from_oneself_is_zero(kind: str) -> None:
    x, w, b, labels = _inputs(6, 20, 5)
    log_p = (x @ w.T + b).detach().log_softmax(dim=1)
    ids = log_p.topk(4, dim=1).indices
    teacher = StoredTeacher(ids, log_p.gather(1, ids), kind)  # type: ignore[arg-type]
    ours = chunked_cross_entropy(x, w, bias=b, labels=labels, teacher=teacher)
    assert ours.loss_sum.item() == pytest.approx(0.0, abs=1e-9)
